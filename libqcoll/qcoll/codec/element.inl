// How the kernels see the three element types.
#pragma once

#include <cstdint>

#include "qcoll/base/types.h"
#include "qcoll/codec/arith.h"

namespace qcoll::codec {
namespace {

template <DType kType>
struct Element;

template <>
struct Element<DType::kF32> {
  using Type = float;
  using Bits = std::uint32_t;
  using SignedBits = std::int32_t;
  static constexpr std::int32_t kMax = arith::kMaxF32;
  static Bits bits(Type v) { return arith::to_bits(v); }
  static Type from_bits(Bits bits) { return arith::from_bits(bits); }
  static Type nan() { return arith::from_bits(arith::kNaNF32); }
  static float widen(Type v) { return v; }
  static float widen_finite(Type v) { return v; }
  static Type narrow(float v) { return v; }
  static Type narrow_in_range(float v) { return v; }
};

struct Element16 {
  using Type = std::uint16_t;
  using Bits = std::uint16_t;
  using SignedBits = std::int16_t;
  static Bits bits(Type v) { return v; }
  static Type from_bits(Bits bits) { return bits; }
};

template <>
struct Element<DType::kBF16> : Element16 {
  static constexpr std::int32_t kMax = arith::kMaxBf16;
  static Type nan() { return arith::kNaNBf16; }
  static float widen(Type v) { return arith::bf16_to_f32(v); }
  static float widen_finite(Type v) { return arith::bf16_to_f32(v); }
  static Type narrow(float v) { return arith::f32_to_bf16(v); }
  static Type narrow_in_range(float v) { return arith::number_to_bf16(v); }
};

template <>
struct Element<DType::kF16> : Element16 {
  static constexpr std::int32_t kMax = arith::kMaxF16;
  static Type nan() { return arith::kNaNF16; }
  static float widen(Type v) { return arith::f16_to_f32(v); }
  static float widen_finite(Type v) { return arith::finite_f16_to_f32(v); }
  static Type narrow(float v) { return arith::f32_to_f16(v); }
  static Type narrow_in_range(float v) { return arith::small_to_f16(v); }
};

template <DType kType>
using TypeOf = typename Element<kType>::Type;

}  // namespace
}  // namespace qcoll::codec
