// What the kernels share. They are plain loops, compiled once for each instruction set, and the
// compiler vectorises them; where it does so badly, the files *_x86.inl take the whole vectors and
// the loops the rest. Everything stays in the anonymous namespace: of a symbol that the variants
// share the linker might pick the AVX-512 code for a machine without it.
//
// Blocks are taken a tile at a time, whole blocks that fit the level-1 cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qcoll/wire/layout.h"

namespace qcoll::codec {
namespace {

constexpr std::size_t kTile = wire::kMaxBlock;  // elements
constexpr std::size_t kTileBlocks = kTile / wire::kMinBlock;

// Not from a header, see above.
constexpr std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }
constexpr std::size_t parts_of(std::size_t n, std::size_t size) { return (n + size - 1) / size; }

constexpr std::size_t tile_of(std::size_t block) { return kTile / block * block; }

template <class T>
inline void fill(T* y, std::size_t n, T value) {
  for (std::size_t i = 0; i < n; ++i) y[i] = value;
}

// What comes kAhead bytes after x: the processor's own prefetching stops at every page.
inline void prefetch(const void* x, std::size_t bytes) {
  constexpr std::size_t kAhead = 16 << 10;
  const auto* next = static_cast<const char*>(x) + kAhead;
  for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
}

}  // namespace
}  // namespace qcoll::codec
