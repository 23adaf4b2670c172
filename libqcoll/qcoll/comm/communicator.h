// The engine of one group: the only class that the bindings use. Every collective blocks; queueing
// and futures are the caller's (comm/worker.h, cpp/).
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "qcoll/algo/all_gather.h"
#include "qcoll/algo/all_to_all.h"
#include "qcoll/base/deadline.h"
#include "qcoll/base/trace.h"
#include "qcoll/base/types.h"
#include "qcoll/comm/policy.h"
#include "qcoll/comm/stats.h"
#include "qcoll/host/host_lane.h"
#include "qcoll/topo/topology.h"
#include "qcoll/transport/exchange.h"
#include "qcoll/transport/mesh.h"
#include "qcoll/wire/header.h"

namespace qcoll::comm {

struct Call {
  std::string verb;            // as the user knows it; the key in stats
  std::uint64_t sequence = 0;  // of the collective in its group
  DType dtype = DType::kByte;
  Choice choice;
  Clock::duration timeout = std::chrono::minutes(30);
};

struct Reduction {
  wire::ReduceOp op = wire::ReduceOp::kSum;
  float factor = 1;  // of kPremulSum: multiplies the fp32 sum
};

class Communicator {
 public:
  // `group`: a number that all ranks share and other groups do not. `threads`: that encode, decode
  // and sum, the calling one included.
  Communicator(transport::Mesh& mesh, topo::Topology topology, std::uint64_t group,
               int threads = 1);
  ~Communicator();

  static std::size_t memory_bytes(const topo::Topology& topology);

  // Throws UsageError if such a call cannot run at all. Call it before queueing: an error inside
  // the data path would end the group.
  void check(wire::Collective collective, DType dtype, const Choice& choice) const;

  // Rank r's `count` elements arrive at outputs[r]. inputs and outputs may be the same memory for
  // the own slice (in place); other overlap is not allowed.
  void all_gather(const Call& call, const std::byte* input, std::vector<std::byte*> outputs,
                  std::size_t count);
  // inputs[r]: `count` elements for rank r. output may be inputs[rank].
  void reduce_scatter(const Call& call, Reduction reduction, std::vector<const std::byte*> inputs,
                      std::byte* output, std::size_t count);
  void all_reduce(const Call& call, Reduction reduction, std::byte* data, std::size_t count);
  // inputs[r], to[r]: elements that go to rank r; outputs[r], from[r]: that come from it.
  void all_to_all(const Call& call, std::vector<const std::byte*> inputs,
                  std::vector<std::size_t> to, std::vector<std::byte*> outputs,
                  std::vector<std::size_t> from);

  const topo::Topology& topology() const { return topo_; }
  Stats& stats() { return stats_; }
  // Which rank the data path waits for, and for what; empty when it does not. From any thread.
  std::string waits_for() const { return exchange_.waits_for(); }
  void set_trace(Trace* trace);

 private:
  class Run;

  host::LaneCall lane_call(const Call& call, wire::Collective collective, std::size_t count,
                           Reduction reduction = {.op = wire::ReduceOp::kNone}) const;
  std::vector<float*> accumulators(std::size_t count, std::size_t elements);
  void reduce_alone(DType dtype, Reduction reduction, const std::byte* input, std::byte* output,
                    std::size_t count);

  const topo::Topology topo_;
  const std::uint64_t group_;
  transport::Exchange exchange_;
  std::uint32_t runs_ = 0;
  std::vector<float> sums_;
  host::Team team_;
  Stats stats_;
  Trace* trace_ = nullptr;
};

}  // namespace qcoll::comm
