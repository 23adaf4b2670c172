// The scalar reference is what the rules say: compared with the independent oracle, and with the
// promises of docs/numerics.md one by one.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "qcoll/codec/codec.h"
#include "qcoll/wire/layout.h"
#include "test_codec_data.h"

using namespace qcoll;
using codec_test::Elements;
using codec_test::kTypes;
using wire::CodecSpec;

namespace {

CodecSpec int_codec(int bits, std::size_t block) {
  return {.kind = CodecSpec::Kind::kInt,
          .bits = static_cast<std::uint8_t>(bits),
          .block = static_cast<std::uint16_t>(block)};
}

struct alignas(16) Line {
  std::uint8_t bytes[16];
};

class Chunk {
 public:
  Chunk(CodecSpec spec, DType t, const Elements& x, const codec::Kernels& row)
      : spec_(spec), count_(x.size()), row_(row) {
    std::vector<std::byte> bytes(x.size() * element_bytes(t));
    codec_test::put(t, x, bytes.data());
    lines_.resize(wire::chunk_layout(spec, t, count_).bytes / sizeof(Line));
    non_finite_ = codec::encode(spec, t, bytes.data(), count_, span(), row);
  }

  std::vector<std::uint8_t> bytes() {
    const auto* from = reinterpret_cast<const std::uint8_t*>(lines_.data());
    return {from, from + lines_.size() * sizeof(Line)};
  }
  std::size_t non_finite() const { return non_finite_; }

  Elements decoded(DType t) {
    std::vector<std::byte> y(count_ * element_bytes(t));
    codec::decode(spec_, t, span(), count_, y.data(), row_);
    return codec_test::get(t, y.data(), count_);
  }

  Elements added_to(const Elements& sums) {
    std::vector<float> y(sums.size());
    if (!y.empty()) std::memcpy(y.data(), sums.data(), 4 * y.size());
    codec::decode_add(spec_, DType::kF32, span(), count_, y.data(), row_);
    return codec_test::get(DType::kF32, reinterpret_cast<std::byte*>(y.data()), y.size());
  }

 private:
  Bytes span() {
    return {reinterpret_cast<std::byte*>(lines_.data()), lines_.size() * sizeof(Line)};
  }

  CodecSpec spec_;
  std::size_t count_;
  const codec::Kernels& row_;
  std::vector<Line> lines_;
  std::size_t non_finite_ = 0;
};

Chunk reference_chunk(CodecSpec spec, DType t, const Elements& x) {
  return {spec, t, x, codec::reference()};
}

template <class Body>
void for_each_type_and_width(const Body& body) {
  for (const DType t : kTypes)
    for (const int bits : {8, 4}) {
      INFO("int" << bits << " of " << name_of(t));
      body(t, bits);
    }
}

Elements constant(DType t, double v, std::size_t n) { return Elements(n, oracle::cast_bits(t, v)); }

double magnitude_of(DType t, const Elements& x) {
  double m = 0;
  for (const std::uint32_t bits : x) m = std::max(m, std::fabs(oracle::value(t, bits)));
  return m;
}

}  // namespace

TEST_CASE("codec rules: the reference equals the oracle, bytes and decoded values") {
  codec_test::Random random(11);
  for_each_type_and_width([&](DType t, int bits) {
    for (int round = 0; round < 3000; ++round) {
      const std::size_t block = 32 * (1 + random() % 8);
      const std::size_t n = random() % (3 * block);
      const Elements x = codec_test::mixture(t, bits, block, n, random);
      const auto blocks = oracle::encode_blocks(bits, block, t, x);
      Chunk chunk = reference_chunk(int_codec(bits, block), t, x);
      REQUIRE(chunk.bytes() == oracle::chunk_of(bits, blocks));
      const auto non_finite =
          std::count_if(blocks.begin(), blocks.end(), [](const auto& b) { return !b.finite; });
      REQUIRE(chunk.non_finite() == static_cast<std::size_t>(non_finite));
      for (const DType out : kTypes)
        REQUIRE(chunk.decoded(out) == oracle::decode_blocks(blocks, out));
    }
  });
}

