// Reduce-scatter in one hop for each level, inner to outer (qgZ, arXiv 2306.10209 section 3.3).
//
// 1. Hop 0: each rank encodes, for every peer of its inner level, the slices that this peer will
//    pass on or keep (its *columns*), and takes its own columns from each peer.
// 2. Each column is summed in fp32 in fixed rank order, the own contribution unquantized.
// 3. Hop l + 1: the sums of other coordinates are encoded again and exchanged at the next level.
// 4. After the last hop one sum is left: this rank's slice. It is divided, cast and written.
// A value is quantized once for each hop, whatever the world size.
//
// The static order: at tick t, hop l of chunk t - l.
#pragma once

#include <vector>

#include "qcoll/algo/lane.h"
#include "qcoll/algo/slices.h"
#include "qcoll/topo/topology.h"

namespace qcoll::algo {

// Accumulators that a run needs: one to work in, and the own columns on their way to the next
// hop, for each chunk in flight.
inline std::size_t sums_needed(const topo::Topology& topo) {
  std::size_t kept = 0;
  for (std::size_t hop = 1; hop < topo.levels().size(); ++hop)
    kept += topo.columns(hop) * (kLag + 1);
  return 1 + kept;
}

template <Lane L>
class ReduceScatter {
 public:
  ReduceScatter(L& lane, const topo::Topology& topo, const Slices& slices)
      : lane_(lane), topo_(topo), slices_(slices), hops_(topo.levels().size()) {}

  void run() {
    lane_.open(plans());
    const std::size_t chunks = slices_.chunks();
    for (std::size_t tick = 0; tick < chunks + hops_ * kLag; ++tick) {
      if (tick < chunks) inject(tick);
      // A chunk number below zero wraps and is out of range like one that is too large.
      for (std::size_t hop = 0; hop < hops_; ++hop)
        if (const std::size_t chunk = tick - (hop + 1) * kLag; chunk < chunks) reduce(hop, chunk);
    }
  }

 private:
  const topo::Level& level(std::size_t hop) const { return topo_.levels()[hop]; }
  std::uint32_t tag(std::size_t hop, Rank to) const {
    return static_cast<std::uint32_t>(hop * topo_.size() + to);
  }

  std::vector<RingPlan> plans() const {
    std::vector<RingPlan> plans;
    for (std::size_t hop = 0; hop < hops_; ++hop)
      for (const Rank peer : level(hop).members) {
        if (peer == topo_.rank()) continue;
        RingPlan out{.tag = tag(hop, peer),
                     .parts = topo_.columns(hop),
                     .level = hop,
                     .partial_sums = hop > 0,
                     .readers = {peer}};
        RingPlan in = out;
        in.tag = tag(hop, topo_.rank());
        in.from = peer;
        in.readers = {};
        plans.push_back(std::move(out));
        plans.push_back(std::move(in));
      }
    return plans;
  }

  // Calls send(coordinate) for the peers of a level, starting behind the own coordinate, so that
  // not all ranks address the same peer at once.
  template <class Send>
  void for_each_peer(std::size_t hop, Send send) {
    const int size = level(hop).size();
    for (int i = 1; i < size; ++i) send((level(hop).index + i) % size);
  }

  void inject(std::size_t chunk) {
    for_each_peer(0, [&](int coordinate) {
      const Rank peer = level(0).members[coordinate];
      auto slot = lane_.reserve(tag(0, peer), slices_.nominal(chunk));
      for (std::size_t column = 0; column < topo_.columns(0); ++column)
        lane_.encode(slot, column, slices_.piece(topo_.rank_at(0, coordinate, column), chunk));
      lane_.publish(slot, std::span(&peer, 1));
    });
  }

  // Sums this rank's columns of one hop and hands them to the next hop, or writes the last one.
  void reduce(std::size_t hop, std::size_t chunk) {
    std::vector<typename L::Slot> received(level(hop).members.size());
    for_each_peer(hop, [&](int coordinate) {
      received[coordinate] = lane_.receive(level(hop).members[coordinate], tag(hop, topo_.rank()),
                                           slices_.nominal(chunk));
    });
    if (hop + 1 == hops_) {
      const Piece piece = slices_.piece(topo_.rank(), chunk);
      lane_.store(sum_column(hop, 0, chunk, received), piece);
    } else {
      pass_on(hop, chunk, received);
    }
    for_each_peer(hop, [&](int coordinate) { lane_.release(received[coordinate]); });
  }

  // Column c of hop l is coordinate c mod n of level l + 1 and column c div n there.
  void pass_on(std::size_t hop, std::size_t chunk, std::vector<typename L::Slot>& received) {
    const std::size_t next = hop + 1;
    const std::size_t coordinates = level(next).members.size();
    for_each_peer(next, [&](int coordinate) {
      const Rank peer = level(next).members[coordinate];
      auto slot = lane_.reserve(tag(next, peer), slices_.nominal(chunk));
      for (std::size_t part = 0; part < topo_.columns(next); ++part) {
        const std::size_t column = coordinate + coordinates * part;
        const SumId sum = sum_column(hop, column, chunk, received);
        lane_.encode_sum(slot, part, sum, piece_of(hop, column, chunk).count);
      }
      lane_.publish(slot, std::span(&peer, 1));
    });
    for (std::size_t part = 0; part < topo_.columns(next); ++part)
      sum_column(hop, level(next).index + coordinates * part, chunk, received,
                 kept_sum(next, part, chunk));
  }

  // The own contribution at hop 0 is the caller's input, at later hops the sum kept before.
  SumId sum_column(std::size_t hop, std::size_t column, std::size_t chunk,
                   std::vector<typename L::Slot>& received, SumId into = kWorkSum) {
    const Piece piece = piece_of(hop, column, chunk);
    for (int k = 0; k < level(hop).size(); ++k) {
      const bool first = k == 0;
      if (k != level(hop).index)
        lane_.add_slot(into, received[k], column, piece.count, first);
      else if (hop == 0)
        lane_.add_input(into, piece, first);
      else
        lane_.add_sum(into, kept_sum(hop, column, chunk), piece.count, first);
    }
    return into;
  }

  Piece piece_of(std::size_t hop, std::size_t column, std::size_t chunk) const {
    return slices_.piece(topo_.rank_at(hop, level(hop).index, column), chunk);
  }

  SumId kept_sum(std::size_t hop, std::size_t column, std::size_t chunk) const {
    SumId id = kWorkSum + 1;
    for (std::size_t h = 1; h < hop; ++h) id += topo_.columns(h) * (kLag + 1);
    return id + column * (kLag + 1) + chunk % (kLag + 1);
  }

  static constexpr SumId kWorkSum = 0;

  L& lane_;
  const topo::Topology& topo_;
  const Slices& slices_;
  const std::size_t hops_;
};

template <Lane L>
void reduce_scatter(L& lane, const topo::Topology& topo, const Slices& slices) {
  ReduceScatter<L>(lane, topo, slices).run();
}

}  // namespace qcoll::algo
