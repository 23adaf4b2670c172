// Messages on a data stream, from a peer that has proven itself but sends anything: headers,
// lengths that do not fit, encoded chunks with any scales, an end in the middle.
#include <sys/socket.h>

#include "fuzz_lane.h"

using namespace qcoll;
using namespace qcoll::attacks;
using namespace std::chrono_literals;

namespace {

std::vector<std::byte> messages(const Expectation& expected, Source& in) {
  enum : std::uint8_t { kRaw = 1, kRepair = 2, kOtherLength = 4 };
  std::vector<std::byte> bytes;
  for (std::uint32_t chunk = 0; chunk < 4 && !in.empty(); ++chunk) {
    const std::uint8_t choice = in.u8();
    if (choice & kRaw) {
      const ConstBytes raw = in.bytes(in.u8());
      bytes.insert(bytes.end(), raw.begin(), raw.end());
      continue;
    }
    std::byte header[wire::Header::kBytes];
    damaged_header(expected, chunk, in, choice >> 4, choice & kRepair, header);
    bytes.insert(bytes.end(), header, header + sizeof(header));
    const std::size_t length =
        choice & kOtherLength ? in.u16() % 8192 : expected.header(chunk).payload_bytes;
    const ConstBytes pattern = in.bytes(in.u8());
    for (std::size_t i = 0; i < length; ++i)
      bytes.push_back(pattern.empty() ? std::byte{0} : pattern[i % pattern.size()]);
  }
  return bytes;
}

}  // namespace

QCOLL_FUZZ_TARGET(stream) {
  static const auto meshes = transport::make_loopback({0, 1}, {.memory_bytes = kMemory});
  Expectation expected(in);
  const std::vector<std::byte> bytes = messages(expected, in);
  const Deadline deadline(5s);
  {
    const transport::Connection peer = meshes[1]->connect(0, deadline);
    if (!bytes.empty())
      ensure(::send(peer.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
                 static_cast<ssize_t>(bytes.size()),
             "a socket takes the messages");
  }
  receive_all(*meshes[0], expected, deadline);
  meshes[0]->take_accepted();
  meshes[0]->quiet_bell();
}
