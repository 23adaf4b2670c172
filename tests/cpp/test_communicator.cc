// The engine on loopback: every collective against sums in double, for several topologies, with
// memory shared inside nodes and with streams everywhere.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <tuple>

#include "qcoll/base/error.h"
#include "qcoll/codec/codec.h"
#include "qcoll/comm/communicator.h"
#include "qcoll/transport/loopback.h"
#include "ranks.h"

using namespace qcoll;

namespace {

comm::Choice codec(const std::string& text) {
  comm::Choice choice{.codecs = comm::parse_codec_list("codec", text)};
  if (text == "exact") choice.exact_because = "asked for";
  return choice;
}

struct World {
  World(const std::string& nodes, bool map_neighbours, int stream_buffer_bytes = 0, int threads = 1)
      : node_of(test::nodes_of(nodes)), labels(test::labels_of(node_of)) {
    std::size_t bytes = 0;
    for (int r = 0; r < size(); ++r)
      bytes = std::max(bytes, comm::Communicator::memory_bytes(topo::Topology(r, labels)));
    meshes = transport::make_loopback(node_of, {bytes, map_neighbours, stream_buffer_bytes});
    for (int r = 0; r < size(); ++r)
      ranks.push_back(
          std::make_unique<comm::Communicator>(*meshes[r], topo::Topology(r, labels), 7, threads));
  }
  int size() const { return static_cast<int>(node_of.size()); }

  std::vector<int> node_of;
  std::vector<std::string> labels;
  std::vector<std::unique_ptr<transport::Mesh>> meshes;
  std::vector<std::unique_ptr<comm::Communicator>> ranks;
};

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(engine);
  return values;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
}

std::byte* bytes_of(std::vector<float>& v, std::size_t at = 0) {
  return reinterpret_cast<std::byte*>(v.data() + at);
}

comm::Call call_of(const std::string& verb, const std::string& codec_text, std::uint64_t sequence) {
  return {.verb = verb,
          .sequence = sequence,
          .dtype = DType::kF32,
          .choice = codec(codec_text),
          .timeout = std::chrono::seconds(60)};
}

const std::vector<std::string> kWorlds{"0",     "00",   "01",    "0011",   "0101",  "001",
                                       "00111", "0001", "00112", "001122", "01234", "000111"};
const std::vector<std::size_t> kCounts{0, 1, 31, 257, 70001, 300007};

double tolerance(const std::string& codec_text, double scale) {
  if (codec_text == "exact") return 1e-5 * scale;
  return codec_text.find("int4") != std::string::npos ? 1.2 * scale : 0.06 * scale;
}

}  // namespace

TEST_CASE("all_gather gives every rank the same bits, near the input") {
  for (const auto& nodes : kWorlds)
    for (const bool mapped : {true, false}) {
      World world(nodes, mapped);
      CAPTURE(nodes);
      CAPTURE(mapped);
      std::uint64_t sequence = 0;
      for (const std::string text : {"exact", "int8:256", "int4:64", "bf16"})
        for (const std::size_t count : kCounts) {
          CAPTURE(text);
          CAPTURE(count);
          ++sequence;
          std::vector<std::vector<float>> outputs(world.size());
          test::run_ranks(world.size(), [&](int rank) {
            auto input = random_values(count, 100 + rank);
            outputs[rank].assign(count * world.size(), NAN);
            std::vector<std::byte*> slices;
            for (int r = 0; r < world.size(); ++r)
              slices.push_back(bytes_of(outputs[rank], r * count));
            world.ranks[rank]->all_gather(call_of("all_gather", text, sequence), bytes_of(input),
                                          slices, count);
          });
          for (int r = 0; r < world.size(); ++r) {
            CHECK(same_bits(outputs[r], outputs[0]));
            const auto expected = random_values(count, 100 + r);
            double worst = 0;
            for (std::size_t i = 0; i < count; ++i)
              worst = std::max(worst, std::abs(double{outputs[0][r * count + i]} - expected[i]));
            CHECK_LE(worst, text == std::string("exact") ? 0 : tolerance(text, 0.5));
          }
        }
    }
}

