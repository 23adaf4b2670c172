// All-gather over rails (qwZ, arXiv 2306.10209 section 3.1, made hierarchical).
//
// 1. Each rank encodes its shard once, chunk by chunk, straight into a slot.
// 2. Between nodes, encoded bytes travel unchanged along rings of one *carrier* rank per node: the
//    ranks of equal local index, or the first rank of each node when nodes are uneven. At step s
//    a carrier receives what originates s nodes behind it and passes it on.
// 3. Inside a node, every rank decodes from the slots of its peers in place.
// Each encoded byte crosses into a node once.
//
// The static order: at tick t, the node-local reading of what arrived in the tick before, then step
// s of chunk t - s.
#pragma once

#include <algorithm>
#include <vector>

#include "qcoll/algo/lane.h"
#include "qcoll/algo/slices.h"
#include "qcoll/topo/topology.h"

namespace qcoll::algo {

enum class OwnSlice {
  kDecode,  // the owner decodes its own bytes: all ranks hold the same bits
  kKeep,    // the owner keeps its exact values (fp32 masters gathered in place)
};

class Rails {
 public:
  explicit Rails(const topo::Topology& topo) : topo_(topo) {}

  int steps() const { return topo_.node_count(); }
  // The ranks whose shards are `step` nodes behind this rank's node.
  const std::vector<Rank>& origins(int step) const {
    return topo_.nodes()[(topo_.node() - step + steps()) % steps()];
  }
  Rank carrier(Rank origin, int node) const {
    return topo_.nodes()[node][topo_.equal_nodes() ? topo_.local_index(origin) : 0];
  }
  bool carried_here(Rank origin) const { return carrier(origin, topo_.node()) == topo_.rank(); }
  Rank previous_carrier(Rank origin) const {
    return carrier(origin, (topo_.node() - 1 + steps()) % steps());
  }
  // The rank of this node whose slots hold the shard.
  Rank holder(Rank origin) const {
    return topo_.same_node(origin, topo_.rank()) ? origin : carrier(origin, topo_.node());
  }
  // Who takes the shard from this rank's slot.
  std::vector<Rank> readers(Rank origin, int step) const {
    std::vector<Rank> readers;
    if (holder(origin) == topo_.rank())
      for (const Rank peer : topo_.node_ranks())
        if (peer != topo_.rank()) readers.push_back(peer);
    if (carried_here(origin) && step + 1 < steps())
      readers.push_back(carrier(origin, (topo_.node() + 1) % steps()));
    return readers;
  }

  std::vector<RingPlan> plans() const {
    const std::size_t outermost = topo_.levels().size() - 1;
    std::vector<RingPlan> plans;
    for (int step = 0; step < steps(); ++step)
      for (const Rank origin : origins(step)) {
        RingPlan plan{.tag = static_cast<std::uint32_t>(origin), .level = outermost};
        if (holder(origin) != topo_.rank())
          plan.from = holder(origin);
        else if (origin != topo_.rank())
          plan.from = previous_carrier(origin);
        plan.readers = readers(origin, step);
        plans.push_back(std::move(plan));
      }
    return plans;
  }

 private:
  const topo::Topology& topo_;
};

template <Lane L>
class AllGather {
 public:
  AllGather(L& lane, const topo::Topology& topo, const Slices& slices, OwnSlice own)
      : lane_(lane), me_(topo.rank()), rails_(topo), slices_(slices), own_(own) {}

  void run() {
    lane_.open(rails_.plans());
    const std::size_t chunks = slices_.chunks();
    for (std::size_t tick = 0; tick < chunks + rails_.steps() * kLag; ++tick) {
      // A chunk number below zero wraps and is out of range like one that is too large.
      // Peers first: a leader of uneven nodes passes their shards on here, and the next leader
      // waits for them in the same tick.
      for (int step = 0; step < rails_.steps(); ++step)
        if (const std::size_t chunk = tick - (step + 1) * kLag; chunk < chunks)
          read_peers(step, chunk);
      for (int step = 0; step < rails_.steps(); ++step)
        if (const std::size_t chunk = tick - step * kLag; chunk < chunks) carry(step, chunk);
    }
  }

 private:
  // What this rank puts into its own slots: its shard, or what arrives on its rails.
  void carry(int step, std::size_t chunk) {
    for (const Rank origin : rails_.origins(step)) {
      if (rails_.holder(origin) != me_) continue;
      const Piece piece = slices_.piece(origin, chunk);
      if (origin == me_) {
        auto slot = lane_.reserve(tag_of(me_), slices_.nominal(chunk));
        lane_.encode(slot, 0, piece);
        lane_.publish(slot, rails_.readers(origin, step));
        own_ == OwnSlice::kDecode ? lane_.decode(slot, 0, piece) : lane_.copy_own(piece);
      } else {
        auto slot =
            lane_.receive(rails_.previous_carrier(origin), tag_of(origin), slices_.nominal(chunk));
        lane_.publish(slot, rails_.readers(origin, step));
        lane_.decode(slot, 0, piece);
        lane_.release(slot);
      }
    }
  }

  // What the peers of the node hold. A leader of uneven nodes also sends its peers' shards on.
  void read_peers(int step, std::size_t chunk) {
    for (const Rank origin : rails_.origins(step)) {
      if (rails_.holder(origin) == me_) continue;
      auto slot = lane_.receive(rails_.holder(origin), tag_of(origin), slices_.nominal(chunk));
      if (const auto readers = rails_.readers(origin, step); !readers.empty())
        lane_.publish(slot, readers);
      lane_.decode(slot, 0, slices_.piece(origin, chunk));
      lane_.release(slot);
    }
  }

  static std::uint32_t tag_of(Rank origin) { return static_cast<std::uint32_t>(origin); }

  L& lane_;
  const Rank me_;
  const Rails rails_;
  const Slices& slices_;
  const OwnSlice own_;
};

template <Lane L>
void all_gather(L& lane, const topo::Topology& topo, const Slices& slices, OwnSlice own) {
  AllGather<L>(lane, topo, slices, own).run();
}

}  // namespace qcoll::algo
