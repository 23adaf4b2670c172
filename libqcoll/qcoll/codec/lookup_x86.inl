// int4 codes by table: a block has 16 values at most, which are computed once and then looked up,
// for 16-bit outputs by every instruction set, for fp32 by AVX-512.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "qcoll/codec/element.inl"
#include "qcoll/wire/layout.h"

namespace qcoll::codec {
namespace {

#if defined(__AVX512BW__)
template <DType kType>
constexpr bool kLooksUp = true;
#else
template <DType kType>
constexpr bool kLooksUp = kType != DType::kF32;
#endif

// Entry i is the value of the nibble i mod 16: two rounds, as the widest index has 5 bits.
constexpr std::size_t kTable = 32;
static_assert(kTable == wire::kInt4Group);

inline __m128i load_group(const std::uint8_t* packed) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed));
}

#if defined(__AVX512BW__)

// The 32 values of a group, in two halves. The permutation ignores the upper bits of an index.
struct Looked32 {
  __m512 low, high;
};
inline Looked32 look_up(const std::uint8_t* packed, __m512 table) {
  const __m512i pairs = _mm512_cvtepu8_epi32(load_group(packed));
  return {_mm512_permutexvar_ps(pairs, table),
          _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table)};
}

inline void look_up_group(const std::uint8_t* packed, const float* table, float* y) {
  const auto [low, high] = look_up(packed, _mm512_load_ps(table));
  _mm512_storeu_ps(y, low);
  _mm512_storeu_ps(y + 16, high);
}

inline void look_up_group(const std::uint8_t* packed, const std::uint16_t* table,
                          std::uint16_t* y) {
  const __m256i pairs = _mm256_cvtepu8_epi16(load_group(packed));
  const __m512i codes =
      _mm512_inserti64x4(_mm512_castsi256_si512(pairs), _mm256_srli_epi16(pairs, 4), 1);
  _mm512_storeu_si512(y, _mm512_permutexvar_epi16(codes, _mm512_load_si512(table)));
}

// sum += value, and the sign and payload of no NaN to care for: `table` is finite.
inline void add_group(const std::uint8_t* packed, const float* table, float* sum) {
  const auto [low, high] = look_up(packed, _mm512_load_ps(table));
  _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), low));
  _mm512_storeu_ps(sum + 16, _mm512_add_ps(_mm512_loadu_ps(sum + 16), high));
}

#else

// The lower and the upper bytes of 16 values.
struct ByteTables {
  __m128i lower, upper;
};
inline ByteTables byte_tables(const std::uint16_t* table) {
  const __m128i a = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  const __m128i b = _mm_load_si128(reinterpret_cast<const __m128i*>(table + 8));
  const __m128i mask = _mm_set1_epi16(0xff);
  return {_mm_packus_epi16(_mm_and_si128(a, mask), _mm_and_si128(b, mask)),
          _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8))};
}

inline void look_up_group(const std::uint8_t* packed, const std::uint16_t* table,
                          std::uint16_t* y) {
  const ByteTables bytes = byte_tables(table);
  const __m128i pairs = load_group(packed);
  const __m128i mask = _mm_set1_epi8(15);
  auto* out = reinterpret_cast<__m128i*>(y);
  for (const __m128i codes :
       {_mm_and_si128(pairs, mask), _mm_and_si128(_mm_srli_epi16(pairs, 4), mask)}) {
    const __m128i lower = _mm_shuffle_epi8(bytes.lower, codes);
    const __m128i upper = _mm_shuffle_epi8(bytes.upper, codes);
    _mm_storeu_si128(out++, _mm_unpacklo_epi8(lower, upper));
    _mm_storeu_si128(out++, _mm_unpackhi_epi8(lower, upper));
  }
}

#endif

}  // namespace
}  // namespace qcoll::codec
