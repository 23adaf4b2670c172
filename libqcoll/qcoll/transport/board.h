// The layout of a rank's shared memory: one line of flags, then for each ring a control (what its
// owner published, where its slots lie, how far each reader of the node has come), then slots.
//
// Positions are (run, count) in one word: "count messages of this ring in schedule number run".
// Runs only grow, so counters are never reset and no reader can mistake an old message for new.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "qcoll/base/types.h"
#include "qcoll/transport/memory.h"

namespace qcoll::transport {

using Position = std::uint64_t;
constexpr Position position(std::uint32_t run, std::uint32_t count) {
  return (static_cast<Position>(run) << 32) | count;
}
constexpr std::uint32_t run_of(Position p) { return static_cast<std::uint32_t>(p >> 32); }

class Board {
 public:
  static constexpr std::size_t kLine = 64;  // bytes; counters of different writers do not share

  struct alignas(kLine) RingControl {
    std::atomic<Position> published;
    // Written by the owner before it publishes the first message of a run. Atomic, so that a
    // reader takes each once and uses what it has checked.
    std::atomic<std::uint64_t> offset;  // of the ring's slots in the memory
    std::atomic<std::uint64_t> slot_bytes;
    std::atomic<std::uint32_t> depth;
  };
  struct alignas(kLine) Consumed {
    std::atomic<Position> position;
  };
  static_assert(sizeof(RingControl) == kLine && sizeof(Consumed) == kLine);
  static_assert(std::atomic<Position>::is_always_lock_free);

  Board() = default;
  Board(Memory& memory, std::size_t tags, std::size_t readers)
      : memory_(&memory), tags_(tags), readers_(readers) {}

  static std::size_t control_bytes(std::size_t tags, std::size_t readers) {
    return align_up(kLine + tags * (1 + readers) * kLine, 4096);
  }

  // Set by the owner before it sleeps; whoever clears it rings the owner's bell.
  std::atomic<std::uint32_t>& sleeping() const {
    return *reinterpret_cast<std::atomic<std::uint32_t>*>(memory_->data());
  }
  RingControl& control(std::size_t tag) const {
    return *reinterpret_cast<RingControl*>(control_line(tag, 0));
  }
  std::atomic<Position>& consumed(std::size_t tag, std::size_t reader) const {
    return reinterpret_cast<Consumed*>(control_line(tag, 1 + reader))->position;
  }
  // Where message `index` of a peer's ring lies. Not valid when its control leads outside the
  // peer's slots: its memory is not trusted.
  struct Place {
    std::size_t offset = 0;
    std::size_t bytes = 0;
    bool valid = false;
  };
  Place place_of(std::size_t tag, std::uint32_t index) const {
    const RingControl& ring = control(tag);
    const std::uint64_t offset = ring.offset.load(std::memory_order_relaxed);
    const std::uint64_t slot = ring.slot_bytes.load(std::memory_order_relaxed);
    const std::uint32_t depth = ring.depth.load(std::memory_order_relaxed);
    if (depth == 0 || slot < kLine || slot % kLine != 0 || offset % kLine != 0 ||
        offset < slots_offset() || offset > bytes() || slot > bytes() - offset ||
        index % depth > (bytes() - offset - slot) / slot)
      return {};
    return {offset + (index % depth) * slot, slot, true};
  }
  std::byte* at(std::size_t offset) const { return memory_->data() + offset; }

  std::size_t tags() const { return tags_; }
  std::size_t slots_offset() const { return control_bytes(tags_, readers_); }
  std::size_t bytes() const { return memory_->bytes(); }

 private:
  std::byte* control_line(std::size_t tag, std::size_t line) const {
    return memory_->data() + kLine + (tag * (1 + readers_) + line) * kLine;
  }

  Memory* memory_ = nullptr;
  std::size_t tags_ = 0;
  std::size_t readers_ = 0;
};

}  // namespace qcoll::transport
