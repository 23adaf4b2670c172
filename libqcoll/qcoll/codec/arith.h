// The arithmetic of the codecs, one element or one scale at a time (docs/numerics.md has the rules
// and their reasons). The reference, the vector loops and device code share it, so it uses no
// standard library, selects instead of branching, and never lets a result depend on a denormal
// fp32 operand: flush-to-zero modes must not change an encoded byte.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define QCOLL_ARITH static __host__ __device__ __forceinline__
#else
// Internal linkage: with one shared copy the linker might pick code made for another CPU.
#define QCOLL_ARITH static inline __attribute__((always_inline))
#endif

namespace qcoll::codec::arith {

constexpr std::int32_t kAbsMask = 0x7fffffff;
constexpr std::int32_t kInfBits = 0x7f800000;  // magnitudes below are finite, above are NaN
constexpr std::uint16_t kScaleNonFinite = 0x7fc0;
constexpr std::int32_t kF16Rebias = 112 << 23;  // 127 - 15, the exponent biases of fp32 and fp16
// The canonical NaN of each output type, and its largest finite value as fp32 bits.
constexpr std::uint32_t kNaNF32 = 0x7fc00000;
constexpr std::uint16_t kNaNBf16 = 0x7fc0;
constexpr std::uint16_t kNaNF16 = 0x7e00;
constexpr std::int32_t kMaxF32 = 0x7f7fffff;
constexpr std::int32_t kMaxBf16 = 0x7f7f0000;
constexpr std::int32_t kMaxF16 = 0x477fe000;

QCOLL_ARITH std::uint32_t to_bits(float v) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &v, sizeof bits);
  return bits;
}

QCOLL_ARITH float from_bits(std::uint32_t bits) {
  float v;
  __builtin_memcpy(&v, &bits, sizeof v);
  return v;
}

// |v| as an integer, which orders finite < Inf < NaN. Signed, because SSE and AVX2 have no
// unsigned comparison.
QCOLL_ARITH std::int32_t magnitude(float v) {
  return static_cast<std::int32_t>(to_bits(v)) & kAbsMask;
}

QCOLL_ARITH float with_sign_of(float v, std::int32_t magnitude_bits) {
  return from_bits((to_bits(v) & 0x80000000u) | static_cast<std::uint32_t>(magnitude_bits));
}

// Every operation rounds once, to nearest even. On the host -ffp-contract=off keeps a product and
// a sum apart.
#if defined(__CUDA_ARCH__)
QCOLL_ARITH float mul_rn(float a, float b) { return __fmul_rn(a, b); }
QCOLL_ARITH float add_rn(float a, float b) { return __fadd_rn(a, b); }
QCOLL_ARITH float div_rn(float a, float b) { return __fdiv_rn(a, b); }
#else
QCOLL_ARITH float mul_rn(float a, float b) { return a * b; }
QCOLL_ARITH float add_rn(float a, float b) { return a + b; }
QCOLL_ARITH float div_rn(float a, float b) { return a / b; }
#endif

// The NaN of an operation on two NaNs, or of Inf - Inf, differs between instructions and between
// machines; one value stands for all.
QCOLL_ARITH float canonical(float v) { return v == v ? v : from_bits(kNaNF32); }

// Inf and every finite value above `limit` become `limit`. Not for NaN.
QCOLL_ARITH float clamp(float v, std::int32_t limit) {
  return with_sign_of(v, magnitude(v) > limit ? limit : magnitude(v));
}

// The same for finite values only; Inf and NaN pass.
QCOLL_ARITH float saturate(float v, std::int32_t limit) {
  return magnitude(v) < kInfBits ? clamp(v, limit) : v;
}

// ---- casts -------------------------------------------------------------------------------------
// Nearest even, overflow to Inf. NaN keeps its sign and the leading bits of its payload and turns
// quiet, as conversion instructions have it.

QCOLL_ARITH float bf16_to_f32(std::uint16_t h) {
  return from_bits(static_cast<std::uint32_t>(h) << 16);
}

QCOLL_ARITH std::uint16_t number_to_bf16(float v) {  // not for NaN
  const std::uint32_t bits = to_bits(v);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

QCOLL_ARITH std::uint16_t f32_to_bf16(float v) {
  const std::uint16_t quiet = static_cast<std::uint16_t>((to_bits(v) >> 16) | 0x40u);
  return magnitude(v) > kInfBits ? quiet : number_to_bf16(v);
}

QCOLL_ARITH float finite_f16_to_f32(std::uint16_t h) {
  const std::int32_t shifted = static_cast<std::int32_t>(h & 0x7fffu) << 13;
  const std::int32_t normal = shifted + kF16Rebias;
  // Exponent 0 means 2^-14 * mantissa: read it as 2^-14 * (1 + mantissa) and take 2^-14 away,
  // which is exact.
  const float above = from_bits(static_cast<std::uint32_t>(normal + (1 << 23)));
  const std::int32_t subnormal = static_cast<std::int32_t>(to_bits(add_rn(above, -0x1p-14f)));
  const std::int32_t bits = shifted < (1 << 23) ? subnormal : normal;
  return from_bits((static_cast<std::uint32_t>(h & 0x8000u) << 16) |
                   static_cast<std::uint32_t>(bits));
}

QCOLL_ARITH float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t shifted = static_cast<std::uint32_t>(h & 0x7fffu) << 13;
  const std::uint32_t inf_or_nan = shifted + 2 * static_cast<std::uint32_t>(kF16Rebias);
  const std::uint32_t quiet = (h & 0x3ffu) != 0 ? 0x400000u : 0u;
  return (h & 0x7c00u) != 0x7c00u ? finite_f16_to_f32(h) : from_bits(sign | inf_or_nan | quiet);
}

