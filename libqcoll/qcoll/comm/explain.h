// What a call would do, without doing it: the schedule is run on the trace lane, so that the bytes
// told here are the bytes that the engine sends.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "qcoll/comm/policy.h"
#include "qcoll/topo/topology.h"

namespace qcoll::comm {

struct PlanHop {
  std::string level;  // "within node", "across nodes"
  std::string codec;
  int ranks = 0;
};

struct Plan {
  std::string algorithm;
  std::string topology;
  std::vector<PlanHop> hops;
  std::string exact_because;  // empty: coded
  std::uint64_t payload_bytes = 0;
  std::uint64_t within_node_bytes = 0;        // sent by this rank, headers included
  std::uint64_t across_nodes_bytes = 0;       // sent by this rank
  std::uint64_t node_across_nodes_bytes = 0;  // sent by all ranks of this node
  std::size_t chunk_elements = 0;
  std::uint32_t slots = 0;
  Prediction predicted;
  std::map<Rank, std::string> not_in_shared_memory;  // ranks of this node, and why; over TCP
};

// `numel`: elements of the gathered, unreduced, reduced or exchanged tensor.
Plan explain(const topo::Topology& topology, const std::vector<std::string>& node_labels,
             wire::Collective collective, DType dtype, std::size_t numel, const Choice& choice);

}  // namespace qcoll::comm
