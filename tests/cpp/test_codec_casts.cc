// Casts, sums and stores of every row, against doubles and against the processor's own conversion.
#include <doctest/doctest.h>
#include <immintrin.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "qcoll/codec/codec.h"
#include "test_codec_data.h"

using namespace qcoll;
using codec_test::Elements;
using codec_test::kTypes;

namespace {

// Every 16-bit pattern.
Elements all_halves() {
  Elements x(1 << 16);
  for (std::uint32_t i = 0; i < x.size(); ++i) x[i] = i;
  return x;
}

// fp32 values at which a cast to `t` must decide: every finite value of t, the middle to its
// neighbour, one fp32 step on either side of both; then what no 16-bit type holds.
Elements decisive_floats(DType t) {
  Elements x{0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x00000001, 0x80000001, 0x007fffff};
  for (std::uint32_t half = 0; half < 0x8000; ++half) {
    const double v = oracle::value(t, half), next = oracle::value(t, half + 1);
    if (!std::isfinite(v)) break;
    const double middle =
        std::isfinite(next) ? (v + next) / 2 : v + (v - oracle::value(t, half - 1)) / 2;
    for (const double at : {v, middle})
      for (const std::uint32_t step : {0xffffffffu, 0u, 1u}) {
        const std::uint32_t bits = oracle::float_bits(at) + step;
        if (bits < 0x7f800000u) x.insert(x.end(), {bits, bits | 0x80000000u});
      }
  }
  return x;
}

std::vector<float> floats_of(const Elements& x) {
  std::vector<float> y(x.size());
  std::memcpy(y.data(), x.data(), 4 * x.size());
  return y;
}

using Store = void (*)(const float* sum, std::size_t count, void* y);

template <class Run>
Elements stored(DType t, const Elements& x, const Run& run) {
  std::vector<std::byte> y(x.size() * element_bytes(t));
  run(floats_of(x).data(), x.size(), y.data());
  return codec_test::get(t, y.data(), x.size());
}

std::size_t index_of(DType t) { return static_cast<std::size_t>(t); }

// doctest would print 65536 numbers.
bool same(const Elements& a, const Elements& b) {
  if (a == b) return true;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i)
    if (a[i] != b[i]) {
      MESSAGE("first difference at " << i << ": " << a[i] << " is not " << b[i]);
      break;
    }
  return false;
}

// What a conversion instruction makes of NaN: sign and leading payload stay, the quiet bit is set.
std::uint32_t narrowed_nan(DType t, std::uint32_t bits) {
  if (t == DType::kF32) return bits;
  const std::uint32_t sign = bits >> 16 & 0x8000;
  return sign | (t == DType::kBF16 ? 0x7fc0 | (bits >> 16 & 0x7f) : 0x7e00 | (bits >> 13 & 0x3ff));
}

Elements some_nans(DType t) {
  codec_test::Random random(21);
  Elements x;
  for (int i = 0; i < 1000; ++i) x.push_back(codec_test::nan_bits(t, random));
  return x;
}

__attribute__((target("f16c"))) Elements hardware_f16_of(const Elements& x) {
  const std::vector<float> floats = floats_of(x);
  Elements y;
  for (const float v : floats)
    y.push_back(static_cast<std::uint16_t>(
        _mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(v), _MM_FROUND_TO_NEAREST_INT), 0)));
  return y;
}

__attribute__((target("f16c"))) Elements hardware_f32_of(const Elements& halves) {
  Elements y;
  for (const std::uint32_t h : halves)
    y.push_back(static_cast<std::uint32_t>(
        _mm_cvtsi128_si32(_mm_castps_si128(_mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(h)))))));
  return y;
}

template <class Body>
void for_each_row(const Body& body) {
  for (const codec::Kernels* row : codec::rows()) {
    INFO(row->isa);
    body(*row);
  }
}

