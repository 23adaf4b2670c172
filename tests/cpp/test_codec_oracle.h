// An independent statement of the codec rules, in double precision and integers. It shares no code
// with qcoll/codec/arith.h, with the kernels, or with wire/layout.h: only types are common.
// Why doubles suffice: products of two fp32 values are exact in them, and a quotient or a sum that
// is rounded to double first and to fp32 then is correctly rounded (53 >= 2 * 24 + 2 bits).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "qcoll/base/types.h"

namespace oracle {

using qcoll::DType;
using Elements = std::vector<std::uint32_t>;  // the bits of elements of any of the three types

inline double float_value(std::uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}

inline std::uint32_t float_bits(double v) {
  const float f = static_cast<float>(v);
  std::uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

struct Format {
  int mantissa_bits;  // stored
  int max_exponent;   // of the largest finite value
  int min_exponent;   // of the smallest normal value
};

inline Format format_of(DType t) {
  if (t == DType::kF32) return {23, 127, -126};
  return t == DType::kBF16 ? Format{7, 127, -126} : Format{10, 15, -14};
}

inline double largest(DType t) {
  const Format f = format_of(t);
  return std::ldexp(2.0 - std::ldexp(1.0, -f.mantissa_bits), f.max_exponent);
}

// The value of element bits; Inf and NaN as such.
inline double value(DType t, std::uint32_t bits) {
  if (t == DType::kF32) return float_value(bits);
  const Format f = format_of(t);
  const int exponent_bits = 15 - f.mantissa_bits;
  const int exponent = static_cast<int>(bits >> f.mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(bits) & ((1 << f.mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  const int implicit = exponent == 0 ? 0 : 1 << f.mantissa_bits;
  const int scale = (exponent == 0 ? 1 : exponent) - (1 - f.min_exponent) - f.mantissa_bits;
  return sign * std::ldexp(implicit + mantissa, scale);
}

// `v` to nearest even with the precision and the subnormals of `t`, overflow to Inf.
inline double rounded(DType t, double v) {
  if (!std::isfinite(v) || v == 0) return v;
  const Format f = format_of(t);
  int exponent;
  std::frexp(v, &exponent);  // |v| in [2^(exponent-1), 2^exponent)
  const int unit = std::max(exponent - 1, f.min_exponent) - f.mantissa_bits;
  const double r = std::ldexp(std::nearbyint(std::ldexp(v, -unit)), unit);
  return std::fabs(r) > largest(t) ? std::copysign(INFINITY, v) : r;
}

// The bits of a value that `t` represents; NaN becomes the canonical one.
inline std::uint32_t bits_of(DType t, double v) {
  if (t == DType::kF32) return std::isnan(v) ? 0x7fc00000u : float_bits(v);
  const Format f = format_of(t);
  if (std::isnan(v)) return t == DType::kBF16 ? 0x7fc0 : 0x7e00;
  const std::uint32_t sign = std::signbit(v) ? 0x8000u : 0u;
  const int infinite = (1 << (15 - f.mantissa_bits)) - 1;
  if (std::isinf(v)) return sign | static_cast<std::uint32_t>(infinite << f.mantissa_bits);
  if (v == 0) return sign;
  int exponent;
  std::frexp(v, &exponent);
  const int unit = std::max(exponent - 1, f.min_exponent);
  // 2^mantissa_bits and more for normal values: the carry adds the exponent field.
  const auto significand = static_cast<int>(std::ldexp(std::fabs(v), f.mantissa_bits - unit));
  const int field = unit - f.min_exponent;
  return sign | static_cast<std::uint32_t>((field << f.mantissa_bits) + significand);
}

inline std::uint32_t cast_bits(DType t, double v) { return bits_of(t, rounded(t, v)); }

// Clamped to the largest finite value first: no Inf from a finite value.
inline std::uint32_t saturated_bits(DType t, double v) {
  return std::isfinite(v) && std::fabs(v) > largest(t) ? bits_of(t, std::copysign(largest(t), v))
                                                       : cast_bits(t, v);
}

// ---- blocks ------------------------------------------------------------------------------------

struct Block {
  bool finite = true;
  double scale = 0;
  std::uint32_t scale_bits = 0;  // bf16
  std::vector<int> codes;
};

inline Block encode_block(int bits, const std::vector<double>& x) {
  Block block;
  block.codes.assign(x.size(), 0);
  double m = 0;
  for (const double v : x) {
    if (!std::isfinite(v)) block.finite = false;
    if (std::fabs(v) > std::fabs(m) || (std::fabs(v) == std::fabs(m) && v > 0)) m = v;
  }
  if (!block.finite) {
    block.scale_bits = 0x7fc0;
    return block;
  }
  if (std::fabs(m) < std::ldexp(1.0, bits - 126)) return block;
  block.scale = rounded(DType::kBF16, m / -std::ldexp(1.0, bits - 1));
  block.scale_bits = bits_of(DType::kBF16, block.scale);
  const float reciprocal = static_cast<float>(1.0 / block.scale);
  const double least = -std::ldexp(1.0, bits - 1);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float product = static_cast<float>(x[i] * static_cast<double>(reciprocal));
    const double q = std::nearbyint(static_cast<double>(product));
    block.codes[i] = static_cast<int>(std::fmin(std::fmax(q, least), -least - 1));
  }
  return block;
}

inline double decoded(const Block& block, std::size_t i) {
  if (!block.finite) return std::numeric_limits<double>::quiet_NaN();
  return block.codes[i] == 0 ? 0.0 : block.codes[i] * block.scale;
}

// ---- chunks: docs/wire_format.md in integers ---------------------------------------------------

inline std::vector<Block> encode_blocks(int bits, std::size_t block, DType t, const Elements& x) {
  std::vector<Block> blocks;
  for (std::size_t begin = 0; begin < x.size(); begin += block) {
    std::vector<double> values;
    for (std::size_t i = begin; i < x.size() && i < begin + block; ++i)
      values.push_back(value(t, x[i]));
    blocks.push_back(encode_block(bits, values));
  }
  return blocks;
}

inline std::vector<std::uint8_t> chunk_of(int bits, const std::vector<Block>& blocks) {
  std::vector<int> codes;
  for (const Block& block : blocks)
    codes.insert(codes.end(), block.codes.begin(), block.codes.end());
  const std::size_t count = codes.size();
  const std::size_t payload = bits == 8 ? count : (count + 31) / 32 * 16;
  const std::size_t scales = (payload + 15) / 16 * 16;
  std::vector<std::uint8_t> chunk(scales + (2 * blocks.size() + 15) / 16 * 16, 0);
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned code = static_cast<unsigned>(codes[i]);
    if (bits == 8)
      chunk[i] = static_cast<std::uint8_t>(code);
    else if (i % 32 < 16)
      chunk[i / 32 * 16 + i % 16] |= static_cast<std::uint8_t>(code & 15);
    else
      chunk[i / 32 * 16 + i % 16] |= static_cast<std::uint8_t>((code & 15) << 4);
  }
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    chunk[scales + 2 * b] = static_cast<std::uint8_t>(blocks[b].scale_bits & 255);
    chunk[scales + 2 * b + 1] = static_cast<std::uint8_t>(blocks[b].scale_bits >> 8);
  }
  return chunk;
}

inline Elements decode_blocks(const std::vector<Block>& blocks, DType t) {
  Elements y;
  for (const Block& block : blocks)
    for (std::size_t i = 0; i < block.codes.size(); ++i)
      y.push_back(saturated_bits(t, decoded(block, i)));
  return y;
}

}  // namespace oracle
