// Message authentication for connections: HMAC-SHA256 and random nonces, from OpenSSL.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "qcoll/base/types.h"

namespace qcoll::wire {

inline constexpr std::size_t kMacBytes = 32;
inline constexpr std::size_t kNonceBytes = 16;
using Mac = std::array<std::byte, kMacBytes>;
using Nonce = std::array<std::byte, kNonceBytes>;
using Secret = std::array<std::byte, 32>;

Mac hmac_sha256(const Secret& secret, ConstBytes message);
bool equal_in_constant_time(ConstBytes a, ConstBytes b);
void fill_random(Bytes out);  // cryptographically secure; throws TransportError

}  // namespace qcoll::wire
