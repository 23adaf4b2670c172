// The whole vectors of the loops where the compiler's own code was measured to be far behind:
// narrowing to bytes and to bf16 (1.3 to 1.6 times slower in cache, with AVX2 and AVX-512 alike),
// and fp16, whose conversion instructions it does not find (2 to 5 times). Each function treats
// as many elements as whole vectors hold and returns their number; the plain loop after it does
// the rest. On x86-64-v2 that is everything.
//
// The bits are those of the plain loops: the conversions round to nearest even, a saturating pack
// is the clamp of arith::quantize_one, a fused q * s + 0 is exact (see arith::dequantize_one).
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "qcoll/codec/element.inl"

namespace qcoll::codec {
namespace {

#if defined(__AVX512BW__)

constexpr std::size_t kLanes = 16;
using Floats = __m512;
using Ints = __m512i;

inline Floats broadcast(float v) { return _mm512_set1_ps(v); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats load_f32(const float* x) { return _mm512_loadu_ps(x); }
inline void store_f32(Floats v, float* y) { _mm512_storeu_ps(y, v); }

inline __m256i load_halves(const std::uint16_t* x) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
}
inline Floats load_bf16(const std::uint16_t* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(x)), 16));
}
inline Floats load_f16(const std::uint16_t* x) { return _mm512_cvtph_ps(load_halves(x)); }

inline Floats load_codes(const std::uint8_t* codes) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
inline Floats dequantized(Floats q, Floats s) { return _mm512_fmadd_ps(q, s, _mm512_setzero_ps()); }

inline Ints rounded_bytes(Floats a, Floats b, Floats c, Floats d) {
  const Ints low = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
  const Ints high = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
  const Ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}
inline void store_bytes(Ints q, std::uint8_t* payload) { _mm512_storeu_si512(payload, q); }
// Two groups: the 16-byte lanes hold low, high, low, high codes.
inline void store_nibbles(Ints q, std::uint8_t* payload) {
  const Ints codes = _mm512_min_epi8(q, _mm512_set1_epi8(7));
  const Ints high = _mm512_shuffle_i64x2(codes, codes, 0xf5);
  const Ints pairs =
      _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), codes, _mm512_slli_epi16(high, 4), 0xca);
  const Ints order = _mm512_setr_epi64(0, 1, 4, 5, 0, 1, 4, 5);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(payload),
                      _mm512_castsi512_si256(_mm512_permutexvar_epi64(order, pairs)));
}

// The rounded half of each number stays in the upper half of its lane. The lower byte of q * s is
// zero, so the bit that decides ties has room there.
inline Ints rounded_to_bf16(Floats v) {
  const Ints bits = _mm512_castps_si512(v);
  const Ints with_odd =
      _mm512_ternarylogic_epi32(bits, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1), 0xf8);
  return _mm512_add_epi32(with_odd, _mm512_set1_epi32(0x7fff));
}
inline void store_bf16(Floats a, Floats b, std::uint16_t* y) {
  const Ints ramp = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16,
                                     15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const Ints upper = _mm512_add_epi16(_mm512_add_epi16(ramp, ramp), _mm512_set1_epi16(1));
  _mm512_storeu_si512(y, _mm512_permutex2var_epi16(rounded_to_bf16(a), upper, rounded_to_bf16(b)));
}
inline void store_f16(Floats v, std::uint16_t* y) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

constexpr std::size_t kLanes = 8;
using Floats = __m256;
using Ints = __m256i;

inline Floats broadcast(float v) { return _mm256_set1_ps(v); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats load_f32(const float* x) { return _mm256_loadu_ps(x); }
inline void store_f32(Floats v, float* y) { _mm256_storeu_ps(y, v); }

inline __m128i load_halves(const std::uint16_t* x) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
}
inline Floats load_bf16(const std::uint16_t* x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(x)), 16));
}
inline Floats load_f16(const std::uint16_t* x) { return _mm256_cvtph_ps(load_halves(x)); }

inline Floats load_codes(const std::uint8_t* codes) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
inline Floats dequantized(Floats q, Floats s) { return _mm256_fmadd_ps(q, s, _mm256_setzero_ps()); }

