#include "qcoll/transport/handshake.h"

#include <algorithm>
#include <vector>

#include "qcoll/base/error.h"
#include "qcoll/transport/socket.h"
#include "qcoll/wire/bytes.h"

namespace qcoll::transport {
namespace {

wire::Mac mac_of(char role, const wire::Secret& secret, ConstBytes hello,
                 const wire::Nonce& nonce) {
  std::vector<std::byte> message{static_cast<std::byte>(role)};
  message.insert(message.end(), hello.begin(), hello.end());
  message.insert(message.end(), nonce.begin(), nonce.end());
  return wire::hmac_sha256(secret, message);
}

}  // namespace

std::array<std::byte, Hello::kBytes> serialize(const Hello& hello) {
  std::array<std::byte, Hello::kBytes> raw{};
  wire::put(raw.data(), Hello::kMagic);
  wire::put(raw.data() + 4, Hello::kVersion);
  wire::put(raw.data() + 5, static_cast<std::uint8_t>(hello.purpose));
  wire::put(raw.data() + 8, hello.group);
  wire::put(raw.data() + 16, static_cast<std::uint32_t>(hello.from));
  wire::put(raw.data() + 20, static_cast<std::uint32_t>(hello.to));
  std::copy(hello.nonce.begin(), hello.nonce.end(), raw.begin() + 24);
  return raw;
}

std::optional<Hello> parse_hello(ConstBytes raw) {
  if (raw.size() != Hello::kBytes || wire::get<std::uint32_t>(raw.data()) != Hello::kMagic ||
      wire::get<std::uint8_t>(raw.data() + 4) != Hello::kVersion)
    return std::nullopt;
  const auto purpose = wire::get<std::uint8_t>(raw.data() + 5);
  if (purpose != static_cast<std::uint8_t>(Purpose::kControl) &&
      purpose != static_cast<std::uint8_t>(Purpose::kData))
    return std::nullopt;
  const auto zero = [](std::byte b) { return b == std::byte{0}; };
  if (!std::all_of(raw.begin() + 6, raw.begin() + 8, zero) ||
      !std::all_of(raw.begin() + 40, raw.end(), zero))
    return std::nullopt;
  Hello hello{.purpose = static_cast<Purpose>(purpose),
              .group = wire::get<std::uint64_t>(raw.data() + 8),
              .from = static_cast<Rank>(wire::get<std::uint32_t>(raw.data() + 16)),
              .to = static_cast<Rank>(wire::get<std::uint32_t>(raw.data() + 20))};
  std::copy(raw.begin() + 24, raw.begin() + 24 + wire::kNonceBytes, hello.nonce.begin());
  return hello;
}

wire::Mac listener_mac(const wire::Secret& secret, ConstBytes hello, const wire::Nonce& nonce) {
  return mac_of('L', secret, hello, nonce);
}

wire::Mac dialler_mac(const wire::Secret& secret, ConstBytes hello, const wire::Nonce& nonce) {
  return mac_of('D', secret, hello, nonce);
}

wire::Secret connection_key(const wire::Secret& secret, ConstBytes hello,
                            const wire::Nonce& nonce) {
  return mac_of('K', secret, hello, nonce);
}

wire::Secret shake_hands_as_dialler(int fd, Hello hello, const wire::Secret& secret,
                                    const Deadline& deadline, const AbortFlag& abort) {
  wire::fill_random(hello.nonce);
  const auto raw = serialize(hello);
  send_all(fd, raw, deadline, abort);
  std::array<std::byte, kChallengeBytes> challenge;
  receive_all(fd, challenge, deadline, abort);
  wire::Nonce nonce;
  std::copy(challenge.begin(), challenge.begin() + wire::kNonceBytes, nonce.begin());
  const wire::Mac expected = listener_mac(secret, raw, nonce);
  if (!wire::equal_in_constant_time(ConstBytes(challenge).subspan(wire::kNonceBytes), expected))
    throw TransportError(
        "the process that listens there does not know the group's secret; is it "
        "of another job?");
  send_all(fd, dialler_mac(secret, raw, nonce), deadline, abort);
  return connection_key(secret, raw, nonce);
}

}  // namespace qcoll::transport
