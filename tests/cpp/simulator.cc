#include "simulator.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>

namespace qcoll::test {
namespace {

using algo::TraceOp;

struct Message {
  std::map<std::size_t, Content> parts;
  std::uint32_t tag = 0;
  int readers_left = 0;  // in place, by stream, and the holder itself
};

// A bounded sequence of messages in one rank's memory.
struct Ring {
  std::vector<std::shared_ptr<Message>> filled;
  std::size_t published = 0;  // in place
  std::size_t freed(std::uint32_t) const {
    std::size_t n = 0;
    while (n < filled.size() && filled[n]->readers_left == 0) ++n;
    return n;
  }
  bool has_room(std::uint32_t depth) const { return filled.size() < freed(depth) + depth; }
};

struct Transfer {
  std::shared_ptr<Message> message;
};

class Machine {
 public:
  Machine(const std::vector<topo::Topology>& topologies, const std::vector<algo::TraceLane>& lanes,
          std::uint32_t depth, bool map_neighbours)
      : topo_(topologies[0]),
        lanes_(lanes),
        depth_(depth),
        map_neighbours_(map_neighbours),
        size_(topo_.size()),
        next_(size_, 0),
        slots_(size_),
        sums_(size_),
        outcome_{.ranks = std::vector<RankOutcome>(size_),
                 .entered_node = std::vector<std::vector<algo::Piece>>(topo_.node_count())} {}

  Outcome run(unsigned order) {
    std::mt19937 random(order);
    for (;;) {
      std::vector<int> ranks(size_);
      for (int r = 0; r < size_; ++r) ranks[r] = r;
      std::shuffle(ranks.begin(), ranks.end(), random);
      bool any = move_streams();
      for (const int r : ranks)
        if (step(r)) {
          any = true;
          break;  // one step at a time: the most interleavings
        }
      if (!any) break;
    }
    outcome_.finished = true;
    for (int r = 0; r < size_; ++r)
      if (next_[r] < lanes_[r].ops().size()) {
        outcome_.finished = false;
        outcome_.stuck += "rank " + std::to_string(r) + " at op " + std::to_string(next_[r]) +
                          " kind " + std::to_string(static_cast<int>(op(r).kind)) + " tag " +
                          std::to_string(op(r).tag) + "; ";
      }
    for (auto& [key, queue] : streams_)
      if (!queue.empty()) outcome_.finished = false;
    return std::move(outcome_);
  }

 private:
  struct Held {
    std::shared_ptr<Message> message;
  };

  bool mapped(Rank a, Rank b) const { return map_neighbours_ && topo_.same_node(a, b); }
  const TraceOp& op(Rank r) const { return lanes_[r].ops()[next_[r]]; }

  // Head of each stream moves when the receiver has room in the ring of its tag.
  bool move_streams() {
    bool any = false;
    for (auto& [key, queue] : streams_) {
      const auto [from, to] = key;
      while (!queue.empty()) {
        Ring& landing = landing_[{to, from, queue.front()->tag}];
        if (!landing.has_room(depth_)) break;
        auto copy = std::make_shared<Message>(*queue.front());
        copy->readers_left = 1;  // the receiver itself
        landing.filled.push_back(copy);
        if (!topo_.same_node(from, to))
          for (const auto& [part, content] : copy->parts)
            outcome_.entered_node[topo_.node_of(to)].push_back(content.piece);
        --queue.front()->readers_left;
        queue.pop_front();
        any = true;
      }
    }
    return any;
  }

  bool step(Rank r) {
    if (next_[r] == lanes_[r].ops().size()) return false;
    const TraceOp& o = op(r);
    auto& slots = slots_[r];
    switch (o.kind) {
      case TraceOp::Kind::kReserve: {
        Ring& ring = own_[{r, o.tag}];
        if (!ring.has_room(depth_)) return false;
        auto message = std::make_shared<Message>();
        message->tag = o.tag;
        message->readers_left = 1;  // the encoder, until it publishes
        ring.filled.push_back(message);
        slots[o.slot] = message;
        break;
      }
      case TraceOp::Kind::kPublish:
        publish(r, o);
        break;
      case TraceOp::Kind::kReceive:
        if (!receive(r, o)) return false;
        break;
      case TraceOp::Kind::kRelease:
        --slots[o.slot]->readers_left;
        break;
      default:
        compute(r, o);
    }
    ++next_[r];
    return true;
  }

