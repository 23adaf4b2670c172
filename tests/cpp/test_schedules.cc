// Every algorithm for every topology, on the trace lane: who sends what to whom, how much, and
// that the smallest slot count suffices.
#include <doctest/doctest.h>

#include <map>
#include <set>
#include <string>
#include <tuple>

#include "qcoll/algo/all_gather.h"
#include "qcoll/algo/all_to_all.h"
#include "qcoll/algo/reduce_scatter.h"
#include "simulator.h"

using namespace qcoll;

namespace {

using Labels = std::vector<std::string>;

Labels uniform_nodes(int nodes, int ranks_per_node) {
  Labels labels;
  for (int n = 0; n < nodes; ++n)
    for (int g = 0; g < ranks_per_node; ++g) labels.push_back("node" + std::to_string(n));
  return labels;
}

Labels interleaved_nodes(int nodes, int ranks_per_node) {
  Labels labels;
  for (int g = 0; g < ranks_per_node; ++g)
    for (int n = 0; n < nodes; ++n) labels.push_back("node" + std::to_string(n));
  return labels;
}

Labels uneven_nodes(const std::vector<int>& sizes) {
  Labels labels;
  for (std::size_t n = 0; n < sizes.size(); ++n)
    for (int g = 0; g < sizes[n]; ++g) labels.push_back("node" + std::to_string(n));
  return labels;
}

std::vector<Labels> all_topologies() {
  std::vector<Labels> all;
  for (int n = 1; n <= 4; ++n)
    for (int g = 1; g <= 8; ++g)
      if (n * g > 1) all.push_back(uniform_nodes(n, g));
  all.push_back(interleaved_nodes(2, 2));
  all.push_back(interleaved_nodes(3, 2));
  for (const auto& sizes : std::vector<std::vector<int>>{{2, 1},
                                                         {1, 3},
                                                         {3, 1, 2},
                                                         {1, 1, 4},
                                                         {4, 2, 3, 1},
                                                         {2, 3},
                                                         {3, 2},
                                                         {3, 4},
                                                         {2, 2, 3},
                                                         {2, 3, 2, 4}})
    all.push_back(uneven_nodes(sizes));
  all.push_back({"b", "a", "a", "b", "c"});
  all.push_back({"r0/a", "r0/a", "r0/b", "r0/b", "r1/c", "r1/c", "r1/d", "r1/d"});
  all.push_back({"r0/a", "r0/b", "r1/c", "r1/d", "r2/e", "r2/f"});
  all.push_back({"r0/a", "r0/b", "r1/c"});  // equal nodes, uneven racks
  return all;
}

std::string name_of(const Labels& labels) {
  std::string name;
  for (const auto& label : labels) name += label + " ";
  return name;
}

std::vector<topo::Topology> topologies_of(const Labels& labels) {
  std::vector<topo::Topology> all;
  for (std::size_t r = 0; r < labels.size(); ++r) all.emplace_back(static_cast<Rank>(r), labels);
  return all;
}

template <class Run>
std::vector<algo::TraceLane> record(const std::vector<topo::Topology>& topologies,
                                    wire::CodecSpec codec, Run run, bool ops = true) {
  std::vector<algo::TraceLane> lanes;
  for (const auto& topo : topologies) {
    const std::vector<wire::CodecSpec> codecs(topo.levels().size(), codec);
    lanes.emplace_back(topo, DType::kF32, codecs, ops);
    run(lanes.back(), topo);
  }
  return lanes;
}

// Outputs of one slice, in order, must cover [0, count) once.
void check_covers(const std::vector<test::Content>& outputs, Rank slice, std::size_t count) {
  std::map<std::size_t, std::size_t> pieces;
  for (const auto& content : outputs)
    if (content.piece.slice == slice && content.piece.count > 0)
      CHECK(pieces.emplace(content.piece.begin, content.piece.count).second);
  std::size_t end = 0;
  for (const auto& [begin, length] : pieces) {
    CHECK_EQ(begin, end);
    end = begin + length;
  }
  CHECK_EQ(end, count);
}

constexpr std::size_t kChunk = 64;
constexpr wire::CodecSpec kInt8{wire::CodecSpec::Kind::kInt, 8, 32};

const std::vector<std::size_t> kLengths{1, kChunk, kChunk + 1, 5 * kChunk + 3};

}  // namespace

