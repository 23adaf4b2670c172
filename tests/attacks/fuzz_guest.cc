// A connection to the control plane that has not proven itself: hello, challenge, proof, in any
// pieces and with anything in them. Only who knows the secret comes in.
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "fuzz.h"
#include "qcoll/transport/guest.h"
#include "qcoll/wire/bytes.h"

using namespace qcoll;
using namespace qcoll::transport;
using attacks::ensure;

namespace {

constexpr std::uint64_t kGroup = 42;
constexpr int kRanks = 4;

struct Pair {
  Pair() {
    int ends[2];
    ensure(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
           "there are descriptors");
    plane = Fd(ends[0]);
    stranger = Fd(ends[1]);
  }
  Fd plane;
  Fd stranger;
};

// A plane with one group, whose control links are all open: a second one is refused.
struct Setting {
  Setting() {
    for (std::size_t i = 0; i < secret.size(); ++i) secret[i] = static_cast<std::byte>(i * 7);
    links =
        std::make_shared<GroupLinks>(0, kRanks, kGroup, secret, std::make_shared<OperationLog>(),
                                     std::make_shared<const Bell>(Bell::create()));
    for (Rank peer = 1; peer < kRanks; ++peer)
      ensure(links->adopt(Purpose::kControl, {std::move(pairs[peer].plane), peer}), "links open");
  }
  Pair pairs[kRanks];
  wire::Secret secret;
  std::shared_ptr<GroupLinks> links;
  Guest::Find find = [this](const Hello& hello) {
    return hello.group == kGroup && hello.to == 0 ? links : nullptr;
  };
};

void send(const Fd& fd, ConstBytes bytes) {
  if (bytes.empty()) return;
  ensure(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
             static_cast<ssize_t>(bytes.size()),
         "a socket takes a few bytes");
}

}  // namespace

QCOLL_FUZZ_TARGET(guest) {
  static Setting setting;
  enum : std::uint8_t { kRightForm = 1, kRightGroup = 2, kRightProof = 4, kEnd = 8 };
  const std::uint8_t choice = in.u8();
  const std::size_t cut = in.u8();
  std::vector<std::byte> bytes;
  for (const std::byte b : in.bytes(256)) bytes.push_back(b);
  if (bytes.size() >= Hello::kBytes) {
    if (choice & kRightForm) {
      wire::put(bytes.data(), Hello::kMagic);
      bytes[4] = std::byte{Hello::kVersion};
    }
    if (choice & kRightGroup) {
      wire::put(bytes.data() + 8, kGroup);
      wire::put(bytes.data() + 20, std::uint32_t{0});
    }
  }
  Pair pair;
  Guest guest(std::move(pair.plane), Clock::now() + std::chrono::seconds(10));
  const auto hear = [&] { return guest.hear(setting.find); };

  const ConstBytes all(bytes);
  const ConstBytes first = all.first(std::min(cut, all.size()));
  send(pair.stranger, first);
  bool stays = hear();
  bool proven = false;
  std::byte challenge[kChallengeBytes];
  const ssize_t got = ::recv(pair.stranger.get(), challenge, sizeof(challenge), MSG_DONTWAIT);
  if (stays && got == static_cast<ssize_t>(kChallengeBytes) && (choice & kRightProof) &&
      first.size() == Hello::kBytes) {
    wire::Nonce nonce;
    std::copy_n(challenge, nonce.size(), nonce.begin());
    send(pair.stranger, dialler_mac(setting.secret, all.first(Hello::kBytes), nonce));
    proven = true;
  } else {
    ensure(got <= 0 || first.size() >= Hello::kBytes, "no challenge comes before a whole hello");
    send(pair.stranger, all.subspan(first.size()));
  }
  if (stays) stays = hear();
  if (stays && (choice & kEnd)) {
    // Not by close(): whoever looks at /proc/PID/fd meanwhile keeps a socket open a moment longer.
    ::shutdown(pair.stranger.get(), SHUT_RDWR);
    stays = hear();
    ensure(!stays, "the end of a connection is seen");
  }
  ensure(guest.kept_bytes() <= Hello::kBytes + kProofBytes, "a guest costs a few bytes");
  ensure(!stays || guest.kept_bytes() < Hello::kBytes + kProofBytes,
         "whoever sent a proof is admitted or shown out");

  const auto accepted = setting.links->take_accepted();
  ensure(accepted.empty() || proven, "only a right proof opens the door");
  for (const Connection& connection : accepted)
    ensure(connection.peer() > 0 && connection.peer() < kRanks, "a peer is a rank");
  ensure(!setting.links->abort_flag().raised(), "a stranger never ends the group");
}
