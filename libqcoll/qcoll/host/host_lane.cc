#include "qcoll/host/host_lane.h"

#include <atomic>
#include <cstring>

#include "qcoll/base/error.h"

namespace qcoll::host {
namespace {

constexpr std::size_t kLine = 64;  // elements: whole cache lines of every type

}  // namespace

// Adds the time of a scope to a counter and, when a trace is attached, to the trace.
class HostLane::Timed {
 public:
  Timed(const HostLane& lane, double& seconds, TraceEvent::Kind kind, const Slot& slot)
      : lane_(lane), seconds_(seconds), kind_(kind), slot_(slot) {}
  ~Timed() {
    const auto end = Clock::now();
    seconds_ += std::chrono::duration<double>(end - begin_).count();
    if (lane_.trace_ != nullptr)
      lane_.trace_->record({kind_, -1, slot_.tag, slot_.slot.index, begin_, end});
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  const HostLane& lane_;
  double& seconds_;
  const TraceEvent::Kind kind_;
  const Slot& slot_;
  const Clock::time_point begin_ = Clock::now();
};

HostLane::HostLane(transport::Exchange& exchange, const LaneCall& call,
                   std::span<float* const> sums, const Deadline& deadline, LaneCounters& counters,
                   Team& team, Trace* trace)
    : exchange_(exchange),
      call_(call),
      element_bytes_(element_bytes(call.envelope.dtype)),
      sums_(sums),
      deadline_(deadline),
      counters_(counters),
      team_(team),
      trace_(trace),
      kernels_(codec::best()),
      store_(codec::store_for(call.output_bytes)) {}

void HostLane::open(std::span<const algo::RingPlan> plans) {
  std::vector<transport::RingSpec> specs;
  for (const algo::RingPlan& plan : plans) {
    const Ring ring{
        algo::encoding_of(call_.codecs[plan.level], call_.envelope.dtype, plan.partial_sums),
        plan.parts, plan.count.value_or(call_.envelope.count)};
    specs.push_back(
        {.tag = plan.tag,
         .from = plan.from,
         .message_bytes = wire::Header::kBytes + plan.parts * ring.encoding.part_bytes(call_.chunk),
         .codec = ring.encoding.codec,
         .readers = plan.readers,
         .count = plan.count});
    if (plan.from < 0)
      encode_rings_[plan.tag] = ring;
    else
      receive_rings_[{plan.from, plan.tag}] = ring;
  }
  exchange_.begin(call_.envelope, specs, call_.depth, deadline_);
}

HostLane::Slot HostLane::reserve(std::uint32_t tag, std::size_t count) {
  const Ring& ring = encode_rings_.at(tag);
  return {.slot = exchange_.reserve(tag),
          .ring = &ring,
          .tag = tag,
          .count = count,
          .stride_bytes = ring.encoding.part_bytes(count),
          .encoded_here = true};
}

Bytes HostLane::part_of(const Slot& slot, std::size_t part, std::size_t count) const {
  return {slot.slot.payload() + part * slot.stride_bytes, slot.ring->encoding.part_bytes(count)};
}

void HostLane::encode(Slot& slot, std::size_t part, algo::Piece piece) {
  const Timed timed(*this, counters_.encode_seconds, TraceEvent::Kind::kEncode, slot);
  const auto& [codec, dtype] = slot.ring->encoding;
  encode_from(codec, dtype, input(piece), piece.count, part_of(slot, part, piece.count));
}

void HostLane::encode_sum(Slot& slot, std::size_t part, algo::SumId sum, std::size_t count) {
  const Timed timed(*this, counters_.encode_seconds, TraceEvent::Kind::kEncode, slot);
  encode_from(slot.ring->encoding.codec, DType::kF32,
              reinterpret_cast<const std::byte*>(sums_[sum]), count, part_of(slot, part, count));
}

void HostLane::encode_from(wire::CodecSpec codec, DType dtype, const std::byte* x,
                           std::size_t count, Bytes encoded) {
  std::atomic<std::uint64_t> nonfinite{0};
  team_.split(count, codec::part_unit(codec), [&](std::size_t begin, std::size_t n) {
    nonfinite += codec::encode_part(codec, dtype, x + begin * element_bytes(dtype), count, encoded,
                                    {begin, n}, kernels_);
  });
  counters_.nonfinite_blocks += nonfinite;
}

void HostLane::publish(Slot& slot, std::span<const Rank> readers) {
  if (slot.encoded_here) {
    slot.slot.elements = static_cast<std::uint32_t>(slot.count);
    slot.slot.payload_bytes = static_cast<std::uint32_t>(slot.ring->parts * slot.stride_bytes);
    wire::Envelope envelope = call_.envelope;
    envelope.count = slot.ring->count;
    wire::write_header({.envelope = envelope,
                        .codec = slot.ring->encoding.codec,
                        .tag = slot.tag,
                        .chunk = slot.slot.index,
                        .elements = slot.slot.elements,
                        .payload_bytes = slot.slot.payload_bytes},
                       slot.slot.message);
  }
  exchange_.publish(slot.slot, readers);
}

HostLane::Slot HostLane::receive(Rank from, std::uint32_t tag, std::size_t count) {
  const Ring& ring = receive_rings_.at({from, tag});
  const Slot slot{.slot = exchange_.receive(from, tag),
                  .ring = &ring,
                  .tag = tag,
                  .count = count,
                  .stride_bytes = ring.encoding.part_bytes(count)};
  if (slot.slot.elements != count || slot.slot.payload_bytes != ring.parts * slot.stride_bytes)
    throw TransportError("ranks disagree in " + wire::describe(call_.envelope) + ": rank " +
                             std::to_string(from) + " sent " + std::to_string(slot.slot.elements) +
                             " elements in " + std::to_string(slot.slot.payload_bytes) +
                             " bytes, rank " + std::to_string(exchange_.rank()) + " expected " +
                             std::to_string(count) + " elements in " +
                             std::to_string(ring.parts * slot.stride_bytes) +
                             " bytes; all ranks must pass the same sizes and matching splits",
                         from);
  return slot;
}

void HostLane::release(const Slot& slot) { exchange_.release(slot.slot); }

void HostLane::decode(const Slot& slot, std::size_t part, algo::Piece piece) {
  const Timed timed(*this, counters_.decode_seconds, TraceEvent::Kind::kDecode, slot);
  const auto& [codec, dtype] = slot.ring->encoding;
  const Bytes encoded = part_of(slot, part, piece.count);
  std::byte* const y = output(piece);
  team_.split(piece.count, codec::part_unit(codec), [&](std::size_t begin, std::size_t n) {
    codec::decode_part(codec, dtype, encoded, piece.count, {begin, n}, y + begin * element_bytes_,
                       kernels_, store_);
  });
}

void HostLane::copy_own(algo::Piece piece) {
  if (piece.count == 0 || output(piece) == input(piece)) return;
  const std::byte* const from = input(piece);
  std::byte* const to = output(piece);
  team_.split(piece.count, kLine, [&](std::size_t begin, std::size_t n) {
    const std::size_t at = begin * element_bytes_;
    if (store_ == codec::Store::kStreaming)
      kernels_.stream_copy(from + at, n * element_bytes_, to + at);
    else
      std::memcpy(to + at, from + at, n * element_bytes_);
  });
}

void HostLane::add_input(algo::SumId sum, algo::Piece piece, bool first) {
  const auto dtype = static_cast<std::size_t>(call_.envelope.dtype);
  const auto add = (first ? kernels_.widen : kernels_.widen_add)[dtype];
  team_.split(piece.count, kLine, [&](std::size_t begin, std::size_t n) {
    add(input(piece) + begin * element_bytes_, n, sums_[sum] + begin);
  });
}

void HostLane::add_sum(algo::SumId sum, algo::SumId other, std::size_t count, bool first) {
  constexpr auto kF32 = static_cast<std::size_t>(DType::kF32);
  const auto add = (first ? kernels_.widen : kernels_.widen_add)[kF32];
  team_.split(count, kLine, [&](std::size_t begin, std::size_t n) {
    add(sums_[other] + begin, n, sums_[sum] + begin);
  });
}

void HostLane::add_slot(algo::SumId sum, const Slot& slot, std::size_t part, std::size_t count,
                        bool first) {
  const Timed timed(*this, counters_.decode_seconds, TraceEvent::Kind::kDecode, slot);
  const auto& [codec, dtype] = slot.ring->encoding;
  const Bytes encoded = part_of(slot, part, count);
  team_.split(count, codec::part_unit(codec), [&](std::size_t begin, std::size_t n) {
    float* const to = sums_[sum] + begin;
    if (!first)
      codec::decode_add_part(codec, dtype, encoded, count, {begin, n}, to, kernels_);
    else if (codec.exact())
      kernels_.widen[static_cast<std::size_t>(dtype)](encoded.data() + begin * element_bytes(dtype),
                                                      n, to);
    else
      codec::decode_part(codec, DType::kF32, encoded, count, {begin, n}, to, kernels_,
                         codec::Store::kCached);
  });
}

void HostLane::store(algo::SumId sum, algo::Piece piece) {
  const auto dtype = static_cast<std::size_t>(call_.envelope.dtype);
  team_.split(piece.count, kLine, [&](std::size_t begin, std::size_t n) {
    const float* const from = sums_[sum] + begin;
    std::byte* const to = output(piece) + begin * element_bytes_;
    switch (call_.envelope.op) {
      case wire::ReduceOp::kAvg:
        return kernels_.store_mean[dtype](from, n, call_.divisor, to);
      case wire::ReduceOp::kPremulSum:
        return kernels_.store_scaled[dtype](from, n, call_.factor, to);
      default:
        return kernels_.store_sum[dtype](from, n, to);
    }
  });
}

}  // namespace qcoll::host
