// What the data path of a group needs from its transports. Three implementations exist behind it:
// loopback (threads of one process, for tests), and shared memory and TCP, picked for each peer.
#pragma once

#include <string>
#include <vector>

#include "qcoll/base/abort_flag.h"
#include "qcoll/base/deadline.h"
#include "qcoll/base/types.h"
#include "qcoll/transport/connection.h"
#include "qcoll/transport/memory.h"

namespace qcoll::transport {

// Who has not made the call that this rank waits in.
struct StallReport {
  Rank late = -1;  // -1: nobody
  std::string text;
};

class Mesh {
 public:
  virtual ~Mesh() = default;

  virtual Rank rank() const = 0;
  virtual int size() const = 0;
  // Ranks of this node, this one included, in the order that all of them agree on.
  virtual const std::vector<Rank>& neighbours() const = 0;

  // A mapped peer reads this rank's memory and this rank reads its; any other peer is reached by
  // a byte stream. The relation is symmetric.
  virtual bool mapped(Rank peer) const = 0;
  virtual Memory& memory_of(Rank peer) = 0;  // a mapped peer, or this rank
  virtual void ring(Rank peer) = 0;          // wakes a mapped peer from poll on its bell

  virtual int bell_fd() const = 0;  // readable when somebody rang
  virtual void quiet_bell() = 0;

  // Opens the stream that carries messages from this rank to `peer`; authenticated.
  virtual Connection connect(Rank peer, const Deadline& deadline) = 0;
  // Streams that peers opened to this rank since the last call. The bell rings for new ones.
  virtual std::vector<Connection> take_accepted() = 0;

  virtual AbortFlag& abort_flag() = 0;
  virtual bool departed(Rank peer) const = 0;  // left the group in an orderly way
  // Spinning before sleeping pays only where every rank of the host has a core.
  virtual bool may_spin() const = 0;

  // A call that waits without progress asks all ranks where they are, about once a second. Ranks
  // that turn out to disagree raise the abort flag.
  virtual void probe_peers() = 0;
  // For the error of a call that timed out; takes a moment.
  virtual StallReport stall_report() = 0;
};

}  // namespace qcoll::transport
