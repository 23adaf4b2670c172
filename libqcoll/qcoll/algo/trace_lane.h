// A lane that moves nothing: it counts what a schedule would send and, on demand, records it, so
// that every topology is checked without transports (tests/cpp/simulator.h runs the records).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "qcoll/algo/encoding.h"
#include "qcoll/algo/lane.h"
#include "qcoll/topo/topology.h"
#include "qcoll/wire/header.h"

namespace qcoll::algo {

struct TraceOp {
  enum class Kind : std::uint8_t {
    kReserve,
    kEncode,
    kEncodeSum,
    kPublish,
    kReceive,
    kRelease,
    kDecode,
    kCopyOwn,
    kAddInput,
    kAddSum,
    kAddSlot,
    kStore,
  };
  Kind kind;
  int slot = -1;  // number of the slot within the record
  std::uint32_t tag = 0;
  Rank from = -1;
  std::size_t part = 0;
  Piece piece;
  SumId sum = 0;
  SumId other = 0;
  std::size_t count = 0;
  bool first = false;
  std::vector<Rank> readers;
};

class TraceLane {
 public:
  struct Slot {
    int id = -1;
    std::size_t bytes = 0;  // of the message, header included
  };

  TraceLane(const topo::Topology& topo, DType dtype, std::span<const wire::CodecSpec> codecs,
            bool record)
      : topo_(topo), dtype_(dtype), codecs_(codecs.begin(), codecs.end()), record_(record) {}

  std::uint64_t within_node_bytes() const { return within_node_bytes_; }
  std::uint64_t across_nodes_bytes() const { return across_nodes_bytes_; }
  const std::vector<RingPlan>& plans() const { return plans_; }
  const std::vector<TraceOp>& ops() const { return ops_; }

  void open(std::span<const RingPlan> plans) {
    plans_.assign(plans.begin(), plans.end());
    for (const RingPlan& plan : plans_) by_source_[{plan.from, plan.tag}] = &plan;
  }
  Slot reserve(std::uint32_t tag, std::size_t count) {
    const Slot slot = new_slot(-1, tag, count);
    add({.kind = TraceOp::Kind::kReserve, .slot = slot.id, .tag = tag});
    return slot;
  }
  void encode(Slot& slot, std::size_t part, Piece piece) {
    add({.kind = TraceOp::Kind::kEncode, .slot = slot.id, .part = part, .piece = piece});
  }
  void encode_sum(Slot& slot, std::size_t part, SumId sum, std::size_t count) {
    add({.kind = TraceOp::Kind::kEncodeSum,
         .slot = slot.id,
         .part = part,
         .sum = sum,
         .count = count});
  }
  void publish(const Slot& slot, std::span<const Rank> readers) {
    for (const Rank reader : readers)
      (topo_.same_node(reader, topo_.rank()) ? within_node_bytes_ : across_nodes_bytes_) +=
          slot.bytes;
    add({.kind = TraceOp::Kind::kPublish,
         .slot = slot.id,
         .readers = {readers.begin(), readers.end()}});
  }
  Slot receive(Rank from, std::uint32_t tag, std::size_t count) {
    const Slot slot = new_slot(from, tag, count);
    add({.kind = TraceOp::Kind::kReceive, .slot = slot.id, .tag = tag, .from = from});
    return slot;
  }
  void release(const Slot& slot) { add({.kind = TraceOp::Kind::kRelease, .slot = slot.id}); }
  void decode(const Slot& slot, std::size_t part, Piece piece) {
    add({.kind = TraceOp::Kind::kDecode, .slot = slot.id, .part = part, .piece = piece});
  }
  void copy_own(Piece piece) { add({.kind = TraceOp::Kind::kCopyOwn, .piece = piece}); }
  void add_input(SumId sum, Piece piece, bool first) {
    add({.kind = TraceOp::Kind::kAddInput, .piece = piece, .sum = sum, .first = first});
  }
  void add_sum(SumId sum, SumId other, std::size_t count, bool first) {
    add({.kind = TraceOp::Kind::kAddSum,
         .sum = sum,
         .other = other,
         .count = count,
         .first = first});
  }
  void add_slot(SumId sum, const Slot& slot, std::size_t part, std::size_t count, bool first) {
    add({.kind = TraceOp::Kind::kAddSlot,
         .slot = slot.id,
         .part = part,
         .sum = sum,
         .count = count,
         .first = first});
  }
  void store(SumId sum, Piece piece) {
    add({.kind = TraceOp::Kind::kStore, .piece = piece, .sum = sum});
  }

 private:
  Slot new_slot(Rank from, std::uint32_t tag, std::size_t count) {
    const RingPlan& plan = *by_source_.at({from, tag});
    const Encoding encoding = encoding_of(codecs_[plan.level], dtype_, plan.partial_sums);
    return {.id = slots_++,
            .bytes = wire::Header::kBytes + plan.parts * encoding.part_bytes(count)};
  }
  void add(TraceOp op) {
    if (record_) ops_.push_back(std::move(op));
  }

  const topo::Topology& topo_;
  const DType dtype_;
  const std::vector<wire::CodecSpec> codecs_;
  const bool record_;
  std::vector<RingPlan> plans_;
  std::map<std::pair<Rank, std::uint32_t>, const RingPlan*> by_source_;
  std::vector<TraceOp> ops_;
  int slots_ = 0;
  std::uint64_t within_node_bytes_ = 0;
  std::uint64_t across_nodes_bytes_ = 0;
};

static_assert(Lane<TraceLane>);

}  // namespace qcoll::algo
