// The scalar row "reference". It is the specification of the codecs: one element after the other,
// in the words of docs/numerics.md. Every other row returns its bits.
#include <algorithm>

#include "qcoll/codec/arith.h"
#include "qcoll/codec/codec.h"
#include "qcoll/wire/layout.h"

namespace qcoll::codec {
namespace {

// ---- element types -----------------------------------------------------------------------------

template <DType kType>
float load(const void* x, std::size_t i) {
  if constexpr (kType == DType::kF32) return static_cast<const float*>(x)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(x)[i];
  return kType == DType::kBF16 ? arith::bf16_to_f32(bits) : arith::f16_to_f32(bits);
}

template <DType kType>
void store(float v, void* y, std::size_t i) {
  if constexpr (kType == DType::kF32)
    static_cast<float*>(y)[i] = v;
  else
    static_cast<std::uint16_t*>(y)[i] =
        kType == DType::kBF16 ? arith::f32_to_bf16(v) : arith::f32_to_f16(v);
}

template <DType kType>
constexpr std::int32_t kMax = kType == DType::kF32    ? arith::kMaxF32
                              : kType == DType::kBF16 ? arith::kMaxBf16
                                                      : arith::kMaxF16;

// ---- codes in the payload (docs/wire_format.md) ------------------------------------------------

template <int kBits>
void put_code(std::uint8_t* payload, std::size_t i, std::int32_t q) {
  if constexpr (kBits == 8) {
    payload[i] = static_cast<std::uint8_t>(q);
    return;
  }
  constexpr std::size_t kHalf = wire::kInt4Group / 2;
  const std::size_t lane = i % wire::kInt4Group;
  std::uint8_t& pair = payload[i / wire::kInt4Group * kHalf + lane % kHalf];
  pair = static_cast<std::uint8_t>(lane < kHalf ? (pair & 0xf0) | (q & 15)
                                                : (pair & 0x0f) | ((q & 15) << 4));
}

template <int kBits>
std::int32_t get_code(const std::uint8_t* payload, std::size_t i) {
  if constexpr (kBits == 8) return static_cast<std::int8_t>(payload[i]);
  constexpr std::size_t kHalf = wire::kInt4Group / 2;
  const std::size_t lane = i % wire::kInt4Group;
  const std::uint8_t pair = payload[i / wire::kInt4Group * kHalf + lane % kHalf];
  const std::int32_t nibble = lane < kHalf ? pair & 15 : pair >> 4;
  return nibble < 8 ? nibble : nibble - 16;
}

// ---- block codecs ------------------------------------------------------------------------------

// The element of largest magnitude (NaN above Inf above finite); the positive one on a tie.
template <DType kType>
float extreme_of(const void* x, std::size_t begin, std::size_t end) {
  float m = 0;
  for (std::size_t i = begin; i < end; ++i) {
    const float v = load<kType>(x, i);
    const bool larger = arith::magnitude(v) > arith::magnitude(m);
    const bool same = arith::magnitude(v) == arith::magnitude(m);
    const bool positive = arith::to_bits(v) >> 31 == 0;
    if (larger || (same && positive)) m = v;
  }
  return m;
}

template <int kBits, DType kType>
std::size_t encode(const void* x, std::size_t count, std::size_t block, void* payload,
                   std::uint16_t* scales) {
  auto* codes = static_cast<std::uint8_t*>(payload);
  if (kBits == 4) std::fill_n(codes, ceil_div(count, wire::kInt4Group) * wire::kInt4Group / 2, 0);
  std::size_t non_finite = 0;
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t end = std::min(begin + block, count);
    const std::uint16_t scale = arith::scale_of<kBits>(extreme_of<kType>(x, begin, end));
    const bool finite = arith::is_finite_scale(scale);
    const float reciprocal = arith::reciprocal_of(arith::bf16_to_f32(scale));
    for (std::size_t i = begin; i < end; ++i)
      put_code<kBits>(codes, i,
                      finite ? arith::quantize_one<kBits>(load<kType>(x, i), reciprocal) : 0);
    scales[begin / block] = scale;
    non_finite += !finite;
  }
  return non_finite;
}

// The value of one code in fp32, clamped to the largest finite value of the output type: the
// rounded scale can push the extreme past it, and a finite input never decodes to Inf.
template <int kBits>
float decoded(const void* payload, std::size_t i, std::uint16_t scale, std::int32_t limit) {
  if (!arith::is_finite_scale(scale)) return arith::from_bits(arith::kNaNF32);
  const std::int32_t q = get_code<kBits>(static_cast<const std::uint8_t*>(payload), i);
  return arith::clamp(arith::dequantize_one(q, arith::bf16_to_f32(scale)), limit);
}

template <int kBits, DType kType>
void decode(const void* payload, const std::uint16_t* scales, std::size_t count, std::size_t block,
            void* y, Store) {
  for (std::size_t i = 0; i < count; ++i)
    store<kType>(decoded<kBits>(payload, i, scales[i / block], kMax<kType>), y, i);
}

// A NaN block makes the sum the canonical NaN, whatever it was.
template <int kBits>
void decode_add(const void* payload, const std::uint16_t* scales, std::size_t count,
                std::size_t block, float* sum) {
  for (std::size_t i = 0; i < count; ++i) {
    const float v = decoded<kBits>(payload, i, scales[i / block], arith::kMaxF32);
    sum[i] = v == v ? arith::add_rn(sum[i], v) : v;
  }
}

// ---- casts and sums ----------------------------------------------------------------------------

template <DType kType>
void to_bf16(const void* x, std::size_t count, std::uint16_t* y) {
  if constexpr (kType == DType::kBF16) {
    std::copy_n(static_cast<const std::uint16_t*>(x), count, y);
    return;
  }
  for (std::size_t i = 0; i < count; ++i)
    store<DType::kBF16>(arith::saturate(load<kType>(x, i), arith::kMaxBf16), y, i);
}

template <DType kType>
void from_bf16(const std::uint16_t* x, std::size_t count, void* y, Store) {
  if constexpr (kType == DType::kBF16) {
    std::copy_n(x, count, static_cast<std::uint16_t*>(y));
    return;
  }
  for (std::size_t i = 0; i < count; ++i)
    store<kType>(arith::saturate(load<DType::kBF16>(x, i), kMax<kType>), y, i);
}

template <DType kType>
void widen(const void* x, std::size_t count, float* sum) {
  for (std::size_t i = 0; i < count; ++i) sum[i] = load<kType>(x, i);
}

template <DType kType>
void widen_add(const void* x, std::size_t count, float* sum) {
  for (std::size_t i = 0; i < count; ++i)
    sum[i] = arith::canonical(arith::add_rn(sum[i], load<kType>(x, i)));
}

template <DType kType>
void store_sum(const float* sum, std::size_t count, void* y) {
  for (std::size_t i = 0; i < count; ++i) store<kType>(sum[i], y, i);
}

template <DType kType>
void store_mean(const float* sum, std::size_t count, float divisor, void* y) {
  for (std::size_t i = 0; i < count; ++i) {
    const float mean = arith::canonical(arith::div_rn(sum[i], divisor));
    store<kType>(arith::saturate(mean, kMax<kType>), y, i);
  }
}

template <DType kType>
void store_scaled(const float* sum, std::size_t count, float factor, void* y) {
  for (std::size_t i = 0; i < count; ++i)
    store<kType>(arith::canonical(arith::mul_rn(sum[i], factor)), y, i);
}

void stream_copy(const void* x, std::size_t bytes, void* y) {
  std::copy_n(static_cast<const std::byte*>(x), bytes, static_cast<std::byte*>(y));
}

}  // namespace

