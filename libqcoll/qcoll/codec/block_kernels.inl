// The kernels as plain loops. They are compiled once for each instruction set and the compiler
// vectorises them; where it does so badly, block_kernels_x86.inl takes the whole vectors and the
// loop here the rest. Everything stays in the anonymous namespace: of a symbol that the variants
// share the linker might pick the AVX-512 code for a machine without it.
//
// Blocks are taken a tile at a time, whole blocks that fit the level-1 cache. Encoding a tile:
//   1. the extreme element of each block;
//   2. all scales and reciprocals, or every block would wait for its own division;
//   3. the codes of each block: as bytes for int8, by way of bytes in nibbles for int4.
// Decoding: int4 tiles are unpacked to bytes, then each block is dequantized. The tile lies
// between the two, because a vector load stalls on narrower stores that are still in flight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qcoll/codec/arith.h"
#include "qcoll/codec/block_kernels_x86.inl"
#include "qcoll/codec/element.inl"
#include "qcoll/wire/layout.h"

namespace qcoll::codec {
namespace {

constexpr std::size_t kTile = wire::kMaxBlock;  // elements
constexpr std::size_t kTileBlocks = kTile / wire::kMinBlock;

// Not from a header, see above.
constexpr std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }
constexpr std::size_t parts_of(std::size_t n, std::size_t size) { return (n + size - 1) / size; }

constexpr std::size_t tile_of(std::size_t block) { return kTile / block * block; }

template <class T>
inline void fill(T* y, std::size_t n, T value) {
  for (std::size_t i = 0; i < n; ++i) y[i] = value;
}

// ---- encode ------------------------------------------------------------------------------------

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
    for (std::size_t b = 0; b < blocks; ++b)
      extremes[b] = extreme_of<kType>(elements + b * block, least(block, n - b * block));
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

// ---- decode ------------------------------------------------------------------------------------

inline void unpack(const std::uint8_t* __restrict payload, std::size_t groups,
                   std::uint8_t* __restrict codes) {
  constexpr std::size_t kHalf = wire::kInt4Group / 2;
  for (std::size_t g = 0; g < groups; ++g) {
    std::uint8_t* group = codes + g * wire::kInt4Group;
#pragma GCC unroll 1
    for (std::size_t i = 0; i < kHalf; ++i) {
      const std::uint8_t pair = payload[g * kHalf + i];
      group[i] = static_cast<std::uint8_t>(((pair & 15) ^ 8) - 8);
      group[kHalf + i] = static_cast<std::uint8_t>(((pair >> 4) ^ 8) - 8);
    }
  }
}

// Calls visit(codes, n, scale, begin) for every block: its n codes as bytes, and where it begins.
template <int kBits, class Visit>
inline void for_each_block(const void* payload, const std::uint16_t* scales, std::size_t count,
                           std::size_t block, Visit visit) {
  const std::size_t tile = tile_of(block);
  std::uint8_t buffer[kBits == 4 ? kTile : 1];
  for (std::size_t begin = 0; begin < count; begin += tile) {
    const std::size_t n = least(tile, count - begin);
    const auto* bytes = static_cast<const std::uint8_t*>(payload) + begin * kBits / 8;
    if constexpr (kBits == 4) unpack(bytes, parts_of(n, wire::kInt4Group), buffer);
    const std::uint8_t* codes = kBits == 8 ? bytes : buffer;
    for (std::size_t i = 0; i < n; i += block)
      visit(codes + i, least(block, n - i), *scales++, begin + i);
  }
}

// Whether a code of the block may exceed `limit`: only such blocks pay for the clamp.
template <int kBits>
inline bool reaches_past(float s, std::int32_t limit) {
  return arith::magnitude(arith::mul_rn(s, 1 << (kBits - 1))) > limit;
}

template <DType kType, bool kClamp>
inline void dequantize(const std::uint8_t* __restrict codes, std::size_t n, float s,
                       TypeOf<kType>* __restrict y) {
  std::size_t i = kClamp ? 0 : dequantize_vectors<kType>(codes, n, s, y);
  for (; i < n; ++i) {
    const float v = arith::dequantize_one(static_cast<std::int8_t>(codes[i]), s);
    y[i] = Element<kType>::narrow_in_range(kClamp ? arith::clamp(v, Element<kType>::kMax) : v);
  }
}

template <bool kClamp>
inline void dequantize_add(const std::uint8_t* __restrict codes, std::size_t n, float s,
                           float* __restrict sum) {
  for (std::size_t i = 0; i < n; ++i) {
    const float v = arith::dequantize_one(static_cast<std::int8_t>(codes[i]), s);
    sum[i] = arith::add_rn(sum[i], kClamp ? arith::clamp(v, arith::kMaxF32) : v);
  }
}

template <int kBits, DType kType>
void decode(const void* payload, const std::uint16_t* scales, std::size_t count, std::size_t block,
            void* y) {
  auto* out = static_cast<TypeOf<kType>*>(y);
  const auto visit = [out](const std::uint8_t* codes, std::size_t n, std::uint16_t scale,
                           std::size_t begin) {
    const float s = arith::bf16_to_f32(scale);
    if (!arith::is_finite_scale(scale))
      fill(out + begin, n, Element<kType>::nan());
    else if (reaches_past<kBits>(s, Element<kType>::kMax))
      dequantize<kType, true>(codes, n, s, out + begin);
    else
      dequantize<kType, false>(codes, n, s, out + begin);
  };
  for_each_block<kBits>(payload, scales, count, block, visit);
}

template <int kBits>
void decode_add(const void* payload, const std::uint16_t* scales, std::size_t count,
                std::size_t block, float* sum) {
  const auto visit = [sum](const std::uint8_t* codes, std::size_t n, std::uint16_t scale,
                           std::size_t begin) {
    const float s = arith::bf16_to_f32(scale);
    if (!arith::is_finite_scale(scale))
      fill(sum + begin, n, arith::from_bits(arith::kNaNF32));
    else if (reaches_past<kBits>(s, arith::kMaxF32))
      dequantize_add<true>(codes, n, s, sum + begin);
    else
      dequantize_add<false>(codes, n, s, sum + begin);
  };
  for_each_block<kBits>(payload, scales, count, block, visit);
}

// ---- casts and sums ----------------------------------------------------------------------------

template <DType kType>
void to_bf16(const void* x, std::size_t count, std::uint16_t* __restrict y) {
  const auto* __restrict in = static_cast<const TypeOf<kType>*>(x);
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (kType == DType::kBF16)
      y[i] = in[i];
    else
      y[i] = arith::f32_to_bf16(arith::saturate(Element<kType>::widen(in[i]), arith::kMaxBf16));
  }
}