QCOLL_ARITH std::uint16_t small_to_f16(float v) {  // for |v| < 65520, which no cast makes Inf
  constexpr std::int32_t kMinNormal = 0x38800000;  // 2^-14
  const std::uint32_t sign = (to_bits(v) >> 16) & 0x8000u;
  const std::int32_t bits = magnitude(v);
  const std::int32_t normal = (bits + 0xfff + ((bits >> 13) & 1) - kF16Rebias) >> 13;
  // An ulp of 0.5 is the unit of fp16 subnormals, so the sum rounds to it.
  const float above = add_rn(from_bits(static_cast<std::uint32_t>(bits)), 0.5f);
  const std::int32_t subnormal = static_cast<std::int32_t>(to_bits(above)) - 0x3f000000;
  const std::int32_t h = bits < kMinNormal ? subnormal : normal;
  return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(h));
}

QCOLL_ARITH std::uint16_t f32_to_f16(float v) {
  constexpr std::int32_t kOverflow = 0x477ff000;  // 65520, halfway between the largest and 2^16
  const std::uint32_t sign = (to_bits(v) >> 16) & 0x8000u;
  const std::int32_t bits = magnitude(v);
  const std::int32_t quiet = 0x7e00 | ((bits >> 13) & 0x3ff);
  const std::int32_t inf_or_nan = bits > kInfBits ? quiet : 0x7c00;
  const std::uint32_t large = sign | static_cast<std::uint32_t>(inf_or_nan);
  return bits < kOverflow ? small_to_f16(v) : static_cast<std::uint16_t>(large);
}

// ---- blocks ------------------------------------------------------------------------------------

// The scale, as bf16 bits, of a block whose element of largest magnitude is `m`:
//   NaN or Inf                kScaleNonFinite
//   |m| < 2^(kBits-126)       0, so that 1/s and q*s below are normal numbers
//   otherwise                 bf16(m / -2^(kBits-1)): `m` itself gets the code -2^(kBits-1)
template <int kBits>
QCOLL_ARITH std::uint16_t scale_of(float m) {
  constexpr std::int32_t kTiny = (kBits + 1) << 23;
  // The product by a power of two is exact.
  const std::uint16_t scale = number_to_bf16(mul_rn(m, -1.0f / (1 << (kBits - 1))));
  const std::uint16_t finite = magnitude(m) < kTiny ? std::uint16_t{0} : scale;
  return magnitude(m) < kInfBits ? finite : kScaleNonFinite;
}

QCOLL_ARITH bool is_finite_scale(std::uint16_t scale) { return (scale & 0x7fff) < 0x7f80; }

// 1/s correctly rounded, and 0 for the scale 0: every code of its block is then 0.
QCOLL_ARITH float reciprocal_of(float s) {
  const float reciprocal = div_rn(1.0f, s);
  return s == 0.0f ? 0.0f : reciprocal;
}

// 1.5 * 2^23. For |v| < 2^22 the bits of v + kRounder are kRounderBits + round-half-even(v).
constexpr float kRounder = 12582912.0f;
constexpr std::int32_t kRounderBits = 0x4b400000;

QCOLL_ARITH std::int32_t round_half_even(float v) {
  return static_cast<std::int32_t>(to_bits(add_rn(v, kRounder))) - kRounderBits;
}

// clamp(round-half-even(x * (1/s))) for an element of a block with a finite scale.
template <int kBits>
QCOLL_ARITH std::int32_t quantize_one(float x, float reciprocal) {
  constexpr std::int32_t kMin = -(1 << (kBits - 1));
  constexpr std::int32_t kMax = (1 << (kBits - 1)) - 1;
  const std::int32_t q = round_half_even(mul_rn(x, reciprocal));
  return q < kMin ? kMin : q > kMax ? kMax : q;
}

// q * s, which fp32 holds exactly (8 bits times 8 bits) unless it overflows. Adding +0 turns the -0
// of 0 * -s into +0 and changes nothing else; as the product is exact, fusing the two changes
// nothing either.
QCOLL_ARITH float dequantize_one(std::int32_t q, float s) {
#if defined(__FMA__)
  return __builtin_fmaf(static_cast<float>(q), s, 0.0f);
#else
  return add_rn(mul_rn(static_cast<float>(q), s), 0.0f);
#endif
}

}  // namespace qcoll::codec::arith
