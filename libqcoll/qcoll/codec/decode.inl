// Decoding: int4 codes are looked up in a table of the block's values (lookup_x86.inl), or a tile
// of them is unpacked to bytes, then each block is dequantized. The tile lies between the two,
// because a vector load stalls on narrower stores that are still in flight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qcoll/codec/arith.h"
#include "qcoll/codec/codec.h"
#include "qcoll/codec/element.inl"
#include "qcoll/codec/lookup_x86.inl"
#include "qcoll/codec/stream_x86.inl"
#include "qcoll/codec/tiles.inl"
#include "qcoll/codec/vectors_x86.inl"
#include "qcoll/wire/layout.h"

namespace qcoll::codec {
namespace {

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

// Calls visit(codes, n, scale, begin) for every block: its n codes, of int4 as bytes if kUnpack and
// as they lie in the payload otherwise, and where it begins.
template <int kBits, bool kUnpack, class Visit>
inline void for_each_block(const void* payload, const std::uint16_t* scales, std::size_t count,
                           std::size_t block, Visit visit) {
  const std::size_t tile = tile_of(block);
  std::uint8_t buffer[kUnpack ? kTile : 1];
  for (std::size_t begin = 0; begin < count; begin += tile) {
    const std::size_t n = least(tile, count - begin);
    const auto* bytes = static_cast<const std::uint8_t*>(payload) + begin * kBits / 8;
    if constexpr (kUnpack) unpack(bytes, parts_of(n, wire::kInt4Group), buffer);
    for (std::size_t i = 0; i < n; i += block)
      visit(kUnpack ? buffer + i : bytes + i * kBits / 8, least(block, n - i), *scales++,
            begin + i);
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

// The elements of one block, or of a part of it, from codes as bytes.
template <int kBits, DType kType>
inline void decode_bytes(const std::uint8_t* codes, std::size_t n, std::uint16_t scale,
                         TypeOf<kType>* y) {
  const float s = arith::bf16_to_f32(scale);
  if (!arith::is_finite_scale(scale))
    fill(y, n, Element<kType>::nan());
  else if (reaches_past<kBits>(s, Element<kType>::kMax))
    dequantize<kType, true>(codes, n, s, y);
  else
    dequantize<kType, false>(codes, n, s, y);
}

// int4 codes as they lie in the payload, a group at a time: whole groups of plain blocks by
// visit_group(packed, begin), the others by visit_bytes(codes, n, begin).
template <class VisitGroup, class VisitBytes>
inline void for_each_group(const std::uint8_t* packed, std::size_t n, bool plain,
                           VisitGroup visit_group, VisitBytes visit_bytes) {
  std::size_t i = 0;
  for (; plain && i + wire::kInt4Group <= n; i += wire::kInt4Group) visit_group(packed + i / 2, i);
  for (; i < n; i += wire::kInt4Group) {
    std::uint8_t codes[wire::kInt4Group];
    unpack(packed + i / 2, 1, codes);
    visit_bytes(codes, least(wire::kInt4Group, n - i), i);
  }
}

// Whether the values of a block need neither clamp nor NaN.
template <DType kType>
inline bool plain_int4(std::uint16_t scale) {
  return arith::is_finite_scale(scale) &&
         !reaches_past<4>(arith::bf16_to_f32(scale), Element<kType>::kMax);
}

// The values of all nibbles in a plain block.
template <DType kType>
inline void make_table(std::uint16_t scale, TypeOf<kType>* table) {
  alignas(kTable) static constexpr std::int8_t kCodes[kTable] = {
      0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1,
      0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  dequantize<kType, false>(reinterpret_cast<const std::uint8_t*>(kCodes), kTable,
                           arith::bf16_to_f32(scale), table);
}

// From codes as for_each_block gives them.
template <int kBits, DType kType, bool kPacked>
inline void decode_codes(const std::uint8_t* codes, std::size_t n, std::uint16_t scale,
                         TypeOf<kType>* y) {
  if constexpr (!kPacked) {
    decode_bytes<kBits, kType>(codes, n, scale, y);
  } else {
    alignas(kLine) TypeOf<kType> table[kTable];
    const bool plain = plain_int4<kType>(scale);
    if (plain) make_table<kType>(scale, table);
    for_each_group(
        codes, n, plain,
        [&](const std::uint8_t* packed, std::size_t i) { look_up_group(packed, table, y + i); },
        [&](const std::uint8_t* bytes, std::size_t part, std::size_t i) {
          decode_bytes<4, kType>(bytes, part, scale, y + i);
        });
  }
}

template <int kBits, DType kType>
void decode(const void* payload, const std::uint16_t* scales, std::size_t count, std::size_t block,
            void* y, Store store) {
  constexpr bool kPacked = kBits == 4 && kLooksUp<kType>;
  constexpr bool kUnpack = kBits == 4 && !kPacked;
  auto* out = static_cast<TypeOf<kType>*>(y);
  if (store == Store::kCached) {
    for_each_block<kBits, kUnpack>(
        payload, scales, count, block,
        [out](const std::uint8_t* codes, std::size_t n, std::uint16_t scale, std::size_t begin) {
          decode_codes<kBits, kType, kPacked>(codes, n, scale, out + begin);
        });
    return;
  }
  Stream<TypeOf<kType>> stream(out);
  for_each_block<kBits, kUnpack>(
      payload, scales, count, block,
      [&](const std::uint8_t* codes, std::size_t n, std::uint16_t scale, std::size_t) {
        for (std::size_t i = 0; i < n; i += stream.kRoom) {
          const std::size_t part = least(stream.kRoom, n - i);
          decode_codes<kBits, kType, kPacked>(codes + (kPacked ? i / 2 : i), part, scale,
                                              stream.room());
          stream.add(part);
        }
      });
  stream.finish();
}

// Onto sums, from codes as bytes of a finite scale.
template <int kBits>
inline void add_bytes(const std::uint8_t* codes, std::size_t n, std::uint16_t scale, float* sum) {
  const float s = arith::bf16_to_f32(scale);
  if (reaches_past<kBits>(s, arith::kMaxF32))
    dequantize_add<true>(codes, n, s, sum);
  else
    dequantize_add<false>(codes, n, s, sum);
}

// From codes as for_each_block gives them. `Float` is float: a parameter, because not every
// instruction set declares add_group.
template <int kBits, bool kPacked, class Float>
inline void add_codes(const std::uint8_t* codes, std::size_t n, std::uint16_t scale, Float* sum) {
  if constexpr (!kPacked) {
    add_bytes<kBits>(codes, n, scale, sum);
  } else {
    alignas(kLine) Float table[kTable];
    const bool plain = plain_int4<DType::kF32>(scale);
    if (plain) make_table<DType::kF32>(scale, table);
    for_each_group(
        codes, n, plain,
        [&](const std::uint8_t* packed, std::size_t i) { add_group(packed, table, sum + i); },
        [&](const std::uint8_t* bytes, std::size_t part, std::size_t i) {
          add_bytes<4>(bytes, part, scale, sum + i);
        });
  }
}

template <int kBits>
void decode_add(const void* payload, const std::uint16_t* scales, std::size_t count,
                std::size_t block, float* sum) {
  constexpr bool kPacked = kBits == 4 && kLooksUp<DType::kF32>;
  const auto visit = [sum](const std::uint8_t* codes, std::size_t n, std::uint16_t scale,
                           std::size_t begin) {
    if (arith::is_finite_scale(scale))
      add_codes<kBits, kPacked>(codes, n, scale, sum + begin);
    else
      fill(sum + begin, n, arith::from_bits(arith::kNaNF32));
  };
  for_each_block<kBits, kBits == 4 && !kPacked>(payload, scales, count, block, visit);
}

}  // namespace
}  // namespace qcoll::codec
