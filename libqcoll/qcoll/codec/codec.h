// Encode and decode of chunks. The scalar reference (reference.cc) is the definition; every other
// row of the kernel table returns its bits (docs/numerics.md has the rules).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "qcoll/base/types.h"
#include "qcoll/wire/codec_spec.h"

namespace qcoll::codec {

// How the output is written. The bytes are the same, and once the call has returned they are
// visible to whoever learns of it.
enum class Store : std::uint8_t {
  kCached,     // so that it stays in cache
  kStreaming,  // past the caches, which takes a third of the traffic away
};

// A larger output, on its way through the cache that all cores share, leaves it before it is read.
constexpr std::size_t kStreamAbove = 8 << 20;  // bytes of the whole tensor
constexpr Store store_for(std::size_t output_bytes) {
  return output_bytes > kStreamAbove ? Store::kStreaming : Store::kCached;
}

// One row of the kernel table: the kernels of one instruction set. Arrays are indexed by DType
// (float32, bfloat16, float16). `x` and `y` need only the alignment of their element type and must
// not overlap; `block` is a multiple of 32 up to 4096.
struct Kernels {
  using Encode = std::size_t (*)(const void* x, std::size_t count, std::size_t block, void* payload,
                                 std::uint16_t* scales);
  using Decode = void (*)(const void* payload, const std::uint16_t* scales, std::size_t count,
                          std::size_t block, void* y, Store store);
  using DecodeAdd = void (*)(const void* payload, const std::uint16_t* scales, std::size_t count,
                             std::size_t block, float* sum);

  const char* isa;
  // Block codecs. Encode returns the number of blocks that held NaN or Inf.
  Encode encode_int8[kFloatDTypes];
  Encode encode_int4[kFloatDTypes];
  Decode decode_int8[kFloatDTypes];
  Decode decode_int4[kFloatDTypes];
  DecodeAdd add_int8;
  DecodeAdd add_int4;
  // Casts: to nearest even; NaN stays NaN, Inf stays Inf, a finite value saturates.
  void (*to_bf16[kFloatDTypes])(const void* x, std::size_t count, std::uint16_t* y);
  void (*from_bf16[kFloatDTypes])(const std::uint16_t* x, std::size_t count, void* y, Store store);
  // Sums in fp32. NaN becomes the canonical one; sum and scaled overflow to Inf.
  void (*widen[kFloatDTypes])(const void* x, std::size_t count, float* sum);      // sum = x
  void (*widen_add[kFloatDTypes])(const void* x, std::size_t count, float* sum);  // sum += x
  void (*store_sum[kFloatDTypes])(const float* sum, std::size_t count, void* y);
  // y = sum / divisor; a finite mean saturates at the largest finite value of y's type.
  void (*store_mean[kFloatDTypes])(const float* sum, std::size_t count, float divisor, void* y);
  void (*store_scaled[kFloatDTypes])(const float* sum, std::size_t count, float factor, void* y);
  void (*stream_copy)(const void* x, std::size_t bytes, void* y);  // memcpy by Store::kStreaming
};

const Kernels& reference();                      // scalar; the definition
std::span<const Kernels* const> rows();          // every row this machine runs, slowest first
const Kernels& row_named(std::string_view isa);  // throws UsageError that lists the rows
// The fastest row, or the one that QCOLL_FORCE_ISA=reference|v2|v3|v4 names.
const Kernels& best();

// Chunks as wire::chunk_layout lays them out. `encoded` must hold exactly chunk_layout().bytes and
// be 16-byte aligned; padding is written as zero. kExact takes any dtype, the others the three
// float types. Returns the number of blocks that held NaN or Inf (0 for kExact and kBf16).
std::size_t encode(wire::CodecSpec spec, DType dtype, const void* x, std::size_t count,
                   Bytes encoded, const Kernels& kernels = best());
void decode(wire::CodecSpec spec, DType dtype, ConstBytes encoded, std::size_t count, void* y,
            const Kernels& kernels = best(), Store store = Store::kCached);
// sum[i] += decoded[i]. For kExact `dtype` is the type of the encoded elements.
void decode_add(wire::CodecSpec spec, DType dtype, ConstBytes encoded, std::size_t count,
                float* sum, const Kernels& kernels = best());

// The same of a part of a chunk of `count` elements, so that threads can share one; `x`, `y` and
// `sum` are at the part's first element. `begin` is a multiple of part_unit(); whoever has the part
// at 0 also writes the padding.
struct Part {
  std::size_t begin = 0;
  std::size_t count = 0;
};
std::size_t part_unit(wire::CodecSpec spec);
std::size_t encode_part(wire::CodecSpec spec, DType dtype, const void* x, std::size_t count,
                        Bytes encoded, Part part, const Kernels& kernels);
void decode_part(wire::CodecSpec spec, DType dtype, ConstBytes encoded, std::size_t count,
                 Part part, void* y, const Kernels& kernels, Store store);
void decode_add_part(wire::CodecSpec spec, DType dtype, ConstBytes encoded, std::size_t count,
                     Part part, float* sum, const Kernels& kernels);

}  // namespace qcoll::codec