TEST_CASE("reduce_scatter and all_reduce sum in fp32") {
  for (const auto& nodes : kWorlds)
    for (const bool mapped : {true, false}) {
      World world(nodes, mapped);
      CAPTURE(nodes);
      CAPTURE(mapped);
      std::uint64_t sequence = 0;
      for (const std::string text : {"exact", "int8:256", "int8/int4:64"})
        for (const std::size_t count : kCounts) {
          CAPTURE(text);
          CAPTURE(count);
          const std::size_t total = count * world.size();
          std::vector<double> mean(total, 0);
          std::vector<std::vector<float>> inputs(world.size());
          for (int r = 0; r < world.size(); ++r) {
            inputs[r] = random_values(total, 200 + r);
            for (std::size_t i = 0; i < total; ++i) mean[i] += double{inputs[r][i]} / world.size();
          }
          const double limit = tolerance(text, 1.0);

          ++sequence;
          test::run_ranks(world.size(), [&](int rank) {
            std::vector<float> output(count, NAN);
            std::vector<const std::byte*> slices;
            for (int r = 0; r < world.size(); ++r)
              slices.push_back(bytes_of(inputs[rank], r * count));
            world.ranks[rank]->reduce_scatter(call_of("reduce_scatter", text, sequence),
                                              {wire::ReduceOp::kAvg}, slices, bytes_of(output),
                                              count);
            double worst = 0;
            for (std::size_t i = 0; i < count; ++i)
              worst = std::max(worst, std::abs(output[i] - mean[rank * count + i]));
            CHECK_LE(worst, limit);
          });

          ++sequence;
          std::vector<std::vector<float>> reduced = inputs;
          test::run_ranks(world.size(), [&](int rank) {
            world.ranks[rank]->all_reduce(call_of("all_reduce", text, sequence),
                                          {wire::ReduceOp::kPremulSum, 0.5f},
                                          bytes_of(reduced[rank]), total);
          });
          double worst = 0;
          for (std::size_t i = 0; i < total; ++i)
            worst = std::max(worst, std::abs(reduced[0][i] - 0.5 * world.size() * mean[i]));
          CHECK_LE(worst, limit * world.size());
          for (int r = 1; r < world.size(); ++r) CHECK(same_bits(reduced[r], reduced[0]));
        }
    }
}

TEST_CASE("all_to_all moves equal and unequal splits") {
  for (const auto& nodes : kWorlds)
    for (const bool mapped : {true, false}) {
      World world(nodes, mapped);
      CAPTURE(nodes);
      std::uint64_t sequence = 0;
      for (const std::string text : {"exact", "int8"})
        for (const bool equal : {true, false}) {
          ++sequence;
          const auto elements = [&](int a, int b) -> std::size_t {
            return equal ? 70000 : static_cast<std::size_t>((a * 7 + b * 3) % 5) * 40001;
          };
          test::run_ranks(world.size(), [&](int rank) {
            std::vector<std::vector<float>> in(world.size());
            std::vector<std::vector<float>> out(world.size());
            std::vector<const std::byte*> inputs;
            std::vector<std::byte*> outputs;
            std::vector<std::size_t> to;
            std::vector<std::size_t> from;
            for (int r = 0; r < world.size(); ++r) {
              in[r] = random_values(elements(rank, r), rank * 10 + r);
              out[r].assign(elements(r, rank), NAN);
              to.push_back(in[r].size());
              from.push_back(out[r].size());
              inputs.push_back(bytes_of(in[r]));
              outputs.push_back(bytes_of(out[r]));
            }
            world.ranks[rank]->all_to_all(call_of("all_to_all", text, sequence), inputs, to,
                                          outputs, from);
            for (int r = 0; r < world.size(); ++r) {
              const auto expected = random_values(elements(r, rank), r * 10 + rank);
              double worst = 0;
              for (std::size_t i = 0; i < expected.size(); ++i)
                worst = std::max(worst, std::abs(double{out[r][i]} - expected[i]));
              CHECK_LE(worst, text == std::string("exact") || r == rank ? 0 : 0.05);
            }
          });
        }
    }
}

