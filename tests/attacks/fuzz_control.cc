// Frames on a control link, from a peer that has proven itself but sends anything.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "fuzz.h"
#include "qcoll/transport/group_links.h"
#include "qcoll/wire/bytes.h"

using namespace qcoll;
using namespace qcoll::transport;
using attacks::ensure;

namespace {

constexpr std::size_t kFrameHeader = 5;

void pump(GroupLinks& links) {
  std::vector<pollfd> entries;
  links.append_poll_entries(entries);
  for (const pollfd& entry : entries) links.handle_events(entry.fd, POLLIN);
}

// All that the rank under attack has sent back.
std::vector<std::byte> replies(int fd) {
  std::vector<std::byte> all;
  std::byte buffer[8192];
  for (ssize_t got; (got = ::recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT)) > 0;)
    all.insert(all.end(), buffer, buffer + got);
  return all;
}

void check_frames(ConstBytes bytes) {
  while (!bytes.empty()) {
    ensure(bytes.size() >= kFrameHeader, "replies are whole frames");
    const auto length = wire::get<std::uint32_t>(bytes.data());
    const auto type = wire::get<std::uint8_t>(bytes.data() + 4);
    ensure(type >= 1 && type <= 5, "replies are of a known type");
    ensure(bytes.size() >= kFrameHeader + length, "replies are whole frames");
    bytes = bytes.subspan(kFrameHeader + length);
  }
}

}  // namespace

QCOLL_FUZZ_TARGET(control) {
  static const auto bell = std::make_shared<const Bell>(Bell::create());
  const std::size_t cut = in.u16();
  const std::uint8_t calls = in.u8() % 4;
  const ConstBytes bytes = in.bytes(32 * 1024);

  // Anew for each input, at one place: it is large.
  static std::optional<OperationLog> fresh;
  fresh.emplace();
  const std::shared_ptr<OperationLog> log(&*fresh, [](OperationLog*) {});
  GroupLinks links(0, 3, 42, wire::Secret{}, log, bell);
  for (int i = 0; i < calls; ++i) {
    std::optional<OperationLog::Conflict> conflict;
    log->add("all_gather", &conflict);
  }
  int ends[2];
  ensure(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
         "there are descriptors");
  Fd peer(ends[1]);
  ensure(links.adopt(Purpose::kControl, {Fd(ends[0]), 1}), "the link opens");

  const ConstBytes parts[] = {bytes.first(std::min(cut, bytes.size())),
                              bytes.subspan(std::min(cut, bytes.size()))};
  for (const ConstBytes part : parts) {
    // Of the second part nothing goes out when the first one has ended the link.
    const ssize_t sent = ::send(peer.get(), part.data(), part.size(), MSG_NOSIGNAL);
    const bool ended = links.departed(1) || links.abort_flag().raised();
    ensure(ended || sent == static_cast<ssize_t>(part.size()), "a link takes 32 KiB");
    pump(links);
  }
  std::optional<OperationLog::Conflict> conflict;
  log->add("reduce_scatter", &conflict);  // what the peer announced is compared now
  check_frames(replies(peer.get()));
  ::shutdown(peer.get(), SHUT_RDWR);  // close() may wait for who looks at /proc/PID/fd
  pump(links);
  std::vector<pollfd> left;
  links.append_poll_entries(left);
  ensure(left.empty(), "the end of a link closes it");
  ensure(links.departed(1) || links.abort_flag().raised(),
         "a link that ends without a goodbye ends the group");
  bell->quiet();
}
