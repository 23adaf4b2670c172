// The front functions: chunks as whole pieces of memory, their checks, and the choice of the row.
#include <doctest/doctest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "qcoll/base/error.h"
#include "qcoll/codec/codec.h"
#include "qcoll/wire/layout.h"
#include "test_codec_data.h"

using namespace qcoll;
using codec_test::Guarded;
using wire::CodecSpec;
using wire::parse_codec;

namespace {

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "no error";
}

// Runs the test case `name` of this program in a process of its own; its exit status.
int run_alone(const std::string& name, const std::string& forced_isa) {
  std::string filter = "--test-case=" + name, row = "QCOLL_FORCE_ISA=" + forced_isa;
  std::string program = "/proc/self/exe", no_skip = "--no-skip", quiet = "--out=/dev/null";
  char* arguments[] = {program.data(), filter.data(), no_skip.data(), quiet.data(), nullptr};
  char* environment[] = {row.data(), nullptr};
  pid_t pid = 0;
  if (posix_spawn(&pid, program.c_str(), nullptr, nullptr, arguments, environment) != 0) return -1;
  int status = -1;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("codec chunks: exact copies any type bit for bit, padding is zero") {
  codec_test::Random random(31);
  for (int type = 0; type < kDTypes; ++type) {
    const auto t = static_cast<DType>(type);
    for (const std::size_t n : {0, 1, 3, 16, 1001}) {
      const std::size_t payload = n * element_bytes(t);
      const Guarded x(payload), y(payload), chunk((payload + 15) / 16 * 16);
      for (std::size_t i = 0; i < payload; ++i) x.data()[i] = static_cast<std::byte>(random());
      for (std::size_t i = 0; i < chunk.size(); ++i) chunk.data()[i] = std::byte{0xab};
      CHECK(codec::encode(wire::kExactCodec, t, x.data(), n, {chunk.data(), chunk.size()}) == 0);
      codec::decode(wire::kExactCodec, t, {chunk.data(), chunk.size()}, n, y.data());
      CHECK(y.bytes() == x.bytes());
      std::vector<std::uint8_t> expected = x.bytes();
      expected.resize(chunk.size(), 0);
      CHECK(chunk.bytes() == expected);
    }
  }
}

TEST_CASE("codec chunks: exact and bf16 add what they carry") {
  const float sums[3] = {1, 2, 3};
  const std::uint16_t halves[3] = {0x3f80, 0x4000, 0xbf80};  // 1, 2, -1 as bf16
  alignas(16) std::byte chunk[16] = {};
  std::memcpy(chunk, halves, 6);
  for (const char* codec : {"exact", "bf16"}) {
    float y[3];
    std::memcpy(y, sums, sizeof y);
    codec::decode_add(parse_codec(codec), DType::kBF16, {chunk, 16}, 3, y);
    CHECK(std::tuple(y[0], y[1], y[2]) == std::tuple(2.0f, 4.0f, 2.0f));
  }
}

TEST_CASE("codec chunks: bf16 halves fp32 and leaves bf16 alone") {
  codec_test::Random random(32);
  for (const DType t : codec_test::kTypes) {
    const oracle::Elements x = codec_test::mixture(t, 8, 64, 77, random);
    const Guarded in(77 * element_bytes(t)), out(77 * element_bytes(t)), chunk(160);
    codec_test::put(t, x, in.data());
    for (std::size_t i = 0; i < chunk.size(); ++i) chunk.data()[i] = std::byte{0xab};
    CHECK(codec::encode(parse_codec("bf16"), t, in.data(), 77, {chunk.data(), 160}) == 0);
    codec::decode(parse_codec("bf16"), t, {chunk.data(), 160}, 77, out.data());
    const oracle::Elements y = codec_test::get(t, out.data(), 77);
    for (std::size_t i = 0; i < 77; ++i) {
      const double v = oracle::value(t, x[i]);
      const double through = oracle::value(DType::kBF16, oracle::saturated_bits(DType::kBF16, v));
      if (std::isnan(v))
        CHECK(std::isnan(oracle::value(t, y[i])));
      else
        CHECK(y[i] == oracle::saturated_bits(t, through));
    }
    for (std::size_t i = 154; i < 160; ++i) CHECK(chunk.bytes()[i] == 0);
  }
}

TEST_CASE("codec chunks: five ones by int4 are the example of the wire format") {
  const float x[5] = {1, 1, 1, 1, 1};
  alignas(16) std::byte chunk[32];
  codec::encode(parse_codec("int4:32"), DType::kF32, x, 5, {chunk, 32});
  std::byte expected[32] = {};
  for (int i = 0; i < 5; ++i) expected[i] = std::byte{0x08};
  expected[17] = std::byte{0xbe};
  CHECK(std::memcmp(chunk, expected, 32) == 0);
}

TEST_CASE("codec chunks: any Inf or NaN as a scale reads as a non-finite block") {
  for (const std::uint16_t scale : {0x7fc0, 0x7f80, 0xff80, 0x7f81, 0xffff})
    for (const char* codec : {"int8:32", "int4:32"})
      for (const codec::Kernels* row : codec::rows()) {
        alignas(16) std::byte chunk[48] = {};
        const std::size_t size = codec[3] == '8' ? 48 : 32;
        chunk[0] = std::byte{0x11};
        std::memcpy(chunk + size - 16, &scale, 2);
        const std::uint32_t nan = 0x7fc00000, other_nan = 0xffc12345;
        std::uint32_t y[32] = {}, sum[32];
        std::fill_n(sum, 32, other_nan);
        codec::decode(parse_codec(codec), DType::kF32, {chunk, size}, 32, y, *row);
        codec::decode_add(parse_codec(codec), DType::kF32, {chunk, size}, 32,
                          reinterpret_cast<float*>(sum), *row);
        CHECK(std::count(y, y + 32, nan) == 32);
        CHECK(std::count(sum, sum + 32, nan) == 32);
      }
}

TEST_CASE("codec chunks: a wrong size, alignment, type or codec is an error that says so") {
  alignas(16) std::byte chunk[544] = {};
  float x[500] = {};
  const CodecSpec int8 = parse_codec("int8:256");
  const std::string size =
      "codec::encode of 500 float32 elements by int8:256: the chunk holds 512 bytes, expected "
      "exactly 528";
  CHECK(error_of([&] { codec::encode(int8, DType::kF32, x, 500, {chunk, 512}); }) == size);
  CHECK(error_of([&] {
          codec::encode(int8, DType::kF32, x, 500, {chunk, 544});
        }).ends_with("holds 544 bytes, expected exactly 528"));
  CHECK(error_of([&] { codec::decode(int8, DType::kBF16, {chunk, 16}, 500, x); }) ==
        "codec::decode of 500 bfloat16 elements by int8:256: the chunk holds 16 bytes, expected "
        "exactly 528");
  CHECK(error_of([&] {
          codec::decode_add(int8, DType::kF32, {chunk, 0}, 500, x);
        }).starts_with("codec::decode_add of 500 float32 elements by int8:256: the chunk holds 0"));
  CHECK(error_of([&] {
          codec::encode(int8, DType::kF32, x, 500, {chunk + 4, 528});
        }).ends_with("the chunk lies 4 bytes past a 16-byte boundary, expected on one"));
  CHECK(error_of([&] { codec::encode(int8, DType::kI64, x, 1, {chunk, 32}); }) ==
        "codec::encode of 1 int64 elements by int8:256: the codec takes float32, bfloat16 and "
        "float16 only; use exact");
  CHECK(error_of([&] { codec::decode_add(wire::kExactCodec, DType::kI32, {chunk, 16}, 4, x); }) ==
        "codec::decode_add: sums are of float32, bfloat16 and float16, not of int32");
  for (const auto& [bits, block] : {std::tuple{3, 64}, {8, 0}, {8, 33}, {4, 8192}, {0, 64}}) {
    const CodecSpec odd{.kind = CodecSpec::Kind::kInt,
                        .bits = static_cast<std::uint8_t>(bits),
                        .block = static_cast<std::uint16_t>(block)};
    CHECK(error_of([&] {
            codec::encode(odd, DType::kF32, x, 64, {chunk, 80});
          }).ends_with("no such codec"));
  }
}

TEST_CASE("codec chunks: nothing encodes to nothing, without memory") {
  for (const char* codec : {"exact", "bf16", "int8", "int4"}) {
    CHECK(codec::encode(parse_codec(codec), DType::kF32, nullptr, 0, {}) == 0);
    codec::decode(parse_codec(codec), DType::kF32, {}, 0, nullptr);
    codec::decode_add(parse_codec(codec), DType::kF32, {}, 0, nullptr);
  }
}

TEST_CASE("codec chunks: an unknown row is an error that lists the rows") {
  const std::string error = error_of([] { codec::row_named("v9"); });
  CHECK(error.starts_with("no kernel row \"v9\"; this machine runs: reference"));
  for (const codec::Kernels* row : codec::rows()) {
    CHECK(error.find(row->isa) != std::string::npos);
    CHECK(&codec::row_named(row->isa) == row);
  }
}

TEST_CASE("codec chunks: rows share no kernel, so a row's name tells which code ran") {
  for (const codec::Kernels* a : codec::rows())
    for (const codec::Kernels* b : codec::rows())
      if (a != b)
        for (int t = 0; t < kFloatDTypes; ++t) {
          CHECK((a->encode_int8[t] != b->encode_int8[t]));
          CHECK((a->encode_int4[t] != b->encode_int4[t]));
          CHECK((a->decode_int8[t] != b->decode_int8[t]));
          CHECK((a->decode_int4[t] != b->decode_int4[t]));
        }
}

// Only as a process of its own: the row is chosen once.
TEST_CASE("forced row in a child" * doctest::skip()) {
  const std::string forced = std::getenv("QCOLL_FORCE_ISA");
  REQUIRE(codec::best().isa == forced);
  REQUIRE(&codec::best() == &codec::row_named(forced));
}

TEST_CASE("unknown forced row in a child" * doctest::skip()) {
  REQUIRE(error_of([] {
            codec::best();
          }).starts_with("QCOLL_FORCE_ISA: no kernel row \"v5\"; this machine runs: reference"));
}

TEST_CASE("codec chunks: QCOLL_FORCE_ISA forces the row that runs") {
  for (const codec::Kernels* row : codec::rows())
    CHECK(run_alone("forced row in a child", row->isa) == 0);
  CHECK(run_alone("forced row in a child", "v5") != 0);  // so that a child that ran nothing shows
  CHECK(run_alone("unknown forced row in a child", "v5") == 0);
}