TEST_CASE("codec rules: decode_add adds the fp32 value of each code, rounded once") {
  codec_test::Random random(12);
  for (const int bits : {8, 4})
    for (int round = 0; round < 500; ++round) {
      const Elements x = codec_test::mixture(DType::kF32, bits, 64, 200, random);
      Elements sums(x.size());
      for (std::uint32_t& s : sums) s = codec_test::finite_bits(DType::kF32, random);
      const auto blocks = oracle::encode_blocks(bits, 64, DType::kF32, x);
      const Elements values = oracle::decode_blocks(blocks, DType::kF32);
      Elements expected;
      for (std::size_t i = 0; i < x.size(); ++i)
        expected.push_back(oracle::bits_of(
            DType::kF32, static_cast<float>(oracle::value(DType::kF32, sums[i]) +
                                            oracle::value(DType::kF32, values[i]))));
      REQUIRE(reference_chunk(int_codec(bits, 64), DType::kF32, x).added_to(sums) == expected);
    }
}

TEST_CASE("codec rules: the extreme gets the far code for every mantissa, nothing lies beyond") {
  for (const int bits : {8, 4}) {
    const double far = -std::ldexp(1.0, bits - 1);
    long wrong = 0;
    for (std::uint32_t mantissa = 0; mantissa < 1u << 23; ++mantissa) {
      const double m = oracle::float_value(0x3f800000u | mantissa);
      const double s = oracle::rounded(DType::kBF16, m / far);
      const float product = static_cast<float>(m * static_cast<double>(static_cast<float>(1 / s)));
      // The other sign gives +128 or +8, which the clamp lowers by one.
      wrong += std::nearbyint(static_cast<double>(product)) != far;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("codec rules: mantissas all over the range encode alike in every row and in the oracle") {
  // One mantissa of 128 as the extreme, with either sign, above 31 smaller elements of both signs.
  for (const int bits : {8, 4}) {
    Elements x;
    for (std::uint32_t i = 0; i < 1u << 16; ++i) {
      const std::uint32_t m = 0x3f800000u | ((i * 0x8081u) & 0x7fffffu);
      for (const std::uint32_t v : {m, m | 0x80000000u}) {
        x.push_back(v);
        for (std::uint32_t k = 1; k < 32; ++k) x.push_back((v - k * 0x29b51u) ^ (k << 31));
      }
    }
    const auto expected = oracle::chunk_of(bits, oracle::encode_blocks(bits, 32, DType::kF32, x));
    for (const codec::Kernels* row : codec::rows()) {
      INFO("int" << bits << " " << row->isa);
      const bool same = Chunk(int_codec(bits, 32), DType::kF32, x, *row).bytes() == expected;
      CHECK(same);
    }
  }
}

TEST_CASE("codec rules: of both signs at the extreme + wins, in any order") {
  for_each_type_and_width([](DType t, int bits) {
    for (const std::size_t at : {0, 5, 31}) {
      Elements x = constant(t, 0.25, 32);
      x[at] = oracle::bits_of(t, -3.0);
      x[(at + 7) % 32] = oracle::bits_of(t, 3.0);
      const Elements y = reference_chunk(int_codec(bits, 32), t, x).decoded(t);
      CHECK(oracle::value(t, y[(at + 7) % 32]) == 3.0);
      CHECK(y[at] == oracle::cast_bits(t, -3.0 + 3.0 / (1 << (bits - 1))));
    }
  });
}

TEST_CASE("codec rules: one NaN or Inf makes its block NaN and no other") {
  for_each_type_and_width([](DType t, int bits) {
    codec_test::Random random(13);
    for (const std::uint32_t special :
         {codec_test::nan_bits(t, random), oracle::bits_of(t, INFINITY),
          oracle::bits_of(t, -INFINITY)})
      for (const std::size_t at : {0, 63, 64, 100, 127}) {
        Elements x = constant(t, 1.0, 192);
        x[at] = special;
        Chunk chunk = reference_chunk(int_codec(bits, 64), t, x);
        const Elements y = chunk.decoded(t);
        CHECK(chunk.non_finite() == 1);
        for (std::size_t i = 0; i < x.size(); ++i)
          CHECK(y[i] == oracle::bits_of(t, i / 64 == at / 64 ? NAN : 1.0));
      }
  });
}

TEST_CASE("codec rules: below 2^(bits-126) a block is zero, from there on it is not") {
  for (const DType t : {DType::kF32, DType::kBF16})
    for (const int bits : {8, 4}) {
      const std::uint32_t least = oracle::bits_of(t, std::ldexp(1.0, bits - 126));
      for (const std::uint32_t sign : {0u, t == DType::kF32 ? 0x80000000u : 0x8000u}) {
        const CodecSpec spec = int_codec(bits, 32);
        const Elements below =
            reference_chunk(spec, t, Elements(32, sign | (least - 1))).decoded(t);
        CHECK(below == Elements(32, 0));  // +0
        const Elements from = reference_chunk(spec, t, Elements(32, sign | least)).decoded(t);
        CHECK(from == Elements(32, sign | least));
      }
    }
}

TEST_CASE("codec rules: the code 0 decodes to +0, whatever the signs of element and scale") {
  for_each_type_and_width([](DType t, int bits) {
    for (const double extreme : {1.0, -1.0})
      for (const double small : {0.0, -0.0, 1e-6, -1e-6}) {
        Elements x = constant(t, small, 32);
        x[9] = oracle::bits_of(t, extreme);
        Elements y = reference_chunk(int_codec(bits, 32), t, x).decoded(t);
        CHECK(y[9] == x[9]);
        y[9] = 0;
        CHECK(y == Elements(32, 0));
      }
  });
}

TEST_CASE("codec rules: a finite input never decodes to Inf, nor does it come back as NaN") {
  codec_test::Random random(14);
  for_each_type_and_width([&](DType t, int bits) {
    for (int round = 0; round < 500; ++round) {
      const auto kind = round % 2 != 0 ? codec_test::Kind::kNearMax : codec_test::Kind::kAnyBits;
      const Elements x = codec_test::block_of(kind, t, bits, 64, random);
      Chunk chunk = reference_chunk(int_codec(bits, 64), t, x);
      for (const DType out : kTypes)
        for (const std::uint32_t y : chunk.decoded(out))
          CHECK(std::isfinite(oracle::value(out, y)));
    }
    const Elements top(64, oracle::bits_of(t, oracle::largest(t)));
    CHECK(reference_chunk(int_codec(bits, 64), t, top).decoded(t) == top);
  });
}

TEST_CASE("codec rules: ones, powers of two and bf16 constants are exact") {
  codec_test::Random random(15);
  for_each_type_and_width([&](DType t, int bits) {
    std::vector<double> values{1.0, -1.0};
    const oracle::Format f = oracle::format_of(t);
    for (int e = std::max(f.min_exponent, bits - 126); e <= f.max_exponent; ++e)
      values.insert(values.end(), {std::ldexp(1.0, e), -std::ldexp(1.0, e)});
    for (int i = 0; i < 2000; ++i) {
      const double v = oracle::value(DType::kBF16, codec_test::finite_bits(DType::kBF16, random));
      if (std::fabs(v) >= std::ldexp(1.0, std::max(f.min_exponent, bits - 126)) &&
          std::fabs(v) <= oracle::largest(t))
        values.push_back(v);
    }
    for (const double v : values) {
      const Elements x = constant(t, v, 33);
      CHECK(reference_chunk(int_codec(bits, 32), t, x).decoded(t) == x);
    }
  });
}

TEST_CASE("codec rules: encoding what was decoded gives the same bytes where promised") {
  codec_test::Random random(16);
  const auto promised = [](DType from, DType to, int, double m) {
    if (to == DType::kF16) return m >= 0x1p-17 && m <= 65504;
    return from == to || m < oracle::float_value(0x7f7f8000u);
  };
  for (const auto& [from, to] : {std::tuple{DType::kF32, DType::kF32},
                                 {DType::kBF16, DType::kBF16},
                                 {DType::kF32, DType::kBF16},
                                 {DType::kF16, DType::kF16},
                                 {DType::kF32, DType::kF16}})
    for (const int bits : {8, 4}) {
      int checked = 0;
      for (int round = 0; round < 8000; ++round) {
        const auto kind = static_cast<codec_test::Kind>(round % codec_test::kKinds);
        Elements x = codec_test::block_of(kind, from, bits, 64, random);
        if (from == DType::kF32 && to == DType::kF16 && round % 3 != 0) {  // into fp16's range
          for (std::uint32_t& v : x)
            v = oracle::float_bits(codec_test::gaussian(random) * std::ldexp(1.0, round % 29 - 15));
        }
        const double m = magnitude_of(from, x);
        const bool finite = std::all_of(x.begin(), x.end(), [&, f = from](std::uint32_t v) {
          return std::isfinite(oracle::value(f, v));
        });
        if (finite && !promised(from, to, bits, m)) continue;
        ++checked;
        const CodecSpec spec = int_codec(bits, 64);
        Chunk once = reference_chunk(spec, from, x);
        Chunk twice = reference_chunk(spec, to, once.decoded(to));
        INFO("int" << bits << " " << name_of(from) << " to " << name_of(to) << " m " << m);
        REQUIRE(twice.bytes() == once.bytes());
      }
      CHECK(checked > 2000);
    }
}

TEST_CASE("codec rules: the error stays within the bounds") {
  codec_test::Random random(17);
  for_each_type_and_width([&](DType t, int bits) {
    for (int round = 0; round < 3000; ++round) {
      const Elements x = codec_test::mixture(t, bits, 64, 64, random);
      const oracle::Block block = oracle::encode_blocks(bits, 64, t, x)[0];
      if (!block.finite || block.scale == 0) continue;
      const double s = std::fabs(block.scale);
      const Elements y = reference_chunk(int_codec(bits, 64), t, x).decoded(t);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double in = oracle::value(t, x[i]), out = oracle::value(t, y[i]);
        const bool clamped = std::nearbyint(in / block.scale) > (1 << (bits - 1)) - 1;
        int exponent = 0;
        std::frexp(std::max(std::fabs(out), 1e-300), &exponent);
        const oracle::Format f = oracle::format_of(t);
        const double half_ulp =
            std::ldexp(0.5, std::max(exponent - 1, f.min_exponent) - f.mantissa_bits);
        const double bound =
            clamped ? (1 + std::ldexp(1.0, bits - 9)) * s : (0.5 + std::ldexp(1.0, bits - 24)) * s;
        REQUIRE(std::fabs(in - out) <= bound + half_ulp);
      }
    }
  });
}

TEST_CASE("codec rules: the relative error on Gaussian data is what the design measured") {
  constexpr std::size_t kCount = 1 << 20;
  codec_test::Random random(18);
  Elements x(kCount);
  double power = 0;
  for (std::uint32_t& v : x) {
    v = oracle::float_bits(codec_test::gaussian(random));
    power += std::pow(oracle::float_value(v), 2);
  }
  for (const auto& [bits, block, expected] : {std::tuple{4, 64, 0.0949},
                                              {4, 128, 0.1031},
                                              {4, 256, 0.1108},
                                              {8, 64, 0.0059},
                                              {8, 128, 0.0064},
                                              {8, 256, 0.0069}}) {
    Chunk chunk(int_codec(bits, static_cast<std::size_t>(block)), DType::kF32, x, codec::best());
    const Elements y = chunk.decoded(DType::kF32);
    double error = 0;
    for (std::size_t i = 0; i < kCount; ++i)
      error += std::pow(oracle::float_value(y[i]) - oracle::float_value(x[i]), 2);
    INFO("int" << bits << ":" << block);
    CHECK(std::sqrt(error / power) == doctest::Approx(expected).epsilon(0.02));
  }
}
