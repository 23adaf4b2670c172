// Inputs for the codec tests: blocks of every kind that the rules distinguish, and memory that
// catches an access past its end.
#pragma once

#include <sys/mman.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "qcoll/base/types.h"
#include "test_codec_oracle.h"

namespace codec_test {

using oracle::Elements;
using qcoll::DType;

inline constexpr std::array<DType, 3> kTypes{DType::kF32, DType::kBF16, DType::kF16};

// n bytes that end where an inaccessible page begins: reading or writing past them is a crash, and
// their start has no alignment beyond that of n.
class Guarded {
 public:
  explicit Guarded(std::size_t n) : n_(n), mapped_((n + kPage - 1) / kPage * kPage + kPage) {
    void* at = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(at);
    mprotect(base_ + mapped_ - kPage, kPage, PROT_NONE);
  }
  ~Guarded() { munmap(base_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  std::byte* data() const { return base_ + mapped_ - kPage - n_; }
  std::size_t size() const { return n_; }
  std::vector<std::uint8_t> bytes() const {
    std::vector<std::uint8_t> copy(n_);
    if (n_ != 0) std::memcpy(copy.data(), data(), n_);
    return copy;
  }

 private:
  static constexpr std::size_t kPage = 4096;
  std::size_t n_;
  std::size_t mapped_;
  std::byte* base_;
};

inline void put(DType t, const Elements& x, std::byte* to) {
  for (std::size_t i = 0; i < x.size(); ++i)  // little endian: the low bytes come first
    std::memcpy(to + i * qcoll::element_bytes(t), &x[i], qcoll::element_bytes(t));
}

inline Elements get(DType t, const std::byte* from, std::size_t n) {
  Elements x(n, 0);
  for (std::size_t i = 0; i < n; ++i)
    std::memcpy(&x[i], from + i * qcoll::element_bytes(t), qcoll::element_bytes(t));
  return x;
}

using Random = std::mt19937_64;

inline double uniform(Random& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

inline double gaussian(Random& random) {
  const double radius = std::sqrt(-2 * std::log(1 - uniform(random)));
  return radius * std::cos(2 * 3.14159265358979323846 * uniform(random));
}

// Any bits of the type, Inf and NaN left out.
inline std::uint32_t finite_bits(DType t, Random& random) {
  while (true) {
    const auto bits = static_cast<std::uint32_t>(t == DType::kF32 ? random() : random() & 0xffff);
    if (std::isfinite(oracle::value(t, bits))) return bits;
  }
}

enum class Kind {
  kGaussian,    // of any magnitude that the type has
  kAnyBits,     // extreme spread
  kSubnormal,   // of the type
  kNearTiny,    // around the magnitude below which the scale is 0
  kZeros,       // of both signs
  kNearMax,     // at and around the largest finite value
  kEqual,       // one value
  kBothSigns,   // +m and -m among smaller ones
  kTies,        // elements half way between two codes
  kOneNonZero,  //
  kNaN,         // one of any sign and payload
  kInf,         // one of either sign
  kInfAndNaN,   //
  kNaNBits,     // nothing but NaN, signalling ones too
};
inline constexpr int kKinds = 14;

inline std::uint32_t nan_bits(DType t, Random& random) {
  const int mantissa_bits = oracle::format_of(t).mantissa_bits;
  const auto payload = static_cast<std::uint32_t>(random() % ((1u << mantissa_bits) - 1) + 1);
  const std::uint32_t sign = t == DType::kF32 ? 0x80000000u : 0x8000u;
  const std::uint32_t infinite = oracle::bits_of(t, INFINITY);
  return infinite | payload | ((random() & 1) != 0 ? sign : 0);
}

inline void fill_extremes(Kind kind, DType t, int bits, Elements& x, Random& random) {
  const auto any = [&]() -> std::uint32_t& { return x[random() % x.size()]; };
  const auto sign = [&] { return (random() & 1) != 0 ? 1.0 : -1.0; };
  if (kind == Kind::kBothSigns) {
    const double m = oracle::rounded(t, 1 + uniform(random));
    any() = oracle::bits_of(t, m);
    any() = oracle::bits_of(t, -m);
  } else if (kind == Kind::kTies) {
    const double s = std::ldexp(1.0, static_cast<int>(random() % 8) - 4);
    for (std::uint32_t& v : x)
      v = oracle::cast_bits(
          t, (static_cast<double>(random() % (1u << bits)) - (1 << (bits - 1)) + 0.5) * s);
    any() = oracle::cast_bits(t, -std::ldexp(s, bits - 1) * sign());
  } else if (kind == Kind::kOneNonZero) {
    for (std::uint32_t& v : x) v = 0;
    any() = finite_bits(t, random);
  } else if (kind == Kind::kNaN) {
    any() = nan_bits(t, random);
  } else if (kind == Kind::kInf) {
    any() = oracle::bits_of(t, sign() * INFINITY);
  } else if (kind == Kind::kInfAndNaN) {
    any() = oracle::bits_of(t, sign() * INFINITY);
    any() = nan_bits(t, random);
  } else if (kind == Kind::kNaNBits) {
    for (std::uint32_t& v : x) v = nan_bits(t, random);
  }
}

// n elements of one kind for a codec of `bits`.
inline Elements block_of(Kind kind, DType t, int bits, std::size_t n, Random& random) {
  const oracle::Format f = oracle::format_of(t);
  const int span = f.max_exponent - f.min_exponent - 4;
  const double magnitude =
      std::ldexp(1.0, f.min_exponent + static_cast<int>(random() % static_cast<unsigned>(span)));
  const std::uint32_t equal = finite_bits(t, random);
  const double sign[2] = {1.0, -1.0};
  Elements x(n);
  for (std::uint32_t& v : x) {
    const double plus_minus = sign[random() & 1];
    switch (kind) {
      case Kind::kGaussian:
        v = oracle::saturated_bits(t, gaussian(random) * magnitude);
        break;
      case Kind::kAnyBits:
        v = finite_bits(t, random);
        break;
      case Kind::kSubnormal:
        v = oracle::cast_bits(t, plus_minus * uniform(random) * std::ldexp(1.0, f.min_exponent));
        break;
      case Kind::kNearTiny:
        v = oracle::cast_bits(
            t, plus_minus * std::ldexp(1 + (uniform(random) - 0.5) * 0x1p-6, bits - 126));
        break;
      case Kind::kZeros:
        v = oracle::bits_of(t, 0.0 * plus_minus);
        break;
      case Kind::kNearMax:
        v = oracle::bits_of(t, plus_minus * oracle::largest(t)) -
            static_cast<std::uint32_t>(random() % 3);
        break;
      case Kind::kEqual:
        v = equal;
        break;
      default:
        v = oracle::cast_bits(t, gaussian(random) * 0.25);
    }
  }
  if (n != 0) fill_extremes(kind, t, bits, x, random);
  return x;
}

// n elements whose blocks are of random kinds.
inline Elements mixture(DType t, int bits, std::size_t block, std::size_t n, Random& random) {
  Elements x;
  while (x.size() < n) {
    const auto kind = static_cast<Kind>(random() % kKinds);
    const Elements some = block_of(kind, t, bits, std::min(block, n - x.size()), random);
    x.insert(x.end(), some.begin(), some.end());
  }
  return x;
}

}  // namespace codec_test