TEST_CASE("an fp32 slice gathered in place stays exact where it is, and bf16 does not need to") {
  World world("01", true);
  test::run_ranks(2, [&](int rank) {
    std::vector<float> all(2 * 5000, 0.f);
    const auto mine = random_values(5000, rank);
    std::copy(mine.begin(), mine.end(), all.begin() + rank * 5000);
    world.ranks[rank]->all_gather(call_of("all_gather", "int4", 1), bytes_of(all, rank * 5000),
                                  {bytes_of(all), bytes_of(all, 5000)}, 5000);
    CHECK(std::memcmp(all.data() + rank * 5000, mine.data(), 5000 * 4) == 0);
  });
}

TEST_CASE("outputs large enough to be written past the caches") {
  World world("001", true);
  const std::size_t count = codec::kStreamAbove / 4 / world.size() + 1001;
  std::uint64_t sequence = 0;
  for (const std::string text : {"exact", "int8:256", "int4:64", "bf16"}) {
    CAPTURE(text);
    ++sequence;
    std::vector<std::vector<float>> gathered(world.size()), exchanged(world.size());
    test::run_ranks(world.size(), [&](int rank) {
      auto input = random_values(count, 500 + rank);
      // The first element on no line's boundary, and something to see on both sides.
      gathered[rank].assign(count * world.size() + 2, -7.0f);
      exchanged[rank].assign(count * world.size() + 2, -7.0f);
      std::vector<std::byte*> to_gather, to_exchange;
      std::vector<const std::byte*> same_for_all;
      for (int r = 0; r < world.size(); ++r) {
        to_gather.push_back(bytes_of(gathered[rank], r * count + 1));
        to_exchange.push_back(bytes_of(exchanged[rank], r * count + 1));
        same_for_all.push_back(bytes_of(input));
      }
      const std::vector<std::size_t> splits(world.size(), count);
      comm::Communicator& self = *world.ranks[rank];
      self.all_gather(call_of("all_gather", text, 2 * sequence), bytes_of(input), to_gather, count);
      self.all_to_all(call_of("all_to_all", text, 2 * sequence + 1), same_for_all, splits,
                      to_exchange, splits);
    });
    for (int r = 0; r < world.size(); ++r) {
      CHECK(same_bits(gathered[r], gathered[0]));
      for (const auto& output : {gathered[r], exchanged[r]}) {
        CHECK(output.front() == -7.0f);
        CHECK(output.back() == -7.0f);
        double worst = 0;
        for (int from = 0; from < world.size(); ++from) {
          const auto expected = random_values(count, 500 + from);
          for (std::size_t i = 0; i < count; ++i)
            worst = std::max(worst, std::abs(double{output[from * count + i + 1]} - expected[i]));
        }
        CHECK_LE(worst, text == std::string("exact") ? 0 : tolerance(text, 1.0));
      }
    }
  }
}

TEST_CASE("the next chunk is encoded while one is on the wire") {
  World world("01", true, 16 * 1024);
  Trace trace;
  world.ranks[0]->set_trace(&trace);
  test::run_ranks(2, [&](int rank) {
    auto input = random_values(1 << 20, rank);
    std::vector<float> out(2 << 20);
    world.ranks[rank]->all_gather(call_of("all_gather", "int8", 1), bytes_of(input),
                                  {bytes_of(out), bytes_of(out, 1 << 20)}, 1 << 20);
  });
  const auto events = trace.take();
  int overlaps = 0;
  for (const auto& send : events)
    for (const auto& encode : events)
      if (send.kind == TraceEvent::Kind::kSend && encode.kind == TraceEvent::Kind::kEncode &&
          encode.chunk == send.chunk + 1 && encode.begin < send.end)
        ++overlaps;
  CHECK_GE(overlaps, 5);  // of 15 chunks that have a successor
}

