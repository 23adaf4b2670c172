// The control links of one group: a small connection between every two ranks, opened when the
// group is formed. They tell every rank, not only a neighbour, of deaths and aborts, and let a
// stalled rank ask all others where they are. Bulk data never travels here.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "qcoll/base/abort_flag.h"
#include "qcoll/base/deadline.h"
#include "qcoll/transport/bell.h"
#include "qcoll/transport/connection.h"
#include "qcoll/transport/handshake.h"
#include "qcoll/transport/mesh.h"
#include "qcoll/transport/operation_log.h"
#include "qcoll/transport/socket.h"

struct pollfd;

namespace qcoll::transport {

struct PeerAddress {
  std::vector<Address> addresses;  // in the order to try
  std::uint16_t port = 0;
  std::string label;  // "rank 2 (host-a, pid 1234)"
};

class GroupLinks {
 public:
  GroupLinks(Rank rank, int size, std::uint64_t group, const wire::Secret& secret,
             std::shared_ptr<OperationLog> log, std::shared_ptr<const Bell> bell,
             bool encrypt = false);
  ~GroupLinks();
  GroupLinks(const GroupLinks&) = delete;
  GroupLinks& operator=(const GroupLinks&) = delete;

  std::uint64_t group() const { return group_; }
  Rank rank() const { return rank_; }
  const wire::Secret& secret() const { return secret_; }
  bool encrypts() const { return encrypt_; }
  AbortFlag& abort_flag() { return abort_; }

  // Dials all lower ranks and waits for all higher ones. Errors name the rank that is missing.
  // `check(rank)`, called when a rank does not answer and while one is missing, may throw a better
  // cause.
  void connect_all(std::vector<PeerAddress> peers, const Deadline& deadline,
                   const std::function<void(Rank)>& check);
  Connection dial_data(Rank peer, const Deadline& deadline);
  std::vector<Connection> take_accepted();

  // Raises the abort flag here and, through the links, on every other rank.
  void abort(const TransportError& cause);
  void leave();  // an orderly farewell: no peer takes the end of the link for a death
  bool departed(Rank peer) const { return links_[peer].departed.load(std::memory_order_acquire); }
  bool left() const { return left_.load(std::memory_order_acquire); }

  // Asks all ranks where they are; the answers come later and are compared with this rank's log.
  void probe();
  // Asks, waits a moment for the answers, and says who has not made the latest call of this rank.
  StallReport stall_report();
  // Tells the next rank of a call that carries no header of ours. Each rank compares with the one
  // before it, so that any disagreement meets somebody.
  void announce(std::uint64_t sequence, const std::string& text);

  // A barrier that rank 0 keeps: the ranks that did not come by the deadline, on all ranks the
  // same. Empty: all came. Errors only when the group fails.
  std::vector<Rank> monitored_barrier(const Deadline& deadline);

  // The control thread's part.
  bool adopt(Purpose purpose, Connection connection);
  void append_poll_entries(std::vector<pollfd>& entries) const;
  void handle_events(int fd, short events);
  void read_link(Rank peer);  // all that has come

 private:
  enum class Message : std::uint8_t {
    kGoodbye = 1,
    kAbort = 2,
    kQuestion = 3,
    kAnswer = 4,
    kAnnouncement = 5,
    kArrival = 6,  // at a monitored barrier
    kRelease = 7,  // from it, by rank 0
  };
  struct Link {
    Connection connection;
    bool opened = false;  // even if it ended since
    std::vector<std::byte> received;
    std::vector<std::byte> unsent;
    std::uint64_t arrived = 0;   // at how many monitored barriers
    std::uint64_t answered = 0;  // the operation that the last answer was about
    bool has_called_it = false;
    std::uint64_t latest = 0;  // the peer's own then
    std::string state;         // what the peer was doing then
    std::atomic<bool> departed{false};
  };

  Connection dial(Rank peer, Purpose purpose, const Deadline& deadline);
  void post_abort(const TransportError& cause);
  void post(Rank peer, Message type, const std::string& payload);  // mutex_ held
  void flush(Link& link);                                          // mutex_ held
  std::size_t receive_some(Rank peer, Bytes into, std::string& ended);
  void handle_message(Rank peer, Message type, const std::string& payload);
  void handle_answer(Rank peer, const std::string& payload);
  void compare(Rank peer, std::uint64_t sequence, const std::string& theirs);
  bool wait_for_news(std::unique_lock<std::mutex>& lock, Clock::time_point until,
                     const std::function<bool()>& come);
  void handle_release(const std::string& payload);
  void link_ended(Rank peer, const std::string& why);

  const Rank rank_;
  const std::uint64_t group_;
  const wire::Secret secret_;
  // Shared: the control thread may hold these links a moment longer than the group lives.
  const std::shared_ptr<OperationLog> log_;
  const std::shared_ptr<const Bell> bell_;
  const bool encrypt_;
  AbortFlag abort_;
  std::atomic<bool> left_{false};

  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<PeerAddress> peers_;
  std::vector<Link> links_;
  std::vector<Connection> accepted_;
  std::atomic<bool> any_accepted_{false};

  std::mutex barrier_mutex_;  // one at a time
  std::uint64_t barriers_ = 0;
  std::map<std::uint64_t, std::vector<Rank>> released_;  // who was absent, by barrier
};

}  // namespace qcoll::transport