inline Ints rounded_bytes(Floats a, Floats b, Floats c, Floats d) {
  const Ints low = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
  const Ints high = _mm256_packs_epi32(_mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d));
  const Ints order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}
inline void store_bytes(Ints q, std::uint8_t* payload) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(payload), q);
}
// One group: the 16-byte lanes hold low and high codes.
inline void store_nibbles(Ints q, std::uint8_t* payload) {
  const Ints codes = _mm256_min_epi8(q, _mm256_set1_epi8(7));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(_mm256_castsi256_si128(codes), mask);
  const __m128i high = _mm_slli_epi16(_mm_and_si128(_mm256_extracti128_si256(codes, 1), mask), 4);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(payload), _mm_or_si128(low, high));
}

inline Ints rounded_to_bf16(Floats v) {
  const Ints bits = _mm256_castps_si256(v);
  const Ints odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}
inline void store_bf16(Floats a, Floats b, std::uint16_t* y) {
  const Ints low = _mm256_srli_epi32(rounded_to_bf16(a), 16);
  const Ints high = _mm256_srli_epi32(rounded_to_bf16(b), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y),
                      _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}
inline void store_f16(Floats v, std::uint16_t* y) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y),
                   _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#endif

#if defined(__AVX2__)

template <DType kType>
inline Floats load(const TypeOf<kType>* x) {
  if constexpr (kType == DType::kF32) return load_f32(x);
  if constexpr (kType == DType::kBF16) return load_bf16(x);
  if constexpr (kType == DType::kF16) return load_f16(x);
}

template <int kBits, DType kType>
inline std::size_t quantize_vectors(const TypeOf<kType>* x, std::size_t n, float reciprocal,
                                    std::uint8_t* payload) {
  constexpr std::size_t kStep = 4 * kLanes;  // a whole number of int4 groups
  const Floats r = broadcast(reciprocal);
  std::size_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    const auto scaled = [&](std::size_t k) { return times(load<kType>(x + i + k * kLanes), r); };
    const Ints q = rounded_bytes(scaled(0), scaled(1), scaled(2), scaled(3));
    if constexpr (kBits == 8)
      store_bytes(q, payload + i);
    else
      store_nibbles(q, payload + i / 2);
  }
  return i;
}

template <DType kType>
inline std::size_t dequantize_vectors(const std::uint8_t* codes, std::size_t n, float scale,
                                      TypeOf<kType>* y) {
  const Floats s = broadcast(scale);
  const auto values = [&](std::size_t at) { return dequantized(load_codes(codes + at), s); };
  std::size_t i = 0;
  if constexpr (kType == DType::kF32)
#pragma GCC unroll 4
    for (; i + kLanes <= n; i += kLanes) store_f32(values(i), y + i);
  if constexpr (kType == DType::kBF16)
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) store_bf16(values(i), values(i + kLanes), y + i);
  if constexpr (kType == DType::kF16)
    for (; i + kLanes <= n; i += kLanes) store_f16(values(i), y + i);
  return i;
}

template <DType kType>
inline std::size_t widen_vectors(const TypeOf<kType>* x, std::size_t n, float* y) {
  std::size_t i = 0;
  for (; kType == DType::kF16 && i + kLanes <= n; i += kLanes) store_f32(load<kType>(x + i), y + i);
  return i;
}

template <DType kType>
inline std::size_t narrow_vectors(const float* v, std::size_t n, TypeOf<kType>* y) {
  std::size_t i = 0;
  if constexpr (kType == DType::kF16)
    for (; i + kLanes <= n; i += kLanes) store_f16(load_f32(v + i), y + i);
  return i;
}

#else

template <int kBits, DType kType>
inline std::size_t quantize_vectors(const TypeOf<kType>*, std::size_t, float, std::uint8_t*) {
  return 0;
}
template <DType kType>
inline std::size_t dequantize_vectors(const std::uint8_t*, std::size_t, float, TypeOf<kType>*) {
  return 0;
}
template <DType kType>
inline std::size_t widen_vectors(const TypeOf<kType>*, std::size_t, float*) {
  return 0;
}
template <DType kType>
inline std::size_t narrow_vectors(const float*, std::size_t, TypeOf<kType>*) {
  return 0;
}

#endif

}  // namespace
}  // namespace qcoll::codec