  void publish(Rank r, const TraceOp& o) {
    const auto& message = slots_[r][o.slot];
    const bool encoded_here = !received_.contains({r, o.slot});
    if (encoded_here) --message->readers_left;
    for (const Rank reader : o.readers) {
      ++message->readers_left;
      if (mapped(r, reader))
        in_place_[{reader, r, message->tag}].push_back(message);
      else
        streams_[{r, reader}].push_back(message);
    }
  }

  bool receive(Rank r, const TraceOp& o) {
    std::shared_ptr<Message> message;
    if (mapped(r, o.from)) {
      auto& queue = in_place_[{r, o.from, o.tag}];
      if (queue.empty()) return false;
      message = queue.front();
      queue.pop_front();
    } else {
      auto& taken = taken_[{r, o.from, o.tag}];
      const Ring& ring = landing_[{r, o.from, o.tag}];
      if (ring.filled.size() == taken) return false;
      message = ring.filled[taken++];
    }
    slots_[r][o.slot] = message;
    received_.insert({r, o.slot});
    return true;
  }

  static void add(Content& sum, const Content& term) {
    for (std::size_t i = 0; i < sum.contributions.size(); ++i)
      sum.contributions[i] += term.contributions[i];
    sum.encodings = std::max(sum.encodings, term.encodings);
  }

  Content input(Rank r, algo::Piece piece) const {
    Content content{.piece = piece, .contributions = std::vector<int>(size_, 0)};
    content.contributions[r] = 1;
    return content;
  }

  void compute(Rank r, const TraceOp& o) {
    auto& sums = sums_[r];
    const auto accumulate = [&](const Content& term) {
      if (o.first)
        sums[o.sum] = term;
      else
        add(sums[o.sum], term);
    };
    const auto write = [&](Content content) {
      content.piece = o.piece;
      outcome_.ranks[r].most_encodings =
          std::max(outcome_.ranks[r].most_encodings, content.encodings);
      outcome_.ranks[r].outputs.push_back(std::move(content));
    };
    switch (o.kind) {
      case TraceOp::Kind::kEncode:
        slots_[r][o.slot]->parts[o.part] = input(r, o.piece);
        slots_[r][o.slot]->parts[o.part].encodings = 1;
        break;
      case TraceOp::Kind::kEncodeSum:
        slots_[r][o.slot]->parts[o.part] = sums[o.sum];
        ++slots_[r][o.slot]->parts[o.part].encodings;
        break;
      case TraceOp::Kind::kDecode:
        write(slots_[r][o.slot]->parts.at(o.part));
        break;
      case TraceOp::Kind::kCopyOwn:
        write(input(r, o.piece));
        break;
      case TraceOp::Kind::kAddInput:
        accumulate(input(r, o.piece));
        break;
      case TraceOp::Kind::kAddSum:
        accumulate(sums[o.other]);
        break;
      case TraceOp::Kind::kAddSlot:
        accumulate(slots_[r][o.slot]->parts.at(o.part));
        break;
      case TraceOp::Kind::kStore:
        write(sums[o.sum]);
        break;
      default:
        break;
    }
  }

  const topo::Topology& topo_;
  const std::vector<algo::TraceLane>& lanes_;
  const std::uint32_t depth_;
  const bool map_neighbours_;
  const int size_;
  std::vector<std::size_t> next_;
  std::vector<std::map<int, std::shared_ptr<Message>>> slots_;
  std::vector<std::map<algo::SumId, Content>> sums_;
  std::map<std::pair<Rank, std::uint32_t>, Ring> own_;
  std::map<std::tuple<Rank, Rank, std::uint32_t>, Ring> landing_;       // at, from, tag
  std::map<std::tuple<Rank, Rank, std::uint32_t>, std::size_t> taken_;  // of landing_
  std::map<std::tuple<Rank, Rank, std::uint32_t>, std::deque<std::shared_ptr<Message>>> in_place_;
  std::map<std::pair<Rank, Rank>, std::deque<std::shared_ptr<Message>>> streams_;
  std::set<std::pair<Rank, int>> received_;
  Outcome outcome_;
};

}  // namespace

Outcome simulate(const std::vector<topo::Topology>& topologies,
                 const std::vector<algo::TraceLane>& lanes, std::uint32_t depth, unsigned order,
                 bool map_neighbours) {
  return Machine(topologies, lanes, depth, map_neighbours).run(order);
}

}  // namespace qcoll::test
