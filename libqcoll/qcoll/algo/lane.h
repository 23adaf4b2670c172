// What an algorithm needs from the machine it runs on. Algorithms are templates over a lane, so
// that one source runs on CPU transports (host/host_lane.h), and is recorded and checked for
// every topology without any (algo/trace_lane.h).
//
// A *slot* is encoded memory that several readers may take: local peers read it in place, the
// rail sends it, data from the rail lands in a slot that local peers read in turn. Slots form
// *rings*, one for each stream of messages; the ring's tag travels with its messages.
//
//   lane.open(plans)              the rings of this rank for one schedule
//   lane.reserve(tag, count)      the next slot of an encode ring, with room for `count` elements
//                                 in each part; waits for the slot's slowest reader
//   lane.encode(slot, part, x)    elements of the caller's input
//   lane.encode_sum(slot, part, sum, count)
//   lane.publish(slot, readers)   never waits
//   lane.receive(from, tag, count) the next message of that ring; waits for it
//   lane.release(slot)            this rank has read a received slot
//   lane.decode(slot, part, y)    into the caller's output
//   lane.copy_own(x)              an own slice, from input to output, exactly
//   lane.add_input(sum, x, first) sum = x or sum += x, in fp32
//   lane.add_slot(sum, slot, part, count, first)
//   lane.add_sum(sum, other, count, first)
//   lane.store(sum, y)            the reduction's last step (mean, factor), cast and written
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "qcoll/base/types.h"
#include "qcoll/wire/codec_spec.h"

namespace qcoll::algo {

// Elements [begin, begin + count) of slice `slice` (the part of the tensor that belongs to one
// rank) of the caller's input or output.
struct Piece {
  Rank slice = 0;
  std::size_t begin = 0;
  std::size_t count = 0;
};

// An fp32 accumulator of one chunk, by number.
using SumId = std::size_t;

struct RingPlan {
  std::uint32_t tag = 0;
  Rank from = -1;         // -1: this rank encodes into it; else messages of that rank land in it
  std::size_t parts = 1;  // separately encoded pieces in one message
  std::size_t level = 0;  // index into the call's codecs, and where its bytes are counted
  bool partial_sums = false;  // carries sums on their way to the next hop
  std::vector<Rank> readers;  // ranks that read it in place or have it sent
  // Elements that all messages of the ring hold together, where it differs from ring to ring
  // (all-to-all): both ends compare it.
  std::optional<std::size_t> count = std::nullopt;
};

template <class L>
concept Lane = requires(L lane, typename L::Slot slot, std::span<const RingPlan> plans,
                        std::span<const Rank> readers, std::uint32_t tag, Piece piece, SumId sum,
                        std::size_t n) {
  lane.open(plans);
  { lane.reserve(tag, n) } -> std::same_as<typename L::Slot>;
  lane.encode(slot, n, piece);
  lane.encode_sum(slot, n, sum, n);
  lane.publish(slot, readers);
  { lane.receive(Rank{}, tag, n) } -> std::same_as<typename L::Slot>;
  lane.release(slot);
  lane.decode(slot, n, piece);
  lane.copy_own(piece);
  lane.add_input(sum, piece, bool{});
  lane.add_slot(sum, slot, n, n, bool{});
  lane.add_sum(sum, sum, n, bool{});
  lane.store(sum, piece);
};

}  // namespace qcoll::algo
