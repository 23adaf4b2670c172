#include "qcoll/topo/topology.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "qcoll/base/error.h"

namespace qcoll::topo {
namespace {

// "rack1/host3" -> {"rack1", "rack1/host3"}: the label of each enclosing group, outermost first.
std::vector<std::string> enclosing_groups(const std::string& label) {
  std::vector<std::string> groups;
  for (std::size_t slash = label.find('/'); slash != std::string::npos;
       slash = label.find('/', slash + 1))
    groups.push_back(label.substr(0, slash));
  groups.push_back(label);
  return groups;
}

// Members of each group of one depth, groups and members in order of first appearance.
std::vector<std::vector<int>> group_by(const std::vector<std::string>& labels) {
  std::vector<std::vector<int>> groups;
  std::map<std::string, std::size_t> index;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const auto [it, is_new] = index.try_emplace(labels[i], groups.size());
    if (is_new) groups.emplace_back();
    groups[it->second].push_back(static_cast<int>(i));
  }
  return groups;
}

bool equal_sizes(const std::vector<std::vector<int>>& groups) {
  return std::all_of(groups.begin(), groups.end(),
                     [&](const auto& g) { return g.size() == groups.front().size(); });
}

}  // namespace

Topology::Topology(Rank rank, std::span<const std::string> node_labels) : rank_(rank) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= node_labels.size())
    throw UsageError("rank " + std::to_string(rank) + " is outside a world of " +
                     std::to_string(node_labels.size()) + " ranks");
  number_nodes(node_labels);
  build_levels(node_labels);
}

void Topology::number_nodes(std::span<const std::string> node_labels) {
  nodes_ = group_by({node_labels.begin(), node_labels.end()});
  node_of_.resize(node_labels.size());
  local_index_.resize(node_labels.size());
  for (std::size_t node = 0; node < nodes_.size(); ++node)
    for (std::size_t i = 0; i < nodes_[node].size(); ++i) {
      node_of_[nodes_[node][i]] = static_cast<int>(node);
      local_index_[nodes_[node][i]] = static_cast<int>(i);
    }
}

// Walks from the nodes outwards: `units` are the groups of the level below, each the list of its
// ranks by inner coordinates. Siblings (units with the same enclosing group) form the next level.
void Topology::build_levels(std::span<const std::string> node_labels) {
  std::vector<std::vector<std::string>> paths;
  for (const auto& ranks : nodes_) paths.push_back(enclosing_groups(node_labels[ranks[0]]));
  const std::size_t depth = paths[0].size();
  equal_nodes_ = equal_sizes(nodes_);
  uniform_ = equal_nodes_ && std::all_of(paths.begin(), paths.end(),
                                         [&](const auto& p) { return p.size() == depth; });

  std::vector<std::size_t> sizes{nodes_[0].size()};
  std::vector<std::vector<Rank>> units = nodes_;
  for (std::size_t d = depth; uniform_ && d > 0; --d) {
    std::vector<std::string> parents;
    for (const auto& unit : units)
      parents.push_back(d > 1 ? enclosing_groups(node_labels[unit[0]])[d - 2] : "");
    const auto siblings = group_by(parents);
    uniform_ = equal_sizes(siblings);
    std::vector<std::vector<Rank>> merged;
    for (const auto& group : siblings) {
      merged.emplace_back();
      for (const int unit : group)
        merged.back().insert(merged.back().end(), units[unit].begin(), units[unit].end());
    }
    sizes.push_back(siblings[0].size());
    units = std::move(merged);
  }
  if (!uniform_) {
    sizes = {node_labels.size()};
    grid_.clear();
    for (const auto& ranks : nodes_) grid_.insert(grid_.end(), ranks.begin(), ranks.end());
  } else {
    grid_ = units[0];
  }

  position_ = std::find(grid_.begin(), grid_.end(), rank_) - grid_.begin();
  std::size_t stride = 1;
  for (std::size_t l = 0; l < sizes.size(); stride *= sizes[l++]) {
    if (sizes[l] == 1) continue;
    Level level{.members = {},
                .index = static_cast<int>(position_ / stride % sizes[l]),
                .crosses_nodes = uniform_ ? l > 0 : spans_nodes()};
    const std::size_t first = position_ - level.index * stride;
    for (std::size_t i = 0; i < sizes[l]; ++i) level.members.push_back(grid_[first + i * stride]);
    levels_.push_back(std::move(level));
    strides_.push_back(stride);
  }
}

std::size_t Topology::columns(std::size_t level) const {
  return grid_.size() / (strides_[level] * levels_[level].members.size());
}

Rank Topology::rank_at(std::size_t level, int coordinate, std::size_t column) const {
  const std::size_t inner = position_ % strides_[level];
  return grid_[inner + strides_[level] * (coordinate + levels_[level].members.size() * column)];
}

std::string Topology::describe() const {
  if (uniform_)
    return std::to_string(node_count()) + (node_count() == 1 ? " node x " : " nodes x ") +
           std::to_string(nodes_[0].size()) + (nodes_[0].size() == 1 ? " rank" : " ranks");
  std::string text = "uneven nodes of ";
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    text += (i ? ", " : "") + std::to_string(nodes_[i].size());
  return text + " ranks";
}

}  // namespace qcoll::topo
