// The CPU lane: codec kernels over the slots of an Exchange. What it encodes goes straight into
// memory that peers read or sockets send.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "qcoll/algo/encoding.h"
#include "qcoll/algo/lane.h"
#include "qcoll/base/deadline.h"
#include "qcoll/base/trace.h"
#include "qcoll/codec/codec.h"
#include "qcoll/host/team.h"
#include "qcoll/transport/exchange.h"
#include "qcoll/wire/header.h"

namespace qcoll::host {

// One schedule's caller-side facts. Pointers are to the first element of each rank's slice; a null
// output is not written, an output equal to its input is in place.
struct LaneCall {
  wire::Envelope envelope;
  std::vector<wire::CodecSpec> codecs;  // by level, inner first
  std::vector<const std::byte*> inputs;
  std::vector<std::byte*> outputs;
  std::size_t output_bytes = 0;  // of all outputs together
  std::size_t chunk = 1;         // elements
  std::uint32_t depth = 1;       // slots of a ring
  float divisor = 1;             // of ReduceOp::kAvg
  float factor = 1;              // of ReduceOp::kPremulSum
};

struct LaneCounters {
  std::uint64_t nonfinite_blocks = 0;  // encoded here with NaN or Inf in them
  double encode_seconds = 0;
  double decode_seconds = 0;
};

class HostLane {
  struct Ring {
    algo::Encoding encoding;
    std::size_t parts = 1;
    std::uint64_t count = 0;  // for the headers
  };

 public:
  struct Slot {
    transport::Exchange::Slot slot;
    const Ring* ring = nullptr;
    std::uint32_t tag = 0;
    std::size_t count = 0;         // room in each part, in elements
    std::size_t stride_bytes = 0;  // from part to part
    bool encoded_here = false;
  };

  // `sums`: fp32 accumulators of call.chunk elements each.
  HostLane(transport::Exchange& exchange, const LaneCall& call, std::span<float* const> sums,
           const Deadline& deadline, LaneCounters& counters, Team& team, Trace* trace = nullptr);

  void open(std::span<const algo::RingPlan> plans);
  Slot reserve(std::uint32_t tag, std::size_t count);
  void encode(Slot& slot, std::size_t part, algo::Piece piece);
  void encode_sum(Slot& slot, std::size_t part, algo::SumId sum, std::size_t count);
  void publish(Slot& slot, std::span<const Rank> readers);
  Slot receive(Rank from, std::uint32_t tag, std::size_t count);
  void release(const Slot& slot);
  void decode(const Slot& slot, std::size_t part, algo::Piece piece);
  void copy_own(algo::Piece piece);
  void add_input(algo::SumId sum, algo::Piece piece, bool first);
  void add_sum(algo::SumId sum, algo::SumId other, std::size_t count, bool first);
  void add_slot(algo::SumId sum, const Slot& slot, std::size_t part, std::size_t count, bool first);
  void store(algo::SumId sum, algo::Piece piece);

 private:
  class Timed;

  const std::byte* input(algo::Piece piece) const {
    return call_.inputs[piece.slice] + piece.begin * element_bytes_;
  }
  std::byte* output(algo::Piece piece) const {
    return call_.outputs[piece.slice] + piece.begin * element_bytes_;
  }
  void encode_from(wire::CodecSpec codec, DType dtype, const std::byte* x, std::size_t count,
                   Bytes encoded);
  Bytes part_of(const Slot& slot, std::size_t part, std::size_t count) const;

  transport::Exchange& exchange_;
  const LaneCall& call_;
  const std::size_t element_bytes_;
  const std::span<float* const> sums_;
  const Deadline& deadline_;
  LaneCounters& counters_;
  Team& team_;
  Trace* trace_;
  const codec::Kernels& kernels_;
  const codec::Store store_;  // of outputs
  std::map<std::uint32_t, Ring> encode_rings_;
  std::map<std::pair<Rank, std::uint32_t>, Ring> receive_rings_;
};

static_assert(algo::Lane<HostLane>);

}  // namespace qcoll::host