Elements widened(const codec::Kernels& row, DType t, const Elements& x) {
  std::vector<std::byte> in(x.size() * element_bytes(t));
  codec_test::put(t, x, in.data());
  std::vector<float> sum(x.size());
  row.widen[index_of(t)](in.data(), x.size(), sum.data());
  return codec_test::get(DType::kF32, reinterpret_cast<std::byte*>(sum.data()), x.size());
}

}  // namespace

TEST_CASE("codec casts: widening is exact for every 16-bit pattern") {
  for (const DType t : {DType::kBF16, DType::kF16}) {
    Elements x, expected;
    for (const std::uint32_t half : all_halves()) {
      const double v = oracle::value(t, half);
      if (std::isnan(v)) continue;
      x.push_back(half);
      expected.push_back(oracle::float_bits(v));
    }
    for_each_row([&](const auto& row) { CHECK(same(widened(row, t, x), expected)); });
  }
}

TEST_CASE("codec casts: stores to 16 bits round to nearest even at every boundary") {
  for (const DType t : {DType::kBF16, DType::kF16}) {
    const Elements x = decisive_floats(t);
    Elements expected;
    for (const std::uint32_t v : x)
      expected.push_back(oracle::cast_bits(t, oracle::float_value(v)));
    for_each_row(
        [&](const auto& row) { CHECK(same(stored(t, x, row.store_sum[index_of(t)]), expected)); });
  }
}

TEST_CASE("codec casts: NaN keeps sign and leading payload and turns quiet") {
  const Elements nans = some_nans(DType::kF32);
  for (const DType t : kTypes) {
    Elements expected;
    for (const std::uint32_t v : nans) expected.push_back(narrowed_nan(t, v));
    for_each_row([&](const auto& row) {
      CHECK(same(stored(t, nans, row.store_sum[index_of(t)]), expected));
    });
  }
}