template <DType kType>
void from_bf16(const std::uint16_t* __restrict x, std::size_t count, void* y) {
  auto* __restrict out = static_cast<TypeOf<kType>*>(y);
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (kType == DType::kBF16)
      out[i] = x[i];
    else
      out[i] =
          Element<kType>::narrow(arith::saturate(arith::bf16_to_f32(x[i]), Element<kType>::kMax));
  }
}

template <DType kType>
void widen(const void* x, std::size_t count, float* __restrict sum) {
  const auto* __restrict in = static_cast<const TypeOf<kType>*>(x);
  std::size_t i = widen_vectors<kType>(in, count, sum);
  for (; i < count; ++i) sum[i] = Element<kType>::widen(in[i]);
}

template <DType kType>
inline void narrow(const float* __restrict v, std::size_t count, TypeOf<kType>* __restrict y) {
  std::size_t i = narrow_vectors<kType>(v, count, y);
  for (; i < count; ++i) y[i] = Element<kType>::narrow(v[i]);
}

// For 16-bit types the arithmetic goes in one loop and the conversion in another where that
// vectorises better than both in one.
constexpr std::size_t kStage = 512;

template <DType kType>
void widen_add(const void* x, std::size_t count, float* __restrict sum) {
  const auto* __restrict in = static_cast<const TypeOf<kType>*>(x);
  if constexpr (kType == DType::kF16) {
    float stage[kStage];
    for (std::size_t begin = 0; begin < count; begin += kStage) {
      const std::size_t n = least(kStage, count - begin);
      widen<kType>(in + begin, n, stage);
      widen_add<DType::kF32>(stage, n, sum + begin);
    }
  } else {
    for (std::size_t i = 0; i < count; ++i)
      sum[i] = arith::canonical(arith::add_rn(sum[i], Element<kType>::widen(in[i])));
  }
}

template <DType kType, class Map>
inline void store_mapped(const float* __restrict sum, std::size_t count, void* y, Map map) {
  auto* __restrict out = static_cast<TypeOf<kType>*>(y);
  if constexpr (kType == DType::kF32) {
    for (std::size_t i = 0; i < count; ++i) out[i] = map(sum[i]);
  } else {
    float stage[kStage];
    for (std::size_t begin = 0; begin < count; begin += kStage) {
      const std::size_t n = least(kStage, count - begin);
      for (std::size_t i = 0; i < n; ++i) stage[i] = map(sum[begin + i]);
      narrow<kType>(stage, n, out + begin);
    }
  }
}

template <DType kType>
void store_sum(const float* sum, std::size_t count, void* y) {
  narrow<kType>(sum, count, static_cast<TypeOf<kType>*>(y));
}

template <DType kType>
void store_mean(const float* sum, std::size_t count, float divisor, void* y) {
  store_mapped<kType>(sum, count, y, [divisor](float v) {
    return arith::saturate(arith::canonical(arith::div_rn(v, divisor)), Element<kType>::kMax);
  });
}

template <DType kType>
void store_scaled(const float* sum, std::size_t count, float factor, void* y) {
  store_mapped<kType>(sum, count, y,
                      [factor](float v) { return arith::canonical(arith::mul_rn(v, factor)); });
}

}  // namespace
}  // namespace qcoll::codec
