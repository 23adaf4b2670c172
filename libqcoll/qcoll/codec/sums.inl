// Casts, sums and means.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qcoll/codec/arith.h"
#include "qcoll/codec/codec.h"
#include "qcoll/codec/element.inl"
#include "qcoll/codec/stream_x86.inl"
#include "qcoll/codec/tiles.inl"
#include "qcoll/codec/vectors_x86.inl"

namespace qcoll::codec {
namespace {

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
inline void from_bf16_to(const std::uint16_t* __restrict x, std::size_t count,
                         TypeOf<kType>* __restrict y) {
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (kType == DType::kBF16)
      y[i] = x[i];
    else
      y[i] =
          Element<kType>::narrow(arith::saturate(arith::bf16_to_f32(x[i]), Element<kType>::kMax));
  }
}

template <DType kType>
void from_bf16(const std::uint16_t* x, std::size_t count, void* y, Store store) {
  auto* out = static_cast<TypeOf<kType>*>(y);
  if (store == Store::kCached) return from_bf16_to<kType>(x, count, out);
  if constexpr (kType == DType::kBF16) return stream_copy(x, count * sizeof *x, y);
  Stream<TypeOf<kType>> stream(out);
  for (std::size_t i = 0; i < count; i += stream.kRoom) {
    const std::size_t part = least(stream.kRoom, count - i);
    from_bf16_to<kType>(x + i, part, stream.room());
    stream.add(part);
  }
  stream.finish();
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
