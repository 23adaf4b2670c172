// The rings of one run, as Exchange keeps them.
#pragma once

#include "qcoll/transport/exchange.h"

namespace qcoll::transport {

// Slots in this rank's memory: it encodes into them, or messages from a stream land in them.
struct Exchange::OwnRing {
  struct SlotState {
    std::uint32_t sends = 0;  // to streams, that the kernel has not taken yet
    Rank sent_to = -1;        // the last of them
    bool held = false;        // landed here and not released
    std::uint32_t elements = 0;
    std::uint32_t payload_bytes = 0;
  };

  std::uint32_t tag = 0;
  Rank from = -1;
  wire::CodecSpec codec;
  std::uint64_t count = 0;
  std::byte* memory = nullptr;
  std::size_t slot_bytes = 0;
  std::uint32_t depth = 0;
  std::vector<Rank> mapped_readers;

  std::uint32_t filled = 0;    // messages encoded here, or completely landed
  std::uint32_t received = 0;  // landed messages that the schedule has taken
  std::vector<SlotState> slots;

  std::byte* slot(std::uint32_t index) const { return memory + (index % depth) * slot_bytes; }
  SlotState& state(std::uint32_t index) { return slots[index % depth]; }
};

// Slots in a mapped peer's memory, read in place.
struct Exchange::PeerRing {
  struct Held {
    std::uint32_t sends = 0;
    bool released = false;
  };

  Rank owner = -1;
  std::uint32_t tag = 0;
  wire::CodecSpec codec;
  std::uint64_t count = 0;
  std::uint32_t received = 0;
  std::uint32_t consumed = 0;  // what the owner was told
  std::deque<Held> held;       // the messages [consumed, received)
};

}  // namespace qcoll::transport
