// Measured times of collectives, by which a call is exact where a codec would lose. `qcoll tune`
// writes them to a text file:
//
//   qcoll-tuning 1
//   # comments: machine, date
//   2+2 all_gather bfloat16 exact 4096:41.5 65536:120 1048576:900
//   2+2 all_gather bfloat16 int8:256 4096:52 65536:151 1048576:610
//
// A line is a series: layout, collective, dtype, codecs as an option spells them, and points
// BYTES:MICROSECONDS in increasing order of bytes, which are those of the gathered or unreduced
// tensor.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qcoll/base/types.h"
#include "qcoll/comm/options.h"
#include "qcoll/topo/topology.h"
#include "qcoll/wire/header.h"

namespace qcoll::comm {

// Ranks of each node, largest first: "2+2", "3+1". Where nodes form racks, the sizes of the levels
// that cross nodes follow, inner first: "2+2+2+2/2x2".
std::string layout_of(const topo::Topology& topology);

// The series of one layout.
class LayoutCosts {
 public:
  // Seconds of one call: on the line between two points, the first's below it, in proportion to
  // bytes beyond the last. Nothing where there is no such series. Allocates nothing.
  std::optional<double> predict(wire::Collective collective, DType dtype, const CodecList& codecs,
                                std::uint64_t bytes) const;

  struct Point {
    std::uint64_t bytes = 0;
    double seconds = 0;
  };
  // False when there is a series for these codecs already.
  bool add(wire::Collective collective, DType dtype, CodecList codecs, std::vector<Point> points);

 private:
  struct Series {
    CodecList codecs;
    std::vector<Point> points;  // at least one
  };
  static constexpr int kCollectives = 4;

  std::array<std::array<std::vector<Series>, kFloatDTypes>, kCollectives> series_;
};

class CostModel {
 public:
  static constexpr std::size_t kMaxFileBytes = 1 << 20;
  static constexpr std::size_t kMaxSeries = 1000;

  // Throws UsageError that says the line, what is wrong with it and what was expected.
  static CostModel parse(std::string_view text);
  // Throws UsageError that says why the file cannot be read, or that of parse().
  static std::shared_ptr<const CostModel> read(const std::string& path);

  // Null when nothing was measured for this layout. Lives as long as the model.
  const LayoutCosts* of(std::string_view layout) const;
  std::optional<double> predict(std::string_view layout, wire::Collective collective, DType dtype,
                                const CodecList& codecs, std::uint64_t bytes) const;

  // Of the whole text: what ranks compare.
  const std::string& fingerprint() const { return fingerprint_; }

 private:
  std::map<std::string, LayoutCosts, std::less<>> layouts_;
  std::string fingerprint_;
};

}  // namespace qcoll::comm
