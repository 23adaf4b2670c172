// How large the chunks of a schedule are and how many slots a ring has: as large as is useful for
// the wire, as small as the group's staging memory asks for. A pure function of what all ranks
// share, because both ends of a message must agree.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>

#include "qcoll/algo/encoding.h"
#include "qcoll/algo/reduce_scatter.h"
#include "qcoll/algo/slices.h"
#include "qcoll/base/error.h"
#include "qcoll/topo/topology.h"
#include "qcoll/wire/header.h"

namespace qcoll::comm {

inline constexpr std::size_t kSlotBytes = 16 << 20;  // slots of a group, on each rank
inline constexpr std::size_t kSumBytes = 12 << 20;   // its fp32 accumulators
inline constexpr std::size_t kChunkBytes = 256 << 10;

struct Chunking {
  std::size_t chunk = 1;  // elements, a multiple of every level's block
  std::uint32_t depth = 1;
};

// Slots of all rings, for one chunk of `chunk` elements and depth 1, at most over all ranks.
inline std::size_t slot_bytes(wire::Collective collective, const topo::Topology& topo,
                              std::span<const wire::CodecSpec> codecs, DType dtype,
                              std::size_t chunk) {
  const auto message = [&](std::size_t level, std::size_t parts, bool sums) {
    return align_up(wire::Header::kBytes +
                        parts * algo::encoding_of(codecs[level], dtype, sums).part_bytes(chunk),
                    64);
  };
  // Without shared memory, every shard lands here.
  const std::size_t gather = message(codecs.size() - 1, 1, false) * topo.size();
  std::size_t scatter = 0;
  std::size_t all_to_all = 0;
  for (std::size_t l = 0; l < topo.levels().size(); ++l) {
    scatter += message(l, topo.columns(l), l > 0) * 2 * (topo.levels()[l].size() - 1);
    all_to_all = std::max(all_to_all, message(l, 1, false) * 2 * (topo.size() - 1));
  }
  switch (collective) {
    case wire::Collective::kAllGather:
      return gather;
    case wire::Collective::kReduceScatter:
      return scatter;
    case wire::Collective::kAllReduce:
      return std::max(gather, scatter);
    case wire::Collective::kAllToAll:
      return all_to_all;
  }
  return 0;
}

// The smallest number of elements that is whole blocks for every codec.
inline std::size_t common_block(std::span<const wire::CodecSpec> codecs) {
  std::size_t block = 32;
  for (const auto& codec : codecs) block = std::lcm(block, std::max<std::size_t>(codec.block, 1));
  return block;
}

// An all-reduce of `count` elements, cut into one slice for each rank; the last may be short.
inline algo::Slices slices_to_reduce(std::size_t count, int ranks,
                                     std::span<const wire::CodecSpec> codecs, std::size_t chunk) {
  return {align_up(ceil_div(count, ranks), common_block(codecs)), count, chunk};
}

// Throws UsageError when not even the smallest chunk fits.
inline Chunking choose_chunking(wire::Collective collective, const topo::Topology& topo,
                                std::span<const wire::CodecSpec> codecs, DType dtype) {
  const std::size_t block = common_block(codecs);
  const bool reduces =
      collective == wire::Collective::kReduceScatter || collective == wire::Collective::kAllReduce;
  const std::size_t sums = reduces ? algo::sums_needed(topo) : 0;
  const auto fits = [&](std::size_t chunk, std::uint32_t depth) {
    return slot_bytes(collective, topo, codecs, dtype, chunk) * depth <= kSlotBytes &&
           sums * chunk * sizeof(float) <= kSumBytes;
  };
  const std::size_t largest = std::max(kChunkBytes / element_bytes(dtype) / block * block, block);
  for (const std::uint32_t depth : {std::uint32_t{algo::kDepth}, std::uint32_t{algo::kMinDepth}})
    for (std::size_t chunk = largest; chunk >= block; chunk = chunk / 2 / block * block)
      if (fits(chunk, depth) && (chunk * 8 >= largest || depth == algo::kMinDepth))
        return {chunk, depth};
  throw UsageError("the blocks of these codecs have " + std::to_string(block) +
                   " as their least common multiple, and chunks of that many elements do not fit "
                   "the staging memory in a world of " +
                   std::to_string(topo.size()) +
                   " ranks; choose blocks that divide each other, for example powers of two");
}

}  // namespace qcoll::comm
