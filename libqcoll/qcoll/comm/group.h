// A group of ranks over the real transports: forms the mesh, numbers and queues calls, and keeps
// the error contract (docs/errors.md): the first failure reaches every rank and every later call.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "qcoll/comm/communicator.h"
#include "qcoll/comm/cost_model.h"
#include "qcoll/comm/flight_record.h"
#include "qcoll/comm/options.h"
#include "qcoll/comm/worker.h"
#include "qcoll/transport/net_mesh.h"
#include "qcoll/transport/operation_log.h"
#include "qcoll/transport/rendezvous.h"

namespace qcoll::comm {

struct GroupConfig {
  Rank rank = 0;
  int size = 1;
  Options options;
  std::string node;       // label of this rank's node; empty: host name and boot id
  std::string agreement;  // further "key=value; ..." that all ranks must share
  bool share_memory = true;
  bool encrypt = false;        // what the engine and the control links send over TCP
  int threads = 1;             // that encode, decode and sum; ranks may differ
  std::string dump_directory;  // for the flight record; empty: none is written
  Clock::duration timeout = std::chrono::minutes(30);
};

class Group {
 public:
  // Collective over all ranks.
  Group(transport::Rendezvous& store, const GroupConfig& config);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const Options& options() const { return options_; }
  const topo::Topology& topology() const { return comm_->topology(); }
  const std::vector<std::string>& node_labels() const { return node_labels_; }
  // What option tuning says of this group's layout; null where it says nothing.
  const LayoutCosts* costs() const { return costs_; }
  Communicator& communicator() { return *comm_; }
  AbortFlag& abort_flag() { return mesh_->abort_flag(); }
  transport::NetMesh& mesh() { return *mesh_; }
  Stats& stats() { return comm_->stats(); }

  using Body = std::function<void(std::uint64_t sequence)>;
  using Done = std::function<void(std::exception_ptr)>;
  // Runs `body` on the group's data path, in the order of these calls on every rank: at once when
  // `inline_if_idle` and nothing is queued, else on the worker. `done` is told how it ended.
  // `text` names the call and what all ranks must agree on. Returns the sequence number.
  std::uint64_t enqueue(const std::string& text, bool inline_if_idle, Body body, Done done);

  // Numbers a call that runs elsewhere (on the delegate) and records its course.
  std::uint64_t begin_delegated(const std::string& text);
  void end_delegated(std::uint64_t sequence, bool well);
  int delegated_in_flight() const { return delegated_.load(); }
  // Sends and receives, for the flight record.
  transport::OperationLog& messages() { return messages_; }
  std::uint64_t latest_sequence() const { return log_->latest(); }

  // What this rank has done and what it waits for. From any thread, also after a failure.
  FlightRecord flight_record() const;

  // Throws the error that later calls get once the group has failed.
  void check_usable() const;
  // Fails the group on all ranks; wakes everything that waits.
  void abort(const std::string& reason);
  void fail(const TransportError& cause);
  // What a call finds on the data path is often the effect of a cause that is still on its way
  // over the control links (a peer died, a rank aborted): waits for that for moments, fails the
  // group, and returns the cause that all ranks get.
  TransportError fail_with_best_cause(const TransportError& found);
  // The same for an error of the delegate, whose text is all that tells a timeout from a lost
  // connection. `peer`: of a send or receive; -1: unknown.
  TransportError fail_delegated(const std::string& reason, Rank peer = -1);
  // The error of one call: `cause` with the call's name ("all_gather(...) #12") and duration.
  TransportError in_context(const std::string& call, const TransportError& cause,
                            Clock::time_point since) const;
  TransportError in_context(std::uint64_t sequence, const TransportError& cause,
                            Clock::time_point since) const;
  // Lets queued calls end for at most `grace`, then aborts what is left and says goodbye.
  void shutdown(Clock::duration grace);

  // A delegated call that waits too long asks the others where they are.
  void probe() { mesh_->probe_peers(); }

 private:
  void execute(std::uint64_t sequence, const Body& body, const Done& done);
  std::uint64_t number(const std::string& text);
  bool raised_within(std::chrono::milliseconds patience, Rank unless_departed) const;
  void dump() const;

  const int owner_pid_;
  const Options options_;
  const std::shared_ptr<transport::OperationLog> log_ = std::make_shared<transport::OperationLog>();
  transport::OperationLog messages_;
  std::unique_ptr<transport::NetMesh> mesh_;
  std::vector<std::string> node_labels_;
  std::unique_ptr<Communicator> comm_;
  const LayoutCosts* costs_ = nullptr;  // of options_.tuning
  const std::string dump_directory_;
  std::uint64_t dump_subscription_ = 0;
  std::mutex enqueue_mutex_;
  std::atomic<int> untold_{0};  // own calls whose `done` has not been told
  std::atomic<int> delegated_{0};
  Worker worker_;
};

}  // namespace qcoll::comm
