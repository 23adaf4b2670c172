// The waiting half of Exchange: progress on all streams, sleeping, and what ends a wait.
#include <poll.h>

#include "qcoll/transport/exchange.h"
#include "qcoll/transport/exchange_rings.h"

namespace qcoll::transport {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kProbeEvery = std::chrono::seconds(1);

}  // namespace

bool Exchange::progress() {
  bool any = false;
  for (Connection& connection : mesh_.take_accepted()) {
    const Rank peer = connection.peer();
    receivers_.insert_or_assign(peer, Incoming{ReceiveStream(std::move(connection))});
    any = true;
  }
  for (auto& [peer, stream] : senders_)
    if (!stream.idle()) any |= stream.push(trace_);
  for (auto& [peer, incoming] : receivers_) any |= pull(incoming);
  if (sends_from_peer_slots_)
    for (PeerRing& ring : peer_rings_) advance_released(ring);
  return any;
}

// Takes messages off a stream while they have a place.
bool Exchange::pull(Incoming& incoming) {
  bool any = false;
  for (;;) {
    if (!incoming.stream.accepted()) {
      const wire::Header* header = incoming.stream.header();
      if (header == nullptr || !place(incoming, *header)) return any;
    }
    if (!incoming.stream.fill()) return any;
    OwnRing& ring = *incoming.landing;
    ring.state(ring.filled).held = true;
    if (trace_ != nullptr)
      trace_->record(
          {TraceEvent::Kind::kLand, ring.from, ring.tag, ring.filled, Clock::now(), Clock::now()});
    ++ring.filled;
    any = true;
  }
}

// False while the message must stay in the stream: it belongs to a later run, or its ring is full.
// The kernel's flow control then holds the sender back; no other peer is affected.
bool Exchange::place(Incoming& incoming, const wire::Header& header) {
  const Rank from = incoming.stream.peer();
  if (header.envelope.run > envelope_.run) return false;
  const auto found = landing_rings_.find({from, header.tag});
  if (found == landing_rings_.end())
    fail_disagreement(from, wire::describe(header.envelope), wire::describe(envelope_));
  OwnRing& ring = *found->second;
  check_header(header, from, {ring.codec, ring.count, ring.filled});
  if (wire::Header::kBytes + header.payload_bytes > ring.slot_bytes)
    fail_disagreement(from,
                      wire::describe(header.envelope) + " with a message of " +
                          std::to_string(header.payload_bytes) + " bytes",
                      "room for " + std::to_string(ring.slot_bytes - wire::Header::kBytes));
  Rank laggard = -1;
  if (!slot_free(ring, ring.filled, &laggard)) return false;
  ring.state(ring.filled).elements = header.elements;
  ring.state(ring.filled).payload_bytes = header.payload_bytes;
  incoming.stream.accept(ring.slot(ring.filled));
  incoming.landing = &ring;
  return true;
}

void Exchange::wait_until(const std::function<bool()>& ready, const Waiting& what) {
  const auto start = Clock::now();
  auto next_probe = start + kProbeEvery;
  for (;;) {
    // Asked before the last look: what the peer left behind before it went is still taken.
    const bool departed = what.peer != mesh_.rank() && mesh_.departed(what.peer);
    progress();
    if (ready()) break;
    mesh_.abort_flag().throw_if_raised();
    const auto now = Clock::now();
    if (mesh_.may_spin() && now - start < kSpin) {
      __builtin_ia32_pause();
      continue;
    }
    check_peer(what, departed);
    if (now >= deadline_->at()) fail_timeout(what);
    if (now >= next_probe) {
      mesh_.probe_peers();
      next_probe = now + kProbeEvery;
    }
    {
      const std::lock_guard lock(asleep_mutex_);
      asleep_ = {what, start};
    }
    sleep_until_event(ready);
  }
  if (asleep_) {  // only this thread writes it
    const std::lock_guard lock(asleep_mutex_);
    asleep_.reset();
  }
  counters_.wait_seconds += std::chrono::duration<double>(Clock::now() - start).count();
}

void Exchange::sleep_until_event(const std::function<bool()>& ready) {
  board_.sleeping().store(1);
  // From here on peers ring. A last look, which may also place a message that waited for a reader.
  if (!progress() && !ready()) {
    std::vector<pollfd> events{{mesh_.abort_flag().fd(), POLLIN, 0}, {mesh_.bell_fd(), POLLIN, 0}};
    for (const auto& [peer, stream] : senders_)
      if (!stream.idle()) events.push_back({stream.fd(), POLLOUT, 0});
    for (const auto& [peer, incoming] : receivers_)
      if (incoming.stream.wants_bytes()) events.push_back({incoming.stream.fd(), POLLIN, 0});
    ::poll(events.data(), events.size(), deadline_->poll_milliseconds(kProbeEvery));
    if (events[1].revents != 0) mesh_.quiet_bell();
  }
  board_.sleeping().store(0);
}

std::string Exchange::waits_for() const {
  const std::lock_guard lock(asleep_mutex_);
  if (!asleep_) return "";
  const double seconds = std::chrono::duration<double>(Clock::now() - asleep_->since).count();
  return "rank " + std::to_string(asleep_->what.peer) + " " + asleep_->what.action + ", for " +
         std::to_string(seconds) + " s";
}

// Nothing more comes from a peer that has gone or is in a later collective.
void Exchange::check_peer(const Waiting& what, bool departed) const {
  if (what.peer == mesh_.rank()) return;
  const auto incoming = receivers_.find(what.peer);
  const bool streamed = incoming != receivers_.end();
  if (streamed && !incoming->second.stream.accepted() &&
      incoming->second.stream.peek() != nullptr) {
    const wire::Header& header = *incoming->second.stream.peek();
    if (header.envelope.run > envelope_.run)
      fail_disagreement(what.peer, wire::describe(header.envelope), wire::describe(envelope_));
  }
  if (streamed && incoming->second.stream.ended())
    throw ConnectionLost("rank " + std::to_string(what.peer) +
                             " closed its connection while rank " + std::to_string(mesh_.rank()) +
                             " waited for it " + what.action,
                         what.peer);
  if (departed)
    throw TransportError("rank " + std::to_string(what.peer) +
                             " has left the group (destroy_process_group or exit) while rank " +
                             std::to_string(mesh_.rank()) + " waited for it " + what.action,
                         what.peer);
}

void Exchange::fail_timeout(const Waiting& what) {
  const StallReport report = mesh_.stall_report();
  throw TransportError("timed out after " + std::to_string(deadline_->timeout_seconds()) +
                           " s: rank " + std::to_string(mesh_.rank()) + " waited for rank " +
                           std::to_string(what.peer) + " " + what.action +
                           (report.text.empty() ? "" : "; " + report.text),
                       report.late >= 0 ? report.late : what.peer);
}

}  // namespace qcoll::transport