TEST_CASE("all_gather delivers every shard once to every rank and node, with the fewest slots") {
  for (const Labels& labels : all_topologies()) {
    CAPTURE(name_of(labels));
    const auto topologies = topologies_of(labels);
    const int size = static_cast<int>(labels.size());
    for (const std::size_t length : kLengths) {
      const algo::Slices slices{length, length * size, kChunk};
      const auto lanes = record(topologies, kInt8, [&](auto& lane, const auto& topo) {
        algo::all_gather(lane, topo, slices, algo::OwnSlice::kDecode);
      });
      for (const std::uint32_t depth : {algo::kMinDepth, algo::kDepth})
        for (const bool map_neighbours : {true, false}) {
          CAPTURE(depth);
          const auto outcome =
              test::simulate(topologies, lanes, depth, size + depth, map_neighbours);
          REQUIRE_MESSAGE(outcome.finished, outcome.stuck);
          for (int r = 0; r < size; ++r) {
            CHECK_EQ(outcome.ranks[r].most_encodings, 1);
            for (Rank slice = 0; slice < size; ++slice)
              check_covers(outcome.ranks[r].outputs, slice, length);
            for (const auto& content : outcome.ranks[r].outputs)
              for (int source = 0; source < size; ++source)
                CHECK_EQ(content.contributions[source], source == content.piece.slice ? 1 : 0);
          }
          for (int node = 0; node < topologies[0].node_count(); ++node) {
            std::set<std::pair<Rank, std::size_t>> seen;
            for (const auto& piece : outcome.entered_node[node]) {
              CHECK_NE(topologies[0].node_of(piece.slice), node);
              CHECK(seen.emplace(piece.slice, piece.begin).second);
            }
          }
        }
    }
  }
}

TEST_CASE("reduce_scatter sums every rank once, encodes once per hop, with the fewest slots") {
  for (const Labels& labels : all_topologies()) {
    CAPTURE(name_of(labels));
    const auto topologies = topologies_of(labels);
    const int size = static_cast<int>(labels.size());
    for (const std::size_t length : kLengths) {
      const algo::Slices slices{length, length * size, kChunk};
      const auto lanes = record(topologies, kInt8, [&](auto& lane, const auto& topo) {
        algo::reduce_scatter(lane, topo, slices);
      });
      for (const std::uint32_t depth : {algo::kMinDepth, algo::kDepth})
        for (const bool map_neighbours : {true, false}) {
          CAPTURE(depth);
          const auto outcome =
              test::simulate(topologies, lanes, depth, size + depth, map_neighbours);
          REQUIRE_MESSAGE(outcome.finished, outcome.stuck);
          for (int r = 0; r < size; ++r) {
            CHECK_LE(outcome.ranks[r].most_encodings, topologies[0].levels().size());
            check_covers(outcome.ranks[r].outputs, r, length);
            for (const auto& content : outcome.ranks[r].outputs) {
              CHECK_EQ(content.piece.slice, r);
              for (const int times : content.contributions) CHECK_EQ(times, 1);
            }
          }
        }
    }
  }
}

TEST_CASE("short and empty slices of a tensor that does not divide are reduced and gathered") {
  for (const Labels& labels :
       {uniform_nodes(2, 2), uniform_nodes(3, 1), uneven_nodes({2, 1}), uniform_nodes(1, 4)}) {
    const auto topologies = topologies_of(labels);
    const int size = static_cast<int>(labels.size());
    for (const std::size_t total : {std::size_t{1}, kChunk * 2 + 7, kChunk * 5}) {
      const algo::Slices slices{align_up(ceil_div(total, size), 32), total, kChunk};
      const auto reduce = record(topologies, kInt8, [&](auto& lane, const auto& topo) {
        algo::reduce_scatter(lane, topo, slices);
      });
      const auto gather = record(topologies, kInt8, [&](auto& lane, const auto& topo) {
        algo::all_gather(lane, topo, slices, algo::OwnSlice::kDecode);
      });
      const auto reduced = test::simulate(topologies, reduce, algo::kMinDepth, 1);
      const auto gathered = test::simulate(topologies, gather, algo::kMinDepth, 1);
      REQUIRE(reduced.finished);
      REQUIRE(gathered.finished);
      for (Rank r = 0; r < size; ++r) {
        check_covers(reduced.ranks[r].outputs, r, slices.count(r));
        for (Rank slice = 0; slice < size; ++slice)
          check_covers(gathered.ranks[r].outputs, slice, slices.count(slice));
      }
    }
  }
}

TEST_CASE("all_to_all delivers equal and unequal splits, with the fewest slots") {
  for (const Labels& labels : all_topologies()) {
    CAPTURE(name_of(labels));
    const auto topologies = topologies_of(labels);
    const int size = static_cast<int>(labels.size());
    for (const bool equal : {true, false}) {
      // Elements from rank a to rank b; some are zero.
      const auto elements = [&](Rank a, Rank b) -> std::size_t {
        return equal ? 3 * kChunk + 1 : static_cast<std::size_t>((a * 7 + b * 3) % 5) * 50;
      };
      const auto lanes = record(topologies, kInt8, [&](auto& lane, const auto& topo) {
        algo::Splits splits{.chunk = kChunk};
        for (Rank r = 0; r < size; ++r) {
          splits.to.push_back(elements(topo.rank(), r));
          splits.from.push_back(elements(r, topo.rank()));
        }
        algo::all_to_all(lane, topo, splits);
      });
      const auto outcome = test::simulate(topologies, lanes, algo::kMinDepth, 3);
      REQUIRE_MESSAGE(outcome.finished, outcome.stuck);
      for (Rank r = 0; r < size; ++r)
        for (Rank from = 0; from < size; ++from)
          check_covers(outcome.ranks[r].outputs, from, elements(from, r));
    }
  }
}

