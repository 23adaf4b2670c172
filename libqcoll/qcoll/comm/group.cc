#include "qcoll/comm/group.h"

#include <poll.h>
#include <unistd.h>

#include <thread>

namespace qcoll::comm {
namespace {

constexpr std::chrono::milliseconds kCauseGrace{250};
// A connection breaks for a reason, which is on its way even if the machine is busy.
constexpr std::chrono::milliseconds kLostConnectionGrace{2000};

}  // namespace

Group::Group(transport::Rendezvous& store, const GroupConfig& config)
    : owner_pid_(::getpid()), options_(config.options), dump_directory_(config.dump_directory) {
  if (!dump_directory_.empty()) check_dump_directory(dump_directory_);
  const Deadline deadline(config.timeout);
  std::string agreement = options_.to_string();
  if (!config.agreement.empty()) agreement += "; " + config.agreement;
  mesh_ = std::make_unique<transport::NetMesh>(
      store, config.rank, config.size,
      transport::NetOptions{.node = config.node,
                            .agreement = agreement,
                            .share_memory = config.share_memory,
                            .encrypt = config.encrypt},
      log_, deadline);
  node_labels_ = mesh_->node_labels();
  topo::Topology topology(config.rank, node_labels_);
  try {
    mesh_->share_memory(store, Communicator::memory_bytes(topology), deadline);
  } catch (const std::exception& error) {
    // The others are past the roll call, where they would have read of it.
    fail(TransportError(
        "rank " + std::to_string(config.rank) + " cannot join the group: " + error.what(),
        config.rank));
    throw;
  }
  comm_ =
      std::make_unique<Communicator>(*mesh_, std::move(topology), mesh_->group(), config.threads);
  if (options_.tuning) costs_ = options_.tuning->of(layout_of(comm_->topology()));
  if (!dump_directory_.empty())
    dump_subscription_ = abort_flag().subscribe([this](const TransportError&) { dump(); });
}

Group::~Group() {
  shutdown(std::chrono::seconds(0));
  abort_flag().unsubscribe(dump_subscription_);
}

std::uint64_t Group::enqueue(const std::string& text, bool inline_if_idle, Body body, Done done) {
  std::uint64_t sequence = 0;
  {
    // Numbering and queueing are one step: threads that share a group keep one order.
    const std::lock_guard lock(enqueue_mutex_);
    sequence = number(text);
    ++untold_;
    if (!inline_if_idle || !worker_.try_take_turn()) {
      worker_.submit([this, sequence, body = std::move(body), done = std::move(done)] {
        execute(sequence, body, done);
      });
      return sequence;
    }
  }
  execute(sequence, body, done);
  worker_.end_turn();
  return sequence;
}

void Group::execute(std::uint64_t sequence, const Body& body, const Done& done) {
  const auto since = Clock::now();
  std::exception_ptr error;
  log_->started(sequence);
  try {
    abort_flag().throw_if_raised();
    body(sequence);
  } catch (const TransportError& found) {
    error = std::make_exception_ptr(in_context(sequence, fail_with_best_cause(found), since));
  } catch (const std::exception& defect) {
    // Memory or a defect: the data path's state is unknown, so the group ends here as well.
    error = std::current_exception();
    fail(TransportError("rank " + std::to_string(comm_->topology().rank()) +
                            " failed inside a collective: " + defect.what(),
                        comm_->topology().rank()));
  }
  log_->ended(sequence, error == nullptr);
  --untold_;
  done(error);
}

std::uint64_t Group::number(const std::string& text) {
  check_usable();
  std::optional<transport::OperationLog::Conflict> conflict;
  const std::uint64_t sequence = log_->add(text, &conflict);
  if (conflict)
    fail_with_best_cause(transport::conflict_error(comm_->topology().rank(), *conflict));
  return sequence;
}

std::uint64_t Group::begin_delegated(const std::string& text) {
  const std::lock_guard lock(enqueue_mutex_);
  const std::uint64_t sequence = number(text);
  mesh_->links().announce(sequence, text);
  log_->started(sequence);
  ++delegated_;
  return sequence;
}

void Group::end_delegated(std::uint64_t sequence, bool well) {
  log_->ended(sequence, well);
  --delegated_;
}

FlightRecord Group::flight_record() const {
  const AbortFlag& abort = mesh_->abort_flag();
  const auto& me = mesh_->identities()[comm_->topology().rank()];
  return {.rank = comm_->topology().rank(),
          .size = comm_->topology().size(),
          .group = mesh_->group(),
          .label = me.label(),
          .topology = comm_->topology().describe(),
          .failure = abort.raised() ? abort.cause().what() : "",
          .waits_for = comm_->waits_for(),
          .operations = log_->entries(),
          .messages = messages_.entries()};
}

void Group::dump() const { write_flight_record(flight_record(), dump_directory_); }

void Group::check_usable() const {
  if (owner_pid_ != ::getpid())
    throw TransportError(
        "qcoll: this process was forked from the one that formed the process group, and a child "
        "cannot use its parent's connections; form a new group in the child, or make the call in "
        "the parent");
  const AbortFlag& abort = mesh_->abort_flag();
  if (!abort.raised() && mesh_->links().left())
    throw TransportError("qcoll: this process group has been shut down; make a new one");
  if (!abort.raised()) return;
  const TransportError cause = abort.cause();
  throw TransportError(
      "qcoll: this process group failed earlier and cannot be used any more: " +
          std::string(cause.what()) +
          ". Destroy it (torch.distributed.destroy_process_group) and make a new one.",
      cause.peer());
}

TransportError Group::in_context(std::uint64_t sequence, const TransportError& cause,
                                 Clock::time_point since) const {
  return in_context(log_->text_of(sequence).value_or("a call") + " #" + std::to_string(sequence),
                    cause, since);
}

TransportError Group::in_context(const std::string& call, const TransportError& cause,
                                 Clock::time_point since) const {
  const double seconds = std::chrono::duration<double>(Clock::now() - since).count();
  std::string why = cause.what();
  while (why.ends_with('.') || why.ends_with(' ')) why.pop_back();
  return TransportError("qcoll: " + call + " failed on rank " +
                            std::to_string(comm_->topology().rank()) + " after " +
                            std::to_string(seconds) + " s: " + why +
                            ". The process group cannot be used any more; destroy it and make a "
                            "new one.",
                        cause.peer());
}

void Group::abort(const std::string& reason) { fail(TransportError(reason)); }

void Group::fail(const TransportError& cause) { mesh_->links().abort(cause); }

bool Group::raised_within(std::chrono::milliseconds patience, Rank unless_departed) const {
  const Deadline deadline(patience);
  while (!mesh_->abort_flag().raised() && !deadline.passed() &&
         (unless_departed < 0 || !mesh_->departed(unless_departed))) {
    pollfd raised{mesh_->abort_flag().fd(), POLLIN, 0};
    ::poll(&raised, 1, deadline.poll_milliseconds(std::chrono::milliseconds(10)));
  }
  return mesh_->abort_flag().raised();
}

TransportError Group::fail_with_best_cause(const TransportError& found) {
  const Rank peer = found.peer();
  const bool connection_lost = dynamic_cast<const ConnectionLost*>(&found) != nullptr;
  const auto patience = connection_lost ? kLostConnectionGrace : kCauseGrace;
  if (!raised_within(patience, connection_lost ? peer : -1) && connection_lost && peer >= 0 &&
      mesh_->departed(peer))
    fail(TransportError("rank " + std::to_string(peer) +
                            " has left the group (destroy_process_group or exit): " + found.what(),
                        peer));
  fail(found);
  return abort_flag().cause();
}

TransportError Group::fail_delegated(const std::string& reason, Rank peer) {
  const bool timed_out = reason.find("Timed out") != std::string::npos;
  const std::string who =
      peer < 0 ? "the delegate: " : "the delegate, of rank " + std::to_string(peer) + ": ";
  if (!timed_out) return fail_with_best_cause(ConnectionLost(who + reason, peer));
  if (!raised_within(kCauseGrace, -1)) {
    if (peer >= 0) return fail_with_best_cause(TransportError(who + reason, peer));
    const transport::StallReport report = mesh_->stall_report();
    fail(TransportError(who + reason + "; " + report.text, report.late));
  }
  return abort_flag().cause();
}

void Group::shutdown(Clock::duration grace) {
  // A forked child holds a copy of everything but the threads; the group is its parent's.
  if (owner_pid_ != ::getpid() || mesh_->links().left()) return;
  const Deadline deadline(grace);
  worker_.wait_idle_for(grace);
  // After a failure the delegate's calls end only by their own timeouts.
  while (delegated_in_flight() > 0 && !deadline.passed() && !abort_flag().raised())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // Not whether the worker is idle: it lays a call down a moment after the caller was told.
  if (untold_ > 0 || delegated_in_flight() > 0)
    abort("rank " + std::to_string(comm_->topology().rank()) +
          " shut the process group down with calls still in flight");
  worker_.wait_idle();
  if (!dump_directory_.empty() && !abort_flag().raised()) dump();
  mesh_->links().leave();
}

}  // namespace qcoll::comm
