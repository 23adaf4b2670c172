#include "qcoll/comm/explain.h"

#include "qcoll/algo/all_gather.h"
#include "qcoll/algo/all_to_all.h"
#include "qcoll/algo/reduce_scatter.h"
#include "qcoll/algo/trace_lane.h"
#include "qcoll/comm/chunking.h"

namespace qcoll::comm {
namespace {

std::string algorithm_of(wire::Collective collective, const topo::Topology& topo) {
  const bool rails = topo.spans_nodes();
  const std::string gather =
      !rails ? "each rank reads its peers' slots"
      : topo.equal_nodes()
          ? "rails between ranks of equal local index, peers' slots inside nodes"
          : "one rail between the first ranks of uneven nodes, peers' slots inside";
  const std::size_t hops = topo.levels().size();
  const std::string scatter =
      hops == 1 ? "one all-to-all hop, summed in fp32"
                : std::to_string(hops) + " all-to-all hops, inner to outer, each summed in fp32";
  switch (collective) {
    case wire::Collective::kAllGather:
      return gather;
    case wire::Collective::kReduceScatter:
      return scatter;
    case wire::Collective::kAllReduce:
      return "reduce-scatter (" + scatter + "), then all-gather (" + gather + ")";
    case wire::Collective::kAllToAll:
      return "each pair directly";
  }
  return "";
}

// Bytes that one rank sends, within its node and across.
struct Sent {
  std::uint64_t within = 0;
  std::uint64_t across = 0;
};

Sent sent_by(const topo::Topology& topo, wire::Collective collective, DType dtype,
             std::size_t numel, const std::vector<wire::CodecSpec>& codecs, std::size_t chunk) {
  Sent sent;
  const auto count = [&](auto schedule) {
    algo::TraceLane fresh(topo, dtype, codecs, false);
    schedule(fresh);
    sent.within += fresh.within_node_bytes();
    sent.across += fresh.across_nodes_bytes();
  };
  const std::size_t size = topo.size();
  const algo::Slices slices = collective == wire::Collective::kAllReduce
                                  ? slices_to_reduce(numel, topo.size(), codecs, chunk)
                                  : algo::Slices{numel / size, numel / size * size, chunk};
  const auto gather = [&](auto& l) { algo::all_gather(l, topo, slices, algo::OwnSlice::kDecode); };
  const auto scatter = [&](auto& l) { algo::reduce_scatter(l, topo, slices); };
  switch (collective) {
    case wire::Collective::kAllGather:
      count(gather);
      break;
    case wire::Collective::kReduceScatter:
      count(scatter);
      break;
    case wire::Collective::kAllReduce:
      count(scatter);
      count(gather);
      break;
    case wire::Collective::kAllToAll: {
      const std::vector<std::size_t> splits(size, numel / size);
      count([&](auto& l) { algo::all_to_all(l, topo, {splits, splits, chunk}); });
      break;
    }
  }
  return sent;
}

}  // namespace

Plan explain(const topo::Topology& topology, const std::vector<std::string>& node_labels,
             wire::Collective collective, DType dtype, std::size_t numel, const Choice& choice) {
  Plan plan;
  plan.topology = topology.describe();
  plan.exact_because = choice.exact_because;
  plan.payload_bytes = numel * element_bytes(dtype);
  if (topology.size() == 1) {
    plan.algorithm = "a world of one: a local copy";
    return plan;
  }
  plan.algorithm = algorithm_of(collective, topology);
  const auto codecs = codecs_by_level(choice.codecs, topology);
  const auto& levels = topology.levels();
  for (std::size_t l = 0; l < levels.size(); ++l)
    plan.hops.push_back({levels[l].crosses_nodes ? "across nodes" : "within node",
                         wire::to_string(codecs[l]), levels[l].size()});
  const Chunking chunking = choose_chunking(collective, topology, codecs, dtype);
  plan.chunk_elements = chunking.chunk;
  plan.slots = chunking.depth;
  for (const Rank rank : topology.node_ranks()) {
    const Sent sent = sent_by(topo::Topology(rank, node_labels), collective, dtype, numel, codecs,
                              chunking.chunk);
    plan.node_across_nodes_bytes += sent.across;
    if (rank == topology.rank()) {
      plan.within_node_bytes = sent.within;
      plan.across_nodes_bytes = sent.across;
    }
  }
  return plan;
}

}  // namespace qcoll::comm
