// Encoding. For each tile:
//   1. the extreme element of each block;
//   2. all scales and reciprocals, or every block would wait for its own division;
//   3. the codes of each block: as bytes for int8, by way of bytes in nibbles for int4.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qcoll/codec/arith.h"
#include "qcoll/codec/element.inl"
#include "qcoll/codec/tiles.inl"
#include "qcoll/codec/vectors_x86.inl"
#include "qcoll/wire/layout.h"

namespace qcoll::codec {
namespace {

// The element of largest magnitude, the positive one on a tie. Read as signed integers the largest
// is the largest positive element, as unsigned ones the largest negative element.
template <DType kType>
inline float extreme_of(const TypeOf<kType>* __restrict x, std::size_t n) {
  using Bits = typename Element<kType>::Bits;
  using SignedBits = typename Element<kType>::SignedBits;
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  Bits top = 0;
  SignedBits top_positive = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Bits u = Element<kType>::bits(x[i]);
    const SignedBits s = static_cast<SignedBits>(u);
    top = u > top ? u : top;
    top_positive = s > top_positive ? s : top_positive;
  }
  // No branch: the sign of the extreme is as random as the data. Without negative elements the
  // two are the same number.
  const Bits positive = static_cast<Bits>(top_positive);
  const Bits negative = static_cast<Bits>(top & ~kSign);
  const Bits use_negative = static_cast<Bits>(-static_cast<int>(negative > positive));
  return Element<kType>::widen(
      Element<kType>::from_bits(static_cast<Bits>(positive ^ ((positive ^ top) & use_negative))));
}

// The scales of a tile and their reciprocals, 8 at a time; `extremes` and `reciprocals` are
// kTileBlocks long. Left to itself the compiler unrolls the short loops before it vectorises them.
template <int kBits>
inline void scales_of(const float* extremes, std::size_t blocks, std::uint16_t* scales,
                      float* reciprocals) {
  constexpr std::size_t kPart = 8;
  for (std::size_t begin = 0; begin < blocks; begin += kPart) {
    float s[kPart];
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kPart; ++i)
      s[i] = arith::bf16_to_f32(arith::scale_of<kBits>(extremes[begin + i]));
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kPart; ++i) reciprocals[begin + i] = arith::reciprocal_of(s[i]);
    for (std::size_t i = 0; i < least(kPart, blocks - begin); ++i)
      scales[begin + i] = static_cast<std::uint16_t>(arith::to_bits(s[i]) >> 16);
  }
}

// Codes in the low kBits of each byte. |x * reciprocal| <= 2^(kBits-1) + 1/2, which rounds to even,
// so of the clamp of arith::quantize_one only the upper end can act (tests/cpp/test_codec_rules.cc
// tries every mantissa).
template <int kBits, DType kType>
inline void quantize_to_bytes(const TypeOf<kType>* __restrict x, std::size_t n, float reciprocal,
                              std::uint8_t* __restrict codes) {
  constexpr std::int32_t kLargest = arith::kRounderBits + (1 << (kBits - 1)) - 1;
  for (std::size_t i = 0; i < n; ++i) {
    const float v = arith::mul_rn(Element<kType>::widen_finite(x[i]), reciprocal);
    const std::int32_t q =
        static_cast<std::int32_t>(arith::to_bits(arith::add_rn(v, arith::kRounder)));
    const std::int32_t clamped = q < kLargest ? q : kLargest;
    codes[i] = static_cast<std::uint8_t>(clamped);
  }
}

inline void pack(const std::uint8_t* __restrict codes, std::size_t groups,
                 std::uint8_t* __restrict payload) {
  constexpr std::size_t kHalf = wire::kInt4Group / 2;
  for (std::size_t g = 0; g < groups; ++g) {
    const std::uint8_t* group = codes + g * wire::kInt4Group;
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kHalf; ++i)
      payload[g * kHalf + i] = static_cast<std::uint8_t>((group[i] & 15) | (group[kHalf + i] << 4));
  }
}

// The codes of a block to its place in the payload.
template <int kBits, DType kType>
inline void quantize(const TypeOf<kType>* x, std::size_t n, float reciprocal,
                     std::uint8_t* payload) {
  const std::size_t done = quantize_vectors<kBits, kType>(x, n, reciprocal, payload);
  if constexpr (kBits == 8) {
    quantize_to_bytes<8, kType>(x + done, n - done, reciprocal, payload + done);
  } else if (done < n) {
    std::uint8_t codes[kTile];
    const std::size_t rest = n - done;
    const std::size_t groups = parts_of(rest, wire::kInt4Group);
    quantize_to_bytes<4, kType>(x + done, rest, reciprocal, codes);
    for (std::size_t i = rest; i < groups * wire::kInt4Group; ++i) codes[i] = 0;
    pack(codes, groups, payload + done / 2);
  }
}

template <int kBits, DType kType>
std::size_t encode(const void* x, std::size_t count, std::size_t block, void* payload,
                   std::uint16_t* scales) {
  const std::size_t tile = tile_of(block);
  float extremes[kTileBlocks] = {}, reciprocals[kTileBlocks];
  std::size_t non_finite = 0;
  for (std::size_t begin = 0; begin < count; begin += tile) {
    const auto* elements = static_cast<const TypeOf<kType>*>(x) + begin;
    auto* bytes = static_cast<std::uint8_t*>(payload) + begin * kBits / 8;
    const std::size_t n = least(tile, count - begin);
    const std::size_t blocks = parts_of(n, block);
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::size_t size = least(block, n - b * block);
      prefetch(elements + b * block, size * sizeof elements[0]);
      extremes[b] = extreme_of<kType>(elements + b * block, size);
    }
    scales_of<kBits>(extremes, blocks, scales, reciprocals);
    for (std::size_t b = 0; b < blocks; ++b) {
      const std::size_t size = least(block, n - b * block);
      std::uint8_t* codes = bytes + b * block * kBits / 8;
      if (arith::is_finite_scale(scales[b])) {
        quantize<kBits, kType>(elements + b * block, size, reciprocals[b], codes);
      } else {
        ++non_finite;
        fill(codes, kBits == 8 ? size : parts_of(size, wire::kInt4Group) * 16, std::uint8_t{0});
      }
    }
    scales += blocks;
  }
  return non_finite;
}

}  // namespace
}  // namespace qcoll::codec
