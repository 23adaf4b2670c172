#include "qcoll/comm/communicator.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "qcoll/algo/reduce_scatter.h"
#include "qcoll/codec/codec.h"
#include "qcoll/comm/chunking.h"

namespace qcoll::comm {
namespace {

std::size_t tags_of(const topo::Topology& topo) {
  return std::max<std::size_t>(topo.levels().size(), 1) * topo.size();
}

// Slice r of a tensor that starts at `data`.
template <class Byte>
std::vector<Byte*> slices_of(Byte* data, std::size_t slice_bytes, int size) {
  std::vector<Byte*> slices;
  for (int r = 0; r < size; ++r) slices.push_back(data + r * slice_bytes);
  return slices;
}

// The tensor of an empty call may be a null pointer.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

// One call: runs its schedules and counts it into the stats, also when it fails.
class Communicator::Run {
 public:
  Run(Communicator& owner, const Call& call, std::uint64_t payload_bytes)
      : comm_(owner), call_(call), before_(owner.exchange_.counters()), deadline_(call.timeout) {
    stats_.calls = 1;
    stats_.payload_bytes = payload_bytes;
    if (call.choice.exact()) stats_.exact_calls[call.choice.exact_because] = 1;
  }
  ~Run() {
    const auto& after = comm_.exchange_.counters();
    stats_.within_node_bytes = after.within_node_bytes - before_.within_node_bytes;
    stats_.across_nodes_bytes = after.across_nodes_bytes - before_.across_nodes_bytes;
    stats_.wait_seconds = after.wait_seconds - before_.wait_seconds;
    stats_.nonfinite_blocks = lane_.nonfinite_blocks;
    stats_.encode_seconds = lane_.encode_seconds;
    stats_.decode_seconds = lane_.decode_seconds;
    comm_.stats_.add(call_.verb, stats_);
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  template <class Schedule>
  void run(host::LaneCall& call, std::span<float* const> sums, Schedule schedule) {
    call.envelope.run = ++comm_.runs_;
    host::HostLane lane(comm_.exchange_, call, sums, deadline_, lane_, comm_.team_, comm_.trace_);
    schedule(lane);
    comm_.exchange_.finish();
  }

 private:
  Communicator& comm_;
  const Call& call_;
  const transport::ExchangeCounters before_;
  const Deadline deadline_;
  host::LaneCounters lane_;
  CollectiveStats stats_;
};

Communicator::Communicator(transport::Mesh& mesh, topo::Topology topology, std::uint64_t group,
                           int threads)
    : topo_(std::move(topology)), group_(group), exchange_(mesh, tags_of(topo_)), team_(threads) {}

Communicator::~Communicator() = default;

std::size_t Communicator::memory_bytes(const topo::Topology& topology) {
  return transport::Exchange::memory_bytes(tags_of(topology), topology.node_ranks().size(),
                                           kSlotBytes);
}

void Communicator::set_trace(Trace* trace) {
  trace_ = trace;
  exchange_.set_trace(trace);
}

void Communicator::check(wire::Collective collective, DType dtype, const Choice& choice) const {
  if (topo_.size() > 1)
    choose_chunking(collective, topo_, codecs_by_level(choice.codecs, topo_), dtype);
}

host::LaneCall Communicator::lane_call(const Call& call, wire::Collective collective,
                                       std::size_t count, Reduction reduction) const {
  host::LaneCall lane;
  lane.envelope = {.group = group_,
                   .sequence = call.sequence,
                   .run = 0,
                   .collective = collective,
                   .op = reduction.op,
                   .dtype = call.dtype,
                   .count = count,
                   .qualifier = reduction.op == wire::ReduceOp::kPremulSum
                                    ? std::bit_cast<std::uint32_t>(reduction.factor)
                                    : 0};
  lane.codecs = codecs_by_level(call.choice.codecs, topo_);
  const Chunking chunking = choose_chunking(collective, topo_, lane.codecs, call.dtype);
  lane.chunk = chunking.chunk;
  lane.depth = chunking.depth;
  lane.divisor = static_cast<float>(topo_.size());
  lane.factor = reduction.factor;
  return lane;
}

std::vector<float*> Communicator::accumulators(std::size_t count, std::size_t elements) {
  const std::size_t stride = align_up(elements, 16);
  if (sums_.size() < count * stride) sums_.resize(count * stride);
  return slices_of(sums_.data(), stride, static_cast<int>(count));
}

void Communicator::all_gather(const Call& call, const std::byte* input,
                              std::vector<std::byte*> outputs, std::size_t count) {
  const std::size_t bytes = count * element_bytes(call.dtype);
  Run run(*this, call, bytes * topo_.size());
  std::byte* const own_output = outputs[topo_.rank()];
  if (topo_.size() == 1) {
    copy_bytes(own_output, input, bytes);
    return;
  }
  auto lane = lane_call(call, wire::Collective::kAllGather, count);
  lane.inputs.resize(topo_.size());
  lane.inputs[topo_.rank()] = input;
  lane.outputs = std::move(outputs);
  lane.output_bytes = bytes * topo_.size();
  // An fp32 slice gathered in place is the only copy of master weights: it stays exact.
  const bool only_copy = own_output == input && call.dtype == DType::kF32;
  const auto own =
      call.choice.exact() || only_copy ? algo::OwnSlice::kKeep : algo::OwnSlice::kDecode;
  const algo::Slices slices{count, count * topo_.size(), lane.chunk};
  run.run(lane, {}, [&](auto& l) { algo::all_gather(l, topo_, slices, own); });
}

void Communicator::reduce_scatter(const Call& call, Reduction reduction,
                                  std::vector<const std::byte*> inputs, std::byte* output,
                                  std::size_t count) {
  Run run(*this, call, count * element_bytes(call.dtype) * topo_.size());
  if (topo_.size() == 1) return reduce_alone(call.dtype, reduction, inputs[0], output, count);
  auto lane = lane_call(call, wire::Collective::kReduceScatter, count, reduction);
  lane.inputs = std::move(inputs);
  lane.outputs.resize(topo_.size());
  lane.outputs[topo_.rank()] = output;
  const algo::Slices slices{count, count * topo_.size(), lane.chunk};
  const auto sums = accumulators(algo::sums_needed(topo_), lane.chunk);
  run.run(lane, sums, [&](auto& l) { algo::reduce_scatter(l, topo_, slices); });
}

// Reduce-scatter into the own slice, then all-gather from it. The owner of a slice decodes its own
// bytes, so that all ranks hold the same bits.
void Communicator::all_reduce(const Call& call, Reduction reduction, std::byte* data,
                              std::size_t count) {
  const std::size_t bytes = element_bytes(call.dtype);
  Run run(*this, call, count * bytes);
  if (topo_.size() == 1) return reduce_alone(call.dtype, reduction, data, data, count);
  auto lane = lane_call(call, wire::Collective::kAllReduce, count, reduction);
  const algo::Slices slices = slices_to_reduce(count, topo_.size(), lane.codecs, lane.chunk);
  lane.outputs = slices_of(data, slices.length * bytes, topo_.size());
  lane.inputs.assign(lane.outputs.begin(), lane.outputs.end());
  lane.output_bytes = count * bytes;
  const auto sums = accumulators(algo::sums_needed(topo_), lane.chunk);
  run.run(lane, sums, [&](auto& l) { algo::reduce_scatter(l, topo_, slices); });
  const auto own = call.choice.exact() ? algo::OwnSlice::kKeep : algo::OwnSlice::kDecode;
  run.run(lane, {}, [&](auto& l) { algo::all_gather(l, topo_, slices, own); });
}

void Communicator::all_to_all(const Call& call, std::vector<const std::byte*> inputs,
                              std::vector<std::size_t> to, std::vector<std::byte*> outputs,
                              std::vector<std::size_t> from) {
  std::size_t elements = 0;
  for (const std::size_t n : to) elements += n;
  Run run(*this, call, elements * element_bytes(call.dtype));
  if (topo_.size() == 1) {
    copy_bytes(outputs[0], inputs[0], to[0] * element_bytes(call.dtype));
    return;
  }
  auto lane = lane_call(call, wire::Collective::kAllToAll, 0);
  lane.inputs = std::move(inputs);
  lane.outputs = std::move(outputs);
  for (const std::size_t n : from) lane.output_bytes += n * element_bytes(call.dtype);
  const algo::Splits splits{std::move(to), std::move(from), lane.chunk};
  run.run(lane, {}, [&](auto& l) { algo::all_to_all(l, topo_, splits); });
}

// A world of one: the sum is the input.
void Communicator::reduce_alone(DType dtype, Reduction reduction, const std::byte* input,
                                std::byte* output, std::size_t count) {
  if (reduction.op != wire::ReduceOp::kPremulSum) {
    copy_bytes(output, input, count * element_bytes(dtype));
    return;
  }
  constexpr std::size_t kElements = 4096;
  const auto sum = accumulators(1, kElements)[0];
  const auto& kernels = codec::best();
  const auto type = static_cast<std::size_t>(dtype);
  const std::size_t bytes = element_bytes(dtype);
  for (std::size_t begin = 0; begin < count; begin += kElements) {
    const std::size_t n = std::min(kElements, count - begin);
    kernels.widen[type](input + begin * bytes, n, sum);
    kernels.store_scaled[type](sum, n, reduction.factor, output + begin * bytes);
  }
}

}  // namespace qcoll::comm
