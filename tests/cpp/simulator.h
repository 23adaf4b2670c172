// Runs recorded schedules of all ranks against each other with bounded slots and no buffering on
// streams at all (a message leaves its sender only into a free slot of its receiver), and checks
// that they end and what every output is made of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qcoll/algo/trace_lane.h"
#include "qcoll/topo/topology.h"

namespace qcoll::test {

// What a stretch of elements is made of: the ranks whose input is in it (each counted), and the
// most encodings that any of them went through.
struct Content {
  algo::Piece piece;               // where it belongs: slice and elements
  std::vector<int> contributions;  // by rank
  int encodings = 0;
};

struct RankOutcome {
  std::vector<Content> outputs;  // in the order of writing
  int most_encodings = 0;
};

struct Outcome {
  bool finished = false;
  std::string stuck;  // where each rank waits, when not finished
  std::vector<RankOutcome> ranks;
  // Messages that entered each node, by (origin slice, chunk begin), to count duplicates.
  std::vector<std::vector<algo::Piece>> entered_node;
};

// `order` seeds which runnable rank goes next. `mapped(a, b)`: a reads b's slots in place.
Outcome simulate(const std::vector<topo::Topology>& topologies,
                 const std::vector<algo::TraceLane>& lanes, std::uint32_t depth, unsigned order,
                 bool map_neighbours = true);

}  // namespace qcoll::test
