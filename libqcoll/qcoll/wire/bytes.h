// Little-endian fields in byte buffers, whatever the machine's byte order and alignment.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace qcoll::wire {

template <class T>
  requires std::is_unsigned_v<T>
void put(std::byte* at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i)
    at[i] = static_cast<std::byte>(static_cast<std::uint64_t>(value) >> (8 * i));
}

template <class T>
  requires std::is_unsigned_v<T>
T get(const std::byte* at) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value |= static_cast<std::uint64_t>(at[i]) << (8 * i);
  return static_cast<T>(value);
}

// FNV-1a, 64 bits: detects garbage, not malice (connections are authenticated).
constexpr std::uint64_t kFnvSeed = 0xcbf29ce484222325u;
inline std::uint64_t fnv1a(const std::byte* data, std::size_t bytes,
                           std::uint64_t hash = kFnvSeed) {
  for (std::size_t i = 0; i < bytes; ++i)
    hash = (hash ^ static_cast<std::uint64_t>(data[i])) * 0x100000001b3u;
  return hash;
}

}  // namespace qcoll::wire
