// How a tensor is cut: into slices (one for each rank) and slices into chunks, the unit of
// pipelining. Blocks never straddle chunks, because a chunk is a whole number of blocks.
#pragma once

#include <algorithm>
#include <cstddef>

#include "qcoll/algo/lane.h"

namespace qcoll::algo {

struct Slices {
  std::size_t length = 0;  // elements of a full slice
  std::size_t total = 0;   // elements of all slices; the last ones may be short or empty
  std::size_t chunk = 1;   // elements

  std::size_t chunks() const { return ceil_div(length, chunk); }
  std::size_t count(Rank slice) const {
    const std::size_t begin = std::min(total, static_cast<std::size_t>(slice) * length);
    return std::min(length, total - begin);
  }
  // Elements of chunk `index` in a full slice.
  std::size_t nominal(std::size_t index) const { return std::min(chunk, length - index * chunk); }
  Piece piece(Rank slice, std::size_t index) const {
    const std::size_t begin = std::min(index * chunk, count(slice));
    return {.slice = slice, .begin = begin, .count = std::min(chunk, count(slice) - begin)};
  }
};

// Ticks between a message's injection and its use one step further. With one tick, a chunk is on
// the wire while the next is encoded, and the slots that a schedule needs are fewest.
inline constexpr std::size_t kLag = 1;
// Slots of each ring: kLag + 1 keep every schedule free of deadlock (the trace lane shows it),
// one more for local readers that are a tick behind, one more for unequal speed.
inline constexpr std::size_t kMinDepth = kLag + 1;
inline constexpr std::size_t kDepth = kLag + 3;

}  // namespace qcoll::algo
