#include "qcoll/comm/cost_model.h"

#include <algorithm>

namespace qcoll::comm {
namespace {

// A list is used as if its last codec went on for further levels (codecs_by_level).
bool same(const CodecList& a, const CodecList& b) {
  const std::size_t longer = std::max(a.size(), b.size());
  for (std::size_t i = 0; i < longer; ++i)
    if (a[std::min(i, a.size() - 1)] != b[std::min(i, b.size() - 1)]) return false;
  return true;
}

int index_of(wire::Collective collective) {
  return static_cast<int>(collective) - static_cast<int>(wire::Collective::kAllGather);
}

}  // namespace

std::string layout_of(const topo::Topology& topology) {
  std::vector<std::size_t> sizes;
  for (const auto& ranks : topology.nodes()) sizes.push_back(ranks.size());
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  std::string text;
  for (const std::size_t size : sizes) text += (text.empty() ? "" : "+") + std::to_string(size);
  std::string crossing;
  int levels = 0;
  for (const topo::Level& level : topology.levels())
    if (level.crosses_nodes) {
      crossing += (levels++ == 0 ? "/" : "x") + std::to_string(level.size());
    }
  return levels > 1 ? text + crossing : text;
}

std::optional<double> LayoutCosts::predict(wire::Collective collective, DType dtype,
                                           const CodecList& codecs, std::uint64_t bytes) const {
  if (!is_encodable(dtype)) return std::nullopt;
  const auto& candidates = series_[index_of(collective)][static_cast<int>(dtype)];
  const auto found = std::find_if(candidates.begin(), candidates.end(),
                                  [&](const Series& s) { return same(s.codecs, codecs); });
  if (found == candidates.end()) return std::nullopt;
  const auto& points = found->points;
  const auto after =
      std::lower_bound(points.begin(), points.end(), bytes,
                       [](const Point& point, std::uint64_t b) { return point.bytes < b; });
  const auto size = static_cast<double>(bytes);
  if (after == points.begin()) return after->seconds;
  const Point& before = *(after - 1);
  const auto low = static_cast<double>(before.bytes);
  if (after == points.end()) return before.seconds * (size / low);
  const double share = (size - low) / (static_cast<double>(after->bytes) - low);
  return before.seconds + share * (after->seconds - before.seconds);
}

bool LayoutCosts::add(wire::Collective collective, DType dtype, CodecList codecs,
                      std::vector<Point> points) {
  auto& all = series_[index_of(collective)][static_cast<int>(dtype)];
  if (std::any_of(all.begin(), all.end(), [&](const Series& s) { return same(s.codecs, codecs); }))
    return false;
  all.push_back({std::move(codecs), std::move(points)});
  return true;
}

const LayoutCosts* CostModel::of(std::string_view layout) const {
  const auto found = layouts_.find(layout);
  return found == layouts_.end() ? nullptr : &found->second;
}

std::optional<double> CostModel::predict(std::string_view layout, wire::Collective collective,
                                         DType dtype, const CodecList& codecs,
                                         std::uint64_t bytes) const {
  const LayoutCosts* costs = of(layout);
  return costs == nullptr ? std::nullopt : costs->predict(collective, dtype, codecs, bytes);
}

}  // namespace qcoll::comm
