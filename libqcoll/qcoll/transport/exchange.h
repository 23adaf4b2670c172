// The data path of a group: moves encoded messages between ranks through slots.
//
// Owned by one thread at a time. All waiting happens here, in one loop that keeps sending and
// receiving for every peer whatever it waits for, so that a rank that is blocked never blocks
// others. Knows nothing of codecs; host/ puts the two together.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "qcoll/base/deadline.h"
#include "qcoll/base/trace.h"
#include "qcoll/transport/board.h"
#include "qcoll/transport/mesh.h"
#include "qcoll/transport/stream.h"
#include "qcoll/wire/header.h"

namespace qcoll::transport {

// A stream of messages through `depth` slots. With `from` this rank receives it (a mapped peer's
// ring is read in place and takes no memory here); otherwise this rank fills it.
struct RingSpec {
  std::uint32_t tag = 0;
  Rank from = -1;
  std::size_t message_bytes = 0;  // the largest message, header included
  wire::CodecSpec codec;          // expected in its headers, as is
  std::vector<Rank> readers;
  std::optional<std::uint64_t> count = std::nullopt;  // of its headers, if not the envelope's
};

struct ExchangeCounters {
  std::uint64_t within_node_bytes = 0;   // messages taken by ranks of this node, headers included
  std::uint64_t across_nodes_bytes = 0;  // messages sent to other nodes, headers included
  double wait_seconds = 0;
};

class Exchange {
 public:
  struct OwnRing;
  struct PeerRing;

  // One message. `message` points at its header, the payload follows.
  struct Slot {
    std::byte* message = nullptr;
    std::uint32_t index = 0;
    std::uint32_t elements = 0;       // of its header; the encoder of a message sets both
    std::uint32_t payload_bytes = 0;  // before it publishes
    OwnRing* own = nullptr;           // either in this rank's memory,
    PeerRing* peer = nullptr;         // or in a mapped peer's

    std::byte* payload() const { return message + wire::Header::kBytes; }
  };

  // `tags`: rings that any schedule of this group may number. All ranks pass the same.
  Exchange(Mesh& mesh, std::size_t tags);
  ~Exchange();

  static std::size_t memory_bytes(std::size_t tags, std::size_t neighbours,
                                  std::size_t slot_bytes) {
    return Board::control_bytes(tags, neighbours) + slot_bytes;
  }
  Rank rank() const { return mesh_.rank(); }

  // A schedule: begin, any of the verbs, finish. Errors are TransportErrors and final.
  void begin(const wire::Envelope& envelope, std::span<const RingSpec> rings, std::uint32_t depth,
             const Deadline& deadline);
  Slot reserve(std::uint32_t tag);  // waits for the slowest reader of the slot's last use
  void publish(const Slot& slot, std::span<const Rank> readers);
  Slot receive(Rank from, std::uint32_t tag);
  void release(const Slot& slot);
  void finish();  // waits until all sends are with the kernel

  void set_trace(Trace* trace) { trace_ = trace; }
  const ExchangeCounters& counters() const { return counters_; }
  // "rank 3 to send its next chunk, for 0.31 s"; empty when it does not wait. From any thread.
  std::string waits_for() const;
  const wire::Envelope& envelope() const { return envelope_; }

 private:
  struct Waiting {  // for errors: who is late, with what
    Rank peer;
    const char* action;
  };
  struct Incoming {
    ReceiveStream stream;
    OwnRing* landing = nullptr;  // of the message whose payload is arriving
  };

  // Whether message `index` may take its slot; else who has not passed the one before.
  bool slot_free(const OwnRing& ring, std::uint32_t index, Rank* laggard) const;
  void layout_rings(std::span<const RingSpec> rings, std::uint32_t depth);
  void drain_previous_run();
  Slot receive_mapped(PeerRing& ring);
  Slot receive_landed(OwnRing& ring);
  struct Expected {
    wire::CodecSpec codec;
    std::uint64_t count;
    std::uint32_t chunk;
  };
  void check_header(const wire::Header& header, Rank from, const Expected& expected) const;
  void check_nothing_extra() const;
  void advance_released(PeerRing& ring);
  void send_to(Rank reader, ConstBytes message, std::uint32_t* outstanding);
  void wake(Rank peer);

  bool progress();
  bool pull(Incoming& incoming);
  bool place(Incoming& incoming, const wire::Header& header);

  void wait_until(const std::function<bool()>& ready, const Waiting& what);
  void sleep_until_event(const std::function<bool()>& ready);
  void check_peer(const Waiting& what, bool departed) const;
  [[noreturn]] void fail_timeout(const Waiting& what);
  [[noreturn]] void fail_disagreement(Rank peer, const std::string& theirs,
                                      const std::string& ours) const;

  Mesh& mesh_;
  Board board_;
  std::map<Rank, Board> peer_boards_;      // mapped peers
  std::map<Rank, std::size_t> reader_of_;  // index of each neighbour in ring controls
  std::map<Rank, SendStream> senders_;     // opened on first use
  std::map<Rank, Incoming> receivers_;

  // Of the current run.
  wire::Envelope envelope_;
  std::optional<Deadline> deadline_;
  std::deque<OwnRing> own_rings_;
  std::deque<PeerRing> peer_rings_;
  std::map<std::uint32_t, OwnRing*> encode_rings_;
  std::map<std::pair<Rank, std::uint32_t>, OwnRing*> landing_rings_;
  std::map<std::pair<Rank, std::uint32_t>, PeerRing*> mapped_rings_;
  bool sends_from_peer_slots_ = false;

  ExchangeCounters counters_;
  Trace* trace_ = nullptr;

  struct Asleep {
    Waiting what;
    Clock::time_point since;
  };
  mutable std::mutex asleep_mutex_;
  std::optional<Asleep> asleep_;  // stays after an error: a failed exchange is not used again
};

}  // namespace qcoll::transport