TEST_CASE("codec casts: fp16 equals the processor's conversion, both ways") {
  if (!__builtin_cpu_supports("f16c")) return;
  Elements x = decisive_floats(DType::kF16);
  const Elements nans = some_nans(DType::kF32);
  x.insert(x.end(), nans.begin(), nans.end());
  codec_test::Random random(22);
  for (int i = 0; i < 100'000; ++i) x.push_back(static_cast<std::uint32_t>(random()));
  const Elements narrow = hardware_f16_of(x), wide = hardware_f32_of(all_halves());
  for_each_row([&](const auto& row) {
    CHECK(same(stored(DType::kF16, x, row.store_sum[index_of(DType::kF16)]), narrow));
    CHECK(same(widened(row, DType::kF16, all_halves()), wide));
  });
}

TEST_CASE("codec casts: the bf16 codec saturates, it makes no Inf of a finite value") {
  const Elements x = decisive_floats(DType::kBF16);
  Elements expected;
  for (const std::uint32_t v : x)
    expected.push_back(oracle::saturated_bits(DType::kBF16, oracle::float_value(v)));
  for_each_row([&](const auto& row) {
    CHECK(same(stored(DType::kBF16, x,
                      [&](const float* from, std::size_t n, void* y) {
                        row.to_bf16[0](from, n, static_cast<std::uint16_t*>(y));
                      }),
               expected));
    for (const DType t : kTypes) {
      std::vector<std::uint16_t> halves;
      Elements back;
      for (const std::uint32_t h : all_halves()) {
        const double v = oracle::value(DType::kBF16, h);
        if (std::isnan(v)) continue;
        halves.push_back(static_cast<std::uint16_t>(h));
        back.push_back(oracle::saturated_bits(t, v));
      }
      std::vector<std::byte> y(halves.size() * element_bytes(t));
      row.from_bf16[index_of(t)](halves.data(), halves.size(), y.data(), codec::Store::kCached);
      CHECK(same(codec_test::get(t, y.data(), halves.size()), back));
    }
    const Elements all = all_halves();
    std::vector<std::uint16_t> same_bits(all.begin(), all.end()), copied(all.size());
    row.to_bf16[index_of(DType::kBF16)](same_bits.data(), all.size(), copied.data());
    CHECK((copied == same_bits));
    row.from_bf16[index_of(DType::kBF16)](same_bits.data(), all.size(), copied.data(),
                                          codec::Store::kCached);
    CHECK((copied == same_bits));
    // fp16 fits bf16's range.
    Elements wide;
    std::vector<std::uint16_t> in, out(all.size());
    for (const std::uint32_t h : all) in.push_back(static_cast<std::uint16_t>(h));
    for (const std::uint32_t h : all) {
      const double v = oracle::value(DType::kF16, h);
      const std::uint32_t nan = (h & 0x8000) | 0x7fc0 | (h >> 3 & 0x7f);
      wide.push_back(std::isnan(v) ? nan : oracle::cast_bits(DType::kBF16, v));
    }
    row.to_bf16[index_of(DType::kF16)](in.data(), in.size(), out.data());
    CHECK(same(Elements(out.begin(), out.end()), wide));
  });
}

TEST_CASE("codec casts: a sum overflows, a mean of finite sums does not") {
  codec_test::Random random(23);
  Elements x = decisive_floats(DType::kF16);
  for (int i = 0; i < 50'000; ++i) x.push_back(static_cast<std::uint32_t>(random()));
  for (const DType t : kTypes)
    for (const float divisor : {1.0f, 2.0f, 3.0f, 5.0f, 12.0f, 1000.0f}) {
      Elements means, scaled;
      for (const std::uint32_t v : x) {
        const double sum = oracle::float_value(v);
        const double mean = static_cast<float>(sum / static_cast<double>(divisor));
        const double product = static_cast<float>(sum * static_cast<double>(divisor));
        means.push_back(oracle::saturated_bits(t, mean));
        scaled.push_back(oracle::cast_bits(t, product));
      }
      for_each_row([&, t = t](const auto& row) {
        INFO(name_of(t) << " by " << divisor);
        CHECK(same(stored(t, x,
                          [&](const float* sum, std::size_t n, void* y) {
                            row.store_mean[index_of(t)](sum, n, divisor, y);
                          }),
                   means));
        CHECK(same(stored(t, x,
                          [&](const float* sum, std::size_t n, void* y) {
                            row.store_scaled[index_of(t)](sum, n, divisor, y);
                          }),
                   scaled));
      });
    }
}

TEST_CASE("codec casts: the mean of ones is one for every divisor up to 4096") {
  for_each_row([](const auto& row) {
    for (int n = 1; n <= 4096; ++n) {
      const float sum = static_cast<float>(n);
      float y = 0;
      row.store_mean[0](&sum, 1, sum, &y);
      REQUIRE(y == 1.0f);
    }
  });
}

TEST_CASE("codec casts: sums are fp32 sums; NaN of any origin is one NaN") {
  codec_test::Random random(24);
  for (const DType t : kTypes) {
    Elements x, sums, expected;
    for (int i = 0; i < 20'000; ++i) {
      const bool special = i % 3 == 0;
      x.push_back(special ? codec_test::mixture(t, 8, 1, 1, random)[0]
                          : codec_test::finite_bits(t, random));
      sums.push_back(special ? static_cast<std::uint32_t>(random())
                             : codec_test::finite_bits(DType::kF32, random));
      expected.push_back(oracle::bits_of(
          DType::kF32,
          static_cast<float>(oracle::float_value(sums.back()) + oracle::value(t, x.back()))));
    }
    x.insert(x.end(), {oracle::bits_of(t, INFINITY), oracle::bits_of(t, -0.0)});
    sums.insert(sums.end(), {0xff800000u, 0x80000000u});
    expected.insert(expected.end(), {0x7fc00000u, 0x80000000u});
    std::vector<std::byte> in(x.size() * element_bytes(t));
    codec_test::put(t, x, in.data());
    for_each_row([&, t = t](const auto& row) {
      std::vector<float> y = floats_of(sums);
      row.widen_add[index_of(t)](in.data(), x.size(), y.data());
      CHECK(same(codec_test::get(DType::kF32, reinterpret_cast<std::byte*>(y.data()), x.size()),
                 expected));
    });
  }
}
