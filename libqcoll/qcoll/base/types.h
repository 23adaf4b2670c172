// Vocabulary types of the whole library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace qcoll {

using Rank = int;
using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// Element types. The first three are the ones that codecs encode; all others travel exact.
// The values are part of the wire format.
enum class DType : std::uint8_t {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kF64 = 3,
  kI8 = 4,
  kU8 = 5,
  kI16 = 6,
  kI32 = 7,
  kI64 = 8,
  kBool = 9,
  kByte = 10,  // any other type, counted in bytes
};
inline constexpr int kDTypes = 11;
inline constexpr int kFloatDTypes = 3;

constexpr bool is_encodable(DType t) { return static_cast<int>(t) < kFloatDTypes; }

constexpr std::size_t element_bytes(DType t) {
  constexpr std::size_t kBytes[kDTypes] = {4, 2, 2, 8, 1, 1, 2, 4, 8, 1, 1};
  return kBytes[static_cast<int>(t)];
}

constexpr std::string_view name_of(DType t) {
  constexpr std::string_view kNames[kDTypes] = {"float32", "bfloat16", "float16", "float64",
                                                "int8",    "uint8",    "int16",   "int32",
                                                "int64",   "bool",     "byte"};
  return kNames[static_cast<int>(t)];
}

constexpr std::size_t align_up(std::size_t n, std::size_t alignment) {
  return (n + alignment - 1) / alignment * alignment;
}

constexpr std::size_t ceil_div(std::size_t n, std::size_t d) { return (n + d - 1) / d; }

}  // namespace qcoll
