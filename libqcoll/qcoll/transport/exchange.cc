#include "qcoll/transport/exchange.h"

#include <array>
#include <cstring>

#include "qcoll/transport/exchange_rings.h"

namespace qcoll::transport {

Exchange::Exchange(Mesh& mesh, std::size_t tags) : mesh_(mesh) {
  const auto& neighbours = mesh.neighbours();
  for (std::size_t i = 0; i < neighbours.size(); ++i) {
    reader_of_[neighbours[i]] = i;
    if (mesh.mapped(neighbours[i]))
      peer_boards_[neighbours[i]] = Board(mesh.memory_of(neighbours[i]), tags, neighbours.size());
  }
  board_ = Board(mesh.memory_of(mesh.rank()), tags, neighbours.size());
}

Exchange::~Exchange() = default;

void Exchange::begin(const wire::Envelope& envelope, std::span<const RingSpec> rings,
                     std::uint32_t depth, const Deadline& deadline) {
  deadline_ = deadline;
  drain_previous_run();
  envelope_ = envelope;
  layout_rings(rings, depth);
}

// Slots are laid out anew for each run, so every reader must have left those of the last one.
void Exchange::drain_previous_run() {
  for (const OwnRing& ring : own_rings_)
    for (const Rank reader : ring.mapped_readers) {
      if (ring.filled == 0) continue;  // its readers' counters are still at an earlier run
      const auto& consumed = board_.consumed(ring.tag, reader_of_[reader]);
      const Position all = position(envelope_.run, ring.filled);
      wait_until([&] { return consumed.load() >= all; },
                 {reader, "to read what the previous collective left for it"});
    }
}

void Exchange::layout_rings(std::span<const RingSpec> rings, std::uint32_t depth) {
  own_rings_.clear();
  peer_rings_.clear();
  encode_rings_.clear();
  landing_rings_.clear();
  mapped_rings_.clear();
  sends_from_peer_slots_ = false;
  std::size_t offset = board_.slots_offset();
  for (const RingSpec& spec : rings) {
    if (spec.from >= 0 && mesh_.mapped(spec.from)) {
      auto& ring = peer_rings_.emplace_back();
      ring.owner = spec.from;
      ring.tag = spec.tag;
      ring.codec = spec.codec;
      ring.count = spec.count.value_or(envelope_.count);
      mapped_rings_[{spec.from, spec.tag}] = &ring;
      continue;
    }
    auto& ring = own_rings_.emplace_back();
    ring.tag = spec.tag;
    ring.from = spec.from;
    ring.codec = spec.codec;
    ring.count = spec.count.value_or(envelope_.count);
    ring.slot_bytes = align_up(spec.message_bytes, Board::kLine);
    ring.depth = depth;
    ring.slots.resize(depth);
    ring.memory = board_.at(offset);
    for (const Rank reader : spec.readers)
      if (mesh_.mapped(reader)) ring.mapped_readers.push_back(reader);
    (spec.from < 0 ? encode_rings_[spec.tag] : landing_rings_[{spec.from, spec.tag}]) = &ring;
    if (!ring.mapped_readers.empty()) {
      auto& control = board_.control(ring.tag);
      control.offset.store(offset, std::memory_order_relaxed);
      control.slot_bytes.store(ring.slot_bytes, std::memory_order_relaxed);
      control.depth.store(depth, std::memory_order_relaxed);
    }
    offset += ring.slot_bytes * depth;
    if (offset > board_.bytes())
      throw TransportError("qcoll: the slots of this call need " + std::to_string(offset) +
                           " bytes, the group has " + std::to_string(board_.bytes()));
  }
}

bool Exchange::slot_free(const OwnRing& ring, std::uint32_t index, Rank* laggard) const {
  if (index < ring.depth) return true;
  const auto& state = ring.slots[index % ring.depth];
  const std::uint32_t occupants = index - ring.depth + 1;  // that must have left
  if (state.sends > 0 || state.held) {
    *laggard = state.sends > 0 ? state.sent_to : mesh_.rank();
    return false;
  }
  for (const Rank reader : ring.mapped_readers) {
    const auto& consumed = board_.consumed(ring.tag, reader_of_.at(reader));
    *laggard = reader;
    if (consumed.load() < position(envelope_.run, occupants)) return false;
  }
  return true;
}

Exchange::Slot Exchange::reserve(std::uint32_t tag) {
  OwnRing& ring = *encode_rings_.at(tag);
  Waiting what{mesh_.rank(), "to take earlier chunks"};
  if (!slot_free(ring, ring.filled, &what.peer))
    wait_until([&] { return slot_free(ring, ring.filled, &what.peer); }, what);
  const std::uint32_t index = ring.filled++;
  return {.message = ring.slot(index), .index = index, .own = &ring};
}

void Exchange::publish(const Slot& slot, std::span<const Rank> readers) {
  const std::size_t bytes = wire::Header::kBytes + slot.payload_bytes;
  const ConstBytes message(slot.message, bytes);
  bool to_mapped = false;
  for (const Rank reader : readers) {
    const bool same_node = reader_of_.contains(reader);
    (same_node ? counters_.within_node_bytes : counters_.across_nodes_bytes) += bytes;
    if (mesh_.mapped(reader)) {
      to_mapped = true;
    } else if (slot.own != nullptr) {
      slot.own->state(slot.index).sent_to = reader;
      send_to(reader, message, &slot.own->state(slot.index).sends);
    } else {
      send_to(reader, message, &slot.peer->held[slot.index - slot.peer->consumed].sends);
      sends_from_peer_slots_ = true;
    }
  }
  if (!to_mapped) return;
  board_.control(slot.own->tag).published.store(position(envelope_.run, slot.index + 1));
  for (const Rank reader : readers)
    if (mesh_.mapped(reader)) wake(reader);
}

void Exchange::send_to(Rank reader, ConstBytes message, std::uint32_t* outstanding) {
  auto stream = senders_.find(reader);
  if (stream == senders_.end())
    stream = senders_.emplace(reader, SendStream(mesh_.connect(reader, *deadline_))).first;
  stream->second.enqueue(message, outstanding);
  stream->second.push(trace_);
}

// Counters and flags are sequentially consistent: this rank has stored a counter and now looks at
// the flag; the sleeper sets the flag and then looks at counters a last time. One sees the other.
void Exchange::wake(Rank peer) {
  auto& sleeping = peer_boards_[peer].sleeping();
  if (sleeping.load() != 0 && sleeping.exchange(0) != 0) mesh_.ring(peer);
}

Exchange::Slot Exchange::receive(Rank from, std::uint32_t tag) {
  return mesh_.mapped(from) ? receive_mapped(*mapped_rings_.at({from, tag}))
                            : receive_landed(*landing_rings_.at({from, tag}));
}

Exchange::Slot Exchange::receive_mapped(PeerRing& ring) {
  const Board& board = peer_boards_[ring.owner];
  const Position wanted = position(envelope_.run, ring.received + 1);
  const auto published = [&] { return board.control(ring.tag).published.load(); };
  if (published() < wanted)
    wait_until([&] { return published() >= wanted; }, {ring.owner, "to publish its next chunk"});
  if (run_of(published()) != envelope_.run)
    fail_disagreement(ring.owner, "a later collective, which does not involve this rank",
                      wire::describe(envelope_));
  const std::uint32_t index = ring.received;
  const Board::Place place = board.place_of(ring.tag, index);
  if (!place.valid)
    throw TransportError(
        "rank " + std::to_string(ring.owner) + " published a slot outside its shared memory",
        ring.owner);
  // A copy: what is checked must be what is used, and the peer can write to its memory.
  std::array<std::byte, wire::Header::kBytes> raw;
  std::memcpy(raw.data(), board.at(place.offset), raw.size());
  const wire::Header header = parse_header_of(ring.owner, raw.data());
  check_header(header, ring.owner, {ring.codec, ring.count, index});
  if (header.payload_bytes > place.bytes - wire::Header::kBytes)
    throw TransportError("rank " + std::to_string(ring.owner) + " published " +
                             std::to_string(header.payload_bytes) + " bytes in a slot of " +
                             std::to_string(place.bytes),
                         ring.owner);
  ++ring.received;
  ring.held.emplace_back();
  return {.message = board.at(place.offset),
          .index = index,
          .elements = header.elements,
          .payload_bytes = header.payload_bytes,
          .peer = &ring};
}

Exchange::Slot Exchange::receive_landed(OwnRing& ring) {
  if (ring.filled <= ring.received)
    wait_until([&] { return ring.filled > ring.received; }, {ring.from, "to send its next chunk"});
  const std::uint32_t index = ring.received++;
  const auto& state = ring.state(index);
  return {.message = ring.slot(index),
          .index = index,
          .elements = state.elements,
          .payload_bytes = state.payload_bytes,
          .own = &ring};
}

void Exchange::release(const Slot& slot) {
  if (slot.own != nullptr) {
    slot.own->state(slot.index).held = false;
    return;
  }
  slot.peer->held[slot.index - slot.peer->consumed].released = true;
  advance_released(*slot.peer);
}

// A reader's counter moves in order, past messages that are read and whose sends are done.
void Exchange::advance_released(PeerRing& ring) {
  const std::uint32_t before = ring.consumed;
  while (!ring.held.empty() && ring.held.front().released && ring.held.front().sends == 0) {
    ring.held.pop_front();
    ++ring.consumed;
  }
  if (ring.consumed == before) return;
  peer_boards_[ring.owner]
      .consumed(ring.tag, reader_of_[mesh_.rank()])
      .store(position(envelope_.run, ring.consumed));
  wake(ring.owner);
}

void Exchange::finish() {
  for (auto& [peer, stream] : senders_)
    if (!stream.idle())
      wait_until([&] { return stream.idle(); }, {peer, "to take the last chunks"});
  for (PeerRing& ring : peer_rings_) advance_released(ring);
  check_nothing_extra();
}

// Slots get other uses in the next run, so nothing may be on its way into them.
void Exchange::check_nothing_extra() const {
  for (const auto& [peer, incoming] : receivers_)
    if (incoming.stream.accepted())
      fail_disagreement(peer, wire::describe(envelope_) + " with more messages than expected",
                        wire::describe(envelope_));
  for (const OwnRing& ring : own_rings_)
    if (ring.from >= 0 && ring.filled != ring.received)
      fail_disagreement(ring.from, wire::describe(envelope_) + " with more messages than expected",
                        wire::describe(envelope_));
}

void Exchange::check_header(const wire::Header& header, Rank from, const Expected& expected) const {
  wire::Envelope envelope = envelope_;
  envelope.count = expected.count;
  if (header.envelope != envelope) {
    envelope.count = header.envelope.count;
    if (header.envelope == envelope && envelope.collective == wire::Collective::kAllToAll)
      throw TransportError("ranks disagree in " + wire::describe(envelope_) + ": rank " +
                               std::to_string(from) + " sends " + std::to_string(envelope.count) +
                               " elements to rank " + std::to_string(mesh_.rank()) +
                               ", which expects " + std::to_string(expected.count) +
                               "; the splits of both ranks must match",
                           from);
    fail_disagreement(from, wire::describe(header.envelope), wire::describe(envelope_));
  }
  if (header.codec != expected.codec)
    fail_disagreement(from, wire::describe(envelope_) + " with codec " + to_string(header.codec),
                      "codec " + to_string(expected.codec));
  if (header.chunk != expected.chunk)
    throw TransportError("rank " + std::to_string(from) + " sent chunk " +
                             std::to_string(header.chunk) + " of ring " +
                             std::to_string(header.tag) + ", expected chunk " +
                             std::to_string(expected.chunk),
                         from);
}

void Exchange::fail_disagreement(Rank peer, const std::string& theirs,
                                 const std::string& ours) const {
  throw TransportError("ranks disagree: rank " + std::to_string(peer) + " is in " + theirs +
                           ", rank " + std::to_string(mesh_.rank()) + " in " + ours +
                           "; all ranks of a group must make the same calls in the same order",
                       peer);
}

}  // namespace qcoll::transport
