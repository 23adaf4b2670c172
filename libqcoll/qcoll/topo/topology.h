// Which ranks share a node, and the hierarchy of levels that the algorithms walk.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "qcoll/base/types.h"

namespace qcoll::topo {

// One hop of a hierarchical collective: the ranks that differ from this one in this level's
// coordinate only, in the order of that coordinate.
struct Level {
  std::vector<Rank> members;
  int index = 0;  // of this rank in members
  bool crosses_nodes = false;

  int size() const { return static_cast<int>(members.size()); }
};

// Every rank has a node label: a host name, or what the user declares ("a", "rack1/host3": a
// slash makes an outer level). Nodes are numbered by their first rank; ranks inside a node keep
// their order. Rank -> (node, local index) is a table, never arithmetic on the rank.
//
// When every group of every level has the same number of members, levels() lists them from the
// inner one outwards, without those of size 1. Otherwise it is one flat level of all ranks.
class Topology {
 public:
  Topology(Rank rank, std::span<const std::string> node_labels);

  Rank rank() const { return rank_; }
  int size() const { return static_cast<int>(node_of_.size()); }

  const std::vector<std::vector<Rank>>& nodes() const { return nodes_; }
  int node_count() const { return static_cast<int>(nodes_.size()); }
  int node_of(Rank r) const { return node_of_[r]; }
  int local_index(Rank r) const { return local_index_[r]; }
  int node() const { return node_of_[rank_]; }
  const std::vector<Rank>& node_ranks() const { return nodes_[node()]; }
  bool same_node(Rank a, Rank b) const { return node_of_[a] == node_of_[b]; }
  bool spans_nodes() const { return node_count() > 1; }
  bool equal_nodes() const { return equal_nodes_; }  // as many ranks in every node
  bool uniform() const { return uniform_; }  // equal_nodes, and as many groups in every outer one

  const std::vector<Level>& levels() const { return levels_; }

  // At level `level`, the ranks that share this rank's inner coordinates form a grid of
  // (this level's coordinate) x columns(level); a column fixes all outer coordinates.
  std::size_t columns(std::size_t level) const;
  Rank rank_at(std::size_t level, int coordinate, std::size_t column) const;

  // "2 nodes x 4 ranks", "uneven nodes of 3, 1 ranks"
  std::string describe() const;

 private:
  void number_nodes(std::span<const std::string> node_labels);
  void build_levels(std::span<const std::string> node_labels);

  Rank rank_;
  std::vector<std::vector<Rank>> nodes_;
  std::vector<int> node_of_;
  std::vector<int> local_index_;
  bool equal_nodes_ = true;
  bool uniform_ = true;
  std::vector<Level> levels_;
  std::vector<Rank> grid_;            // ranks by their coordinates, innermost fastest
  std::vector<std::size_t> strides_;  // of each level in grid_
  std::size_t position_ = 0;          // of this rank in grid_
};

}  // namespace qcoll::topo
