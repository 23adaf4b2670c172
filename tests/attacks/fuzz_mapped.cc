// The memory of a peer of the same node with anything in it: positions, where its slots lie, and
// the messages in them.
#include "fuzz_lane.h"

using namespace qcoll;
using namespace qcoll::attacks;
using namespace std::chrono_literals;

QCOLL_FUZZ_TARGET(mapped) {
  enum : std::uint8_t { kRightControl = 1, kRepair = 2, kRightPublished = 4 };
  static const auto meshes = transport::make_loopback({0, 0}, {.memory_bytes = kMemory});
  Expectation expected(in);
  transport::Memory& memory = meshes[1]->memory_of(1);
  const transport::Board board(memory, kTags, 2);
  const std::uint8_t choice = in.u8();

  auto& control = board.control(kTag);
  const auto run = expected.call.envelope.run;
  control.published.store(choice & kRightPublished ? transport::position(run, 3) : in.u64());
  control.offset = choice & kRightControl ? board.slots_offset() : in.u64();
  control.slot_bytes = choice & kRightControl ? 16384 : in.u64();
  control.depth = choice & kRightControl ? kDepth : in.u32();
  std::byte* slots = board.at(board.slots_offset());
  for (std::uint32_t chunk = 0; chunk < kDepth; ++chunk) {
    std::byte* const slot = slots + chunk * 16384;
    damaged_header(expected, chunk, in, choice >> 4, choice & kRepair, slot);
    const ConstBytes payload = in.bytes(in.u8());
    std::copy(payload.begin(), payload.end(), slot + wire::Header::kBytes);
  }
  // What has not been published will not come: the wait is over at once.
  receive_all(*meshes[0], expected, Deadline(0s));
  meshes[0]->quiet_bell();
}
