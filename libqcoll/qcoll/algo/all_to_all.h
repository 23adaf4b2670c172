// All-to-all, direct: each rank encodes for every other rank and sends straight to it. The own
// part is copied exactly. Splits may differ from pair to pair; both ends know theirs.
//
// The static order: at tick t, chunk t to every peer, then chunk t - 1 from every peer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "qcoll/algo/lane.h"
#include "qcoll/algo/slices.h"
#include "qcoll/topo/topology.h"

namespace qcoll::algo {

struct Splits {
  std::vector<std::size_t> to;    // elements for each rank
  std::vector<std::size_t> from;  // elements of each rank
  std::size_t chunk = 1;          // elements

  // At least one, empty if need be: both ends of every pair compare their splits by its header.
  std::size_t chunks(std::size_t elements) const {
    return std::max<std::size_t>(ceil_div(elements, chunk), 1);
  }
  Piece piece(Rank peer, std::size_t elements, std::size_t index) const {
    const std::size_t begin = index * chunk;
    return {.slice = peer, .begin = begin, .count = std::min(chunk, elements - begin)};
  }
};

// The codec level of a pair: the innermost level inside a node, the outermost between nodes.
inline std::size_t level_of_pair(const topo::Topology& topo, Rank a, Rank b) {
  return topo.same_node(a, b) ? 0 : topo.levels().size() - 1;
}

template <Lane L>
void all_to_all(L& lane, const topo::Topology& topo, const Splits& splits) {
  const Rank me = topo.rank();
  const int size = topo.size();
  const auto tag = [](Rank to) { return static_cast<std::uint32_t>(to); };

  std::vector<RingPlan> plans;
  for (int i = 1; i < size; ++i) {
    const Rank to = (me + i) % size;
    const Rank from = (me - i + size) % size;
    plans.push_back({.tag = tag(to),
                     .level = level_of_pair(topo, me, to),
                     .readers = {to},
                     .count = splits.to[to]});
    plans.push_back({.tag = tag(me),
                     .from = from,
                     .level = level_of_pair(topo, me, from),
                     .readers = {},
                     .count = splits.from[from]});
  }
  lane.open(plans);

  const std::size_t own = splits.to[me];
  for (std::size_t c = 0; c < splits.chunks(own); ++c) lane.copy_own(splits.piece(me, own, c));

  std::size_t last = 0;
  for (Rank r = 0; r < size; ++r)
    if (r != me)
      last = std::max({last, splits.chunks(splits.to[r]), splits.chunks(splits.from[r])});
  for (std::size_t tick = 0; tick < last + kLag; ++tick) {
    for (int i = 1; i < size; ++i) {
      const Rank to = (me + i) % size;
      if (tick >= splits.chunks(splits.to[to])) continue;
      const Piece piece = splits.piece(to, splits.to[to], tick);
      auto slot = lane.reserve(tag(to), piece.count);
      lane.encode(slot, 0, piece);
      lane.publish(slot, std::span(&to, 1));
    }
    for (int i = 1; i < size && tick >= kLag; ++i) {
      const Rank from = (me - i + size) % size;
      if (tick - kLag >= splits.chunks(splits.from[from])) continue;
      const Piece piece = splits.piece(from, splits.from[from], tick - kLag);
      auto slot = lane.receive(from, tag(me), piece.count);
      lane.decode(slot, 0, piece);
      lane.release(slot);
    }
  }
}

}  // namespace qcoll::algo
