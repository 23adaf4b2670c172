// Threads that share one piece of work.
#include <doctest/doctest.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "qcoll/codec/codec.h"
#include "qcoll/host/team.h"
#include "qcoll/wire/layout.h"

using namespace qcoll;

TEST_CASE("a team does every element once, in parts that begin at the unit") {
  for (const int threads : {1, 2, 3, 8}) {
    host::Team team(threads);
    for (const std::size_t count : {0u, 1u, 4096u, 16384u, 50001u, 65536u, 300000u})
      for (const std::size_t unit : {64u, 192u, 4096u}) {
        CAPTURE(threads);
        CAPTURE(count);
        CAPTURE(unit);
        std::vector<int> times(count, 0);
        std::mutex mutex;
        std::size_t parts = 0;
        bool aligned = true;
        team.split(count, unit, [&](std::size_t begin, std::size_t n) {
          for (std::size_t i = begin; i < begin + n; ++i) ++times[i];
          const std::lock_guard lock(mutex);
          ++parts;
          aligned &= begin % unit == 0;
        });
        CHECK(std::all_of(times.begin(), times.end(), [](int t) { return t == 1; }));
        CHECK(aligned);
        CHECK_LE(parts, 2 * static_cast<std::size_t>(threads));
        if (threads > 1 && count >= 65536) CHECK_GE(parts, 2u);
      }
  }
}

TEST_CASE("what one part throws is thrown to the caller, and the team goes on") {
  host::Team team(3);
  for (int turn = 0; turn < 3; ++turn) {
    CHECK_THROWS_AS(team.split(100000, 64,
                               [](std::size_t begin, std::size_t) {
                                 if (begin > 0) throw std::runtime_error("one part");
                               }),
                    std::runtime_error);
    std::size_t sum = 0;
    std::mutex mutex;
    team.split(100000, 64, [&](std::size_t, std::size_t n) {
      const std::lock_guard lock(mutex);
      sum += n;
    });
    CHECK_EQ(sum, 100000);
  }
}

TEST_CASE("a part of a chunk that does not begin at a unit, or ends behind it, is refused") {
  std::vector<std::byte> memory(4096 + 64);
  auto* chunk = memory.data() + (-reinterpret_cast<std::uintptr_t>(memory.data()) & 15);
  const wire::CodecSpec spec = wire::parse_codec("int8:96");
  const std::size_t bytes = wire::chunk_layout(spec, DType::kF32, 1000).bytes;
  std::vector<float> x(1000);
  CHECK_EQ(codec::part_unit(spec), 192);
  const auto encode = [&](codec::Part part) {
    codec::encode_part(spec, DType::kF32, x.data(), 1000, {chunk, bytes}, part, codec::best());
  };
  CHECK_THROWS(encode({96, 96}));
  CHECK_THROWS(encode({192, 900}));
  CHECK_THROWS(encode({1152, 0}));
  encode({192, 808});
}