const Kernels& reference() {
  constexpr DType k32 = DType::kF32, kB = DType::kBF16, kH = DType::kF16;
  static constexpr Kernels kernels{
      .isa = "reference",
      .encode_int8 = {encode<8, k32>, encode<8, kB>, encode<8, kH>},
      .encode_int4 = {encode<4, k32>, encode<4, kB>, encode<4, kH>},
      .decode_int8 = {decode<8, k32>, decode<8, kB>, decode<8, kH>},
      .decode_int4 = {decode<4, k32>, decode<4, kB>, decode<4, kH>},
      .add_int8 = decode_add<8>,
      .add_int4 = decode_add<4>,
      .to_bf16 = {to_bf16<k32>, to_bf16<kB>, to_bf16<kH>},
      .from_bf16 = {from_bf16<k32>, from_bf16<kB>, from_bf16<kH>},
      .widen = {widen<k32>, widen<kB>, widen<kH>},
      .widen_add = {widen_add<k32>, widen_add<kB>, widen_add<kH>},
      .store_sum = {store_sum<k32>, store_sum<kB>, store_sum<kH>},
      .store_mean = {store_mean<k32>, store_mean<kB>, store_mean<kH>},
      .store_scaled = {store_scaled<k32>, store_scaled<kB>, store_scaled<kH>},
      .stream_copy = stream_copy,
  };
  return kernels;
}

}  // namespace qcoll::codec