TEST_CASE("one slot fewer than the engine's least is not enough") {
  // Three nodes on a ring: each waits for its successor to take what it passes on.
  const auto topologies = topologies_of(uniform_nodes(3, 1));
  const algo::Slices slices{5 * kChunk, 15 * kChunk, kChunk};
  const auto lanes = record(topologies, kInt8, [&](auto& lane, const auto& topo) {
    algo::all_gather(lane, topo, slices, algo::OwnSlice::kDecode);
  });
  CHECK(test::simulate(topologies, lanes, algo::kMinDepth, 1).finished);
  CHECK_FALSE(test::simulate(topologies, lanes, algo::kMinDepth - 1, 1).finished);
}

TEST_CASE("a schedule that waits for its own later send is reported as stuck, not as finished") {
  const auto topologies = topologies_of(uniform_nodes(2, 1));
  // Each rank receives before it sends.
  const auto lanes = record(topologies, kInt8, [](algo::TraceLane& lane, const auto& topo) {
    const Rank other = 1 - topo.rank();
    const std::vector<algo::RingPlan> plans{
        {.tag = static_cast<std::uint32_t>(other), .readers = {other}},
        {.tag = static_cast<std::uint32_t>(topo.rank()), .from = other}};
    lane.open(plans);
    auto received = lane.receive(other, static_cast<std::uint32_t>(topo.rank()), 1);
    auto slot = lane.reserve(static_cast<std::uint32_t>(other), 1);
    lane.publish(slot, std::span(&other, 1));
    lane.release(received);
  });
  const auto outcome = test::simulate(topologies, lanes, 4, 1);
  CHECK_FALSE(outcome.finished);
  CHECK_NE(outcome.stuck.find("rank 0"), std::string::npos);
}

TEST_CASE("bytes over the slow link are what the paper's formula says") {
  // The encoded size of `elements` in blocks of 32: one byte each and two for a scale.
  const auto encoded = [](double elements) { return elements * (1 + 2.0 / 32); };
  for (int n = 1; n <= 4; ++n)
    for (int g = 1; g <= 8; ++g) {
      if (n * g == 1) continue;
      CAPTURE(n);
      CAPTURE(g);
      const int size = n * g;
      const std::size_t length = 64 * 1024;
      const double total = encoded(static_cast<double>(length) * size);
      const algo::Slices slices{length, length * size, 8192};
      const auto topologies = topologies_of(uniform_nodes(n, g));
      const auto gather = record(
          topologies, kInt8,
          [&](auto& lane, const auto& topo) {
            algo::all_gather(lane, topo, slices, algo::OwnSlice::kDecode);
          },
          false);
      const auto scatter = record(
          topologies, kInt8,
          [&](auto& lane, const auto& topo) { algo::reduce_scatter(lane, topo, slices); }, false);
      for (int node = 0; node < n; ++node) {
        double gathered = 0;
        double scattered = 0;
        for (int r = node * g; r < (node + 1) * g; ++r) {
          gathered += static_cast<double>(gather[r].across_nodes_bytes());
          scattered += static_cast<double>(scatter[r].across_nodes_bytes());
          CHECK_EQ(static_cast<double>(scatter[r].within_node_bytes()),
                   doctest::Approx(total * (g - 1) / g).epsilon(0.01));
        }
        const double expected = total * (n - 1) / n;
        CHECK_EQ(gathered, doctest::Approx(expected).epsilon(0.01));
        CHECK_EQ(scattered, doctest::Approx(expected).epsilon(0.01));
      }
    }
}

TEST_CASE("bytes of uneven nodes: the gather crosses once, the scatter goes rank to rank") {
  const std::vector<int> sizes{3, 1, 2};
  const auto topologies = topologies_of(uneven_nodes(sizes));
  const int size = 6;
  const std::size_t length = 64 * 1024;
  const algo::Slices slices{length, length * size, 8192};
  const double shard = static_cast<double>(length) * (1 + 2.0 / 32);
  const auto gather = record(
      topologies, kInt8,
      [&](auto& lane, const auto& topo) {
        algo::all_gather(lane, topo, slices, algo::OwnSlice::kDecode);
      },
      false);
  const auto scatter = record(
      topologies, kInt8,
      [&](auto& lane, const auto& topo) { algo::reduce_scatter(lane, topo, slices); }, false);
  for (std::size_t node = 0; node < sizes.size(); ++node) {
    double gathered = 0;
    double scattered = 0;
    for (const Rank r : topologies[0].nodes()[node]) {
      gathered += static_cast<double>(gather[r].across_nodes_bytes());
      scattered += static_cast<double>(scatter[r].across_nodes_bytes());
    }
    // All shards but those of the next node leave this one; each crosses once.
    const int next = sizes[(node + 1) % sizes.size()];
    CHECK_EQ(gathered, doctest::Approx(shard * (size - next)).epsilon(0.01));
    CHECK_EQ(scattered, doctest::Approx(shard * sizes[node] * (size - sizes[node])).epsilon(0.01));
  }
}
