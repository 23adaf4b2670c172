// How a connection proves that both its ends belong to the group (docs/wire_format.md):
//
//   dialler  -> listener  hello      who, to whom, what for, and a nonce
//   listener -> dialler   challenge  a nonce, and HMAC(secret, "L" + hello + that nonce)
//   dialler  -> listener  proof      HMAC(secret, "D" + hello + that nonce)
//
// The secret comes from the rendezvous store and is new for each group. Nonces are random, so that
// nothing recorded can be replayed.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "qcoll/base/abort_flag.h"
#include "qcoll/base/deadline.h"
#include "qcoll/base/types.h"
#include "qcoll/wire/mac.h"

namespace qcoll::transport {

enum class Purpose : std::uint8_t { kControl = 1, kData = 2 };

struct Hello {
  static constexpr std::size_t kBytes = 48;
  static constexpr std::uint32_t kMagic = 0x53484351;  // "QCHS"
  static constexpr std::uint8_t kVersion = 1;

  Purpose purpose = Purpose::kControl;
  std::uint64_t group = 0;
  Rank from = -1;
  Rank to = -1;
  wire::Nonce nonce{};
};

inline constexpr std::size_t kChallengeBytes = wire::kNonceBytes + wire::kMacBytes;
inline constexpr std::size_t kProofBytes = wire::kMacBytes;

std::array<std::byte, Hello::kBytes> serialize(const Hello& hello);
std::optional<Hello> parse_hello(ConstBytes raw);  // nothing when it is not a hello of this version

wire::Mac listener_mac(const wire::Secret& secret, ConstBytes hello, const wire::Nonce& nonce);
wire::Mac dialler_mac(const wire::Secret& secret, ConstBytes hello, const wire::Nonce& nonce);

// The key of this one connection, for its encryption.
wire::Secret connection_key(const wire::Secret& secret, ConstBytes hello, const wire::Nonce& nonce);

// The dialler's half, blocking; returns the connection's key. Throws TransportError when the
// listener cannot prove itself.
wire::Secret shake_hands_as_dialler(int fd, Hello hello, const wire::Secret& secret,
                                    const Deadline& deadline, const AbortFlag& abort);

}  // namespace qcoll::transport