TEST_CASE("ranks that pass different sizes get an error that names both") {
  for (const bool mapped : {true, false}) {
    World world("00", mapped);
    std::vector<std::string> errors(2);
    test::run_ranks(2, [&](int rank) {
      const std::size_t count = 100 + rank;
      auto input = random_values(count, rank);
      std::vector<float> out(2 * count);
      try {
        world.ranks[rank]->all_gather(call_of("all_gather", "exact", 1), bytes_of(input),
                                      {bytes_of(out), bytes_of(out, count)}, count);
      } catch (const TransportError& error) {
        errors[rank] = error.what();
        world.meshes[rank]->abort_flag().raise(error);
      }
    });
    for (const auto& text : errors) {
      CAPTURE(text);
      CHECK_NE(text.find("100 elements"), std::string::npos);
      CHECK_NE(text.find("101 elements"), std::string::npos);
    }
  }
}

TEST_CASE("a rank that never comes is named when the time is over") {
  World world("01", true);
  std::vector<float> values(200);
  auto call = call_of("all_gather", "exact", 1);
  call.timeout = std::chrono::milliseconds(200);
  std::string text;
  try {
    world.ranks[0]->all_gather(call, bytes_of(values), {bytes_of(values), bytes_of(values, 100)},
                               100);
  } catch (const TransportError& error) {
    text = error.what();
    CHECK_EQ(error.peer(), 1);
  }
  CHECK_NE(text.find("timed out"), std::string::npos);
  CHECK_NE(text.find("rank 1"), std::string::npos);
}

TEST_CASE("many collectives of random sizes in a row") {
  for (const std::string nodes : {"0011", "001", "012"}) {
    World world(nodes, true);
    test::run_ranks(world.size(), [&](int rank) {
      std::mt19937 sizes(5);  // the same on every rank
      for (std::uint64_t sequence = 1; sequence <= 400; ++sequence) {
        const std::size_t count = sizes() % (sequence % 10 == 0 ? 200000 : 3000);
        std::vector<float> data(count * world.size(), static_cast<float>(rank + 1));
        std::vector<const std::byte*> slices;
        for (int r = 0; r < world.size(); ++r) slices.push_back(bytes_of(data, r * count));
        std::vector<float> out(count);
        world.ranks[rank]->reduce_scatter(call_of("reduce_scatter", "int8/int4", sequence),
                                          {wire::ReduceOp::kSum}, slices, bytes_of(out), count);
        const float sum = static_cast<float>(world.size() * (world.size() + 1)) / 2;
        bool right = true;
        for (const float v : out) right &= v == sum;
        CHECK(right);
      }
    });
  }
}

TEST_CASE("threads that share the chunks change no bit") {
  for (const std::string text : {"exact", "bf16", "int8:256", "int4:96", "int8:4096/int4:32"})
    for (const std::size_t count : {1, 5000, 16384, 70001, 300007}) {
      CAPTURE(text);
      CAPTURE(count);
      std::vector<std::vector<float>> gathered[3];
      std::vector<std::vector<float>> reduced[3];
      const int teams[3] = {1, 2, 5};
      for (int t = 0; t < 3; ++t) {
        World world("0011", true, 0, teams[t]);
        gathered[t].resize(4);
        reduced[t].resize(4);
        test::run_ranks(4, [&](int rank) {
          comm::Call call{.verb = "test", .sequence = 1, .dtype = DType::kF32};
          call.choice.codecs = comm::parse_codec_list("codec", text);
          if (text == "exact") call.choice.exact_because = "asked for";
          auto mine = random_values(count, rank);
          auto& whole = gathered[t][rank];
          whole.resize(4 * count);
          std::vector<std::byte*> slices;
          for (int r = 0; r < 4; ++r) slices.push_back(bytes_of(whole, r * count));
          world.ranks[rank]->all_gather(call, bytes_of(mine), slices, count);
          auto& sum = reduced[t][rank] = random_values(count, 100 + rank);
          call.sequence = 2;
          world.ranks[rank]->all_reduce(call, {.op = wire::ReduceOp::kAvg}, bytes_of(sum), count);
        });
      }
      for (int t = 1; t < 3; ++t)
        for (int rank = 0; rank < 4; ++rank) {
          CHECK(same_bits(gathered[0][rank], gathered[t][rank]));
          CHECK(same_bits(reduced[0][rank], reduced[t][rank]));
        }
    }
}
