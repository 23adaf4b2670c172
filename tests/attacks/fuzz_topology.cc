// Node labels, as the ranks' records bring them.
#include <algorithm>
#include <string>
#include <vector>

#include "fuzz.h"
#include "qcoll/base/error.h"
#include "qcoll/topo/topology.h"

using namespace qcoll;
using attacks::ensure;

QCOLL_FUZZ_TARGET(topology) {
  const Rank rank = static_cast<std::int8_t>(in.u8());
  std::vector<std::string> labels;
  while (!in.empty() && labels.size() < 16) labels.push_back(in.text_until('\n'));
  try {
    const topo::Topology topology(rank, labels);
    const auto size = static_cast<Rank>(labels.size());
    ensure(topology.size() == size && topology.rank() == rank, "every rank is there");
    std::vector<int> seen(labels.size());
    for (const auto& node : topology.nodes())
      for (const Rank r : node) {
        ++seen.at(r);
        ensure(labels[r] == labels[node[0]], "a node has one label");
        ensure(topology.nodes().at(topology.node_of(r)).at(topology.local_index(r)) == r,
               "tables agree");
      }
    ensure(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }),
           "every rank lives in one node");
    std::size_t product = 1;
    for (std::size_t l = 0; l < topology.levels().size(); ++l) {
      const topo::Level& level = topology.levels()[l];
      product *= level.members.size();
      ensure(level.members.at(level.index) == rank, "a rank is a member of its levels");
      for (std::size_t column = 0; column < topology.columns(l); ++column)
        for (int coordinate = 0; coordinate < level.size(); ++coordinate) {
          const Rank at = topology.rank_at(l, coordinate, column);
          ensure(at >= 0 && at < size, "a grid holds ranks");
        }
    }
    ensure(product == labels.size(), "levels span the world");
    ensure(!topology.describe().empty(), "it has a text");
  } catch (const UsageError&) {
    ensure(rank < 0 || static_cast<std::size_t>(rank) >= labels.size(),
           "only a rank outside the world is refused");
  }
}
