#include <doctest/doctest.h>

#include <string>
#include <tuple>
#include <vector>

#include "qcoll/base/error.h"
#include "qcoll/comm/chunking.h"
#include "qcoll/comm/policy.h"
#include "qcoll/topo/topology.h"

using namespace qcoll;
using topo::Topology;

namespace {

using Labels = std::vector<std::string>;

std::vector<std::string> codecs_of(const std::string& list, const Topology& topology) {
  std::vector<std::string> names;
  for (const auto& codec : comm::codecs_by_level(comm::parse_codec_list("test", list), topology))
    names.push_back(wire::to_string(codec));
  return names;
}

}  // namespace

TEST_CASE("nodes follow labels, not rank arithmetic") {
  const Labels labels{"b", "a", "b", "a"};
  const Topology topology(2, labels);
  CHECK_EQ(topology.node_count(), 2);
  CHECK(topology.nodes() == std::vector<std::vector<Rank>>{{0, 2}, {1, 3}});
  CHECK_EQ(topology.node(), 0);
  CHECK_EQ(topology.local_index(2), 1);
  CHECK(topology.same_node(0, 2));
  CHECK_FALSE(topology.same_node(0, 1));
  REQUIRE_EQ(topology.levels().size(), 2);
  CHECK(topology.levels()[0].members == std::vector<Rank>{0, 2});
  CHECK_FALSE(topology.levels()[0].crosses_nodes);
  CHECK(topology.levels()[1].members == std::vector<Rank>{2, 3});
  CHECK(topology.levels()[1].crosses_nodes);
  CHECK_EQ(topology.levels()[1].index, 0);
  CHECK_EQ(topology.describe(), "2 nodes x 2 ranks");
}

TEST_CASE("levels of size one cost nothing, uneven nodes are one flat level") {
  CHECK(Topology(0, Labels{"a"}).levels().empty());
  CHECK_EQ(Topology(0, Labels{"a", "a"}).levels().size(), 1);
  CHECK_FALSE(Topology(0, Labels{"a", "a"}).levels()[0].crosses_nodes);
  CHECK_EQ(Topology(0, Labels{"a", "b"}).levels().size(), 1);
  CHECK(Topology(0, Labels{"a", "b"}).levels()[0].crosses_nodes);

  const Topology uneven(2, Labels{"a", "b", "a"});
  CHECK_FALSE(uneven.equal_nodes());
  REQUIRE_EQ(uneven.levels().size(), 1);
  CHECK(uneven.levels()[0].crosses_nodes);
  CHECK(uneven.levels()[0].members == std::vector<Rank>{0, 2, 1});
  CHECK_EQ(uneven.levels()[0].index, 1);
  CHECK_EQ(uneven.describe(), "uneven nodes of 2, 1 ranks");
}

TEST_CASE("a slash in labels makes an outer level") {
  const Labels labels{"r0/a", "r0/a", "r0/b", "r0/b", "r1/c", "r1/c", "r1/d", "r1/d"};
  const Topology topology(5, labels);
  REQUIRE_EQ(topology.levels().size(), 3);
  CHECK(topology.levels()[0].members == std::vector<Rank>{4, 5});
  CHECK(topology.levels()[1].members == std::vector<Rank>{5, 7});
  CHECK(topology.levels()[2].members == std::vector<Rank>{1, 5});
  CHECK_EQ(topology.columns(0), 4);
  CHECK_EQ(topology.columns(1), 2);
  CHECK_EQ(topology.columns(2), 1);
  // Level 1, coordinate 1, column 0: node b of rack 0, the own local index.
  CHECK_EQ(topology.rank_at(1, 1, 0), 3);
  CHECK_EQ(topology.rank_at(1, 1, 1), 7);
}

TEST_CASE("a rank outside the world is refused") {
  CHECK_THROWS_AS(Topology(2, Labels{"a", "b"}), UsageError);
  CHECK_THROWS_AS(Topology(-1, Labels{"a"}), UsageError);
}

TEST_CASE("the last codec of a list belongs to the level that crosses nodes") {
  const Topology two(0, Labels{"a", "a", "b", "b"});
  const Topology flat(0, Labels{"a", "b"});
  const Topology inside(0, Labels{"a", "a"});
  const Topology racks(0, Labels{"r0/a", "r0/a", "r0/b", "r0/b", "r1/c", "r1/c", "r1/d", "r1/d"});
  CHECK(codecs_of("int8", two) == Labels{"int8:256", "int8:256"});
  CHECK(codecs_of("int8/int4", two) == Labels{"int8:256", "int4:128"});
  CHECK(codecs_of("int8/int4", flat) == Labels{"int4:128"});
  CHECK(codecs_of("int8/int4", inside) == Labels{"int8:256"});
  CHECK(codecs_of("exact/int8/int4", racks) == Labels{"exact", "int8:256", "int4:128"});
  CHECK(codecs_of("int8/int4", racks) == Labels{"int8:256", "int4:128", "int4:128"});
}

TEST_CASE("chunks are whole blocks of every level and fit the staging memory, whatever the world") {
  for (const int nodes : {1, 2, 7, 32, 128})
    for (const int per_node : {1, 3, 8})
      for (const std::string list : {"exact", "int8:256/int4:128", "int8:2048/int4:2048"}) {
        if (nodes * per_node == 1) continue;
        Labels labels;
        for (int r = 0; r < nodes * per_node; ++r) labels.push_back(std::to_string(r / per_node));
        const Topology topology(0, labels);
        const auto codecs = comm::codecs_by_level(comm::parse_codec_list("test", list), topology);
        for (const auto collective :
             {wire::Collective::kAllGather, wire::Collective::kReduceScatter,
              wire::Collective::kAllReduce, wire::Collective::kAllToAll}) {
          CAPTURE(nodes);
          CAPTURE(per_node);
          CAPTURE(list);
          const auto [chunk, depth] =
              comm::choose_chunking(collective, topology, codecs, DType::kF32);
          CHECK_GE(chunk, 32);
          CHECK_GE(depth, algo::kMinDepth);
          for (const auto& codec : codecs)
            if (codec.block > 0) CHECK_EQ(chunk % codec.block, 0);
          CHECK_LE(comm::slot_bytes(collective, topology, codecs, DType::kF32, chunk) * depth,
                   comm::kSlotBytes);
        }
      }
}

TEST_CASE("blocks whose common multiple fits no chunk are refused with what would fit") {
  Labels labels;
  for (int r = 0; r < 1024; ++r) labels.push_back(std::to_string(r / 8));
  const Topology topology(0, labels);
  const auto codecs =
      comm::codecs_by_level(comm::parse_codec_list("test", "int8:4096/int4:96"), topology);
  try {
    comm::choose_chunking(wire::Collective::kReduceScatter, topology, codecs, DType::kF32);
    FAIL("accepted");
  } catch (const UsageError& error) {
    CHECK_NE(std::string(error.what()).find("12288"), std::string::npos);
    CHECK_NE(std::string(error.what()).find("powers of two"), std::string::npos);
  }
}
