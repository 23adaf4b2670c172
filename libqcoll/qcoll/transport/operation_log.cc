#include "qcoll/transport/operation_log.h"

namespace qcoll::transport {

std::uint64_t OperationLog::add(std::string text, std::optional<Conflict>* conflict) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t sequence = ++latest_;
  if (const auto told = told_.find(sequence); told != told_.end() && told->second.second != text)
    *conflict = Conflict{sequence, text, told->second.first, told->second.second};
  told_.erase(told_.begin(), told_.upper_bound(sequence));
  entry(sequence) = {.sequence = sequence, .text = std::move(text), .queued = Clock::now()};
  return sequence;
}

std::optional<OperationLog::Conflict> OperationLog::compare(std::uint64_t sequence, Rank peer,
                                                            const std::string& theirs) {
  const std::lock_guard lock(mutex_);
  if (sequence > latest_) {
    if (told_.size() < kKept) told_.emplace(sequence, std::pair(peer, theirs));
    return std::nullopt;
  }
  const Entry& e = entry(sequence);
  if (e.sequence != sequence || e.text == theirs) return std::nullopt;
  return Conflict{sequence, e.text, peer, theirs};
}

// An entry may have been overwritten, when more than kKept operations are in flight.
void OperationLog::started(std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  Entry& e = entry(sequence);
  if (e.sequence != sequence) return;
  e.stage = Stage::kRunning;
  e.started = Clock::now();
  last_changed_ = sequence;
}

void OperationLog::ended(std::uint64_t sequence, bool well) {
  const std::lock_guard lock(mutex_);
  Entry& e = entry(sequence);
  if (e.sequence != sequence) return;
  e.stage = well ? Stage::kFinished : Stage::kFailed;
  e.ended = Clock::now();
  last_changed_ = sequence;
}

std::vector<OperationLog::Entry> OperationLog::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<Entry> kept;
  for (std::uint64_t sequence = latest_ < kKept ? 1 : latest_ - kKept + 1; sequence <= latest_;
       ++sequence)
    kept.push_back(entry(sequence));
  return kept;
}

std::optional<std::string> OperationLog::text_of(std::uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  const Entry& e = entry(sequence);
  if (sequence == 0 || e.sequence != sequence) return std::nullopt;
  return e.text;
}

std::uint64_t OperationLog::latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

std::string OperationLog::state() const {
  const std::lock_guard lock(mutex_);
  if (last_changed_ == 0) return "idle, and has run no collective yet";
  const Entry& e = entry(last_changed_);
  const auto changed = e.stage == Stage::kRunning ? e.started : e.ended;
  const double seconds = std::chrono::duration<double>(Clock::now() - changed).count();
  const std::string name = e.text + " #" + std::to_string(e.sequence);
  const std::string since = std::to_string(seconds).substr(0, 5) + " s";
  return e.stage == Stage::kRunning ? "in " + name + " for " + since
                                    : "idle for " + since + " after " + name;
}

TransportError conflict_error(Rank rank, const OperationLog::Conflict& conflict) {
  return TransportError("ranks disagree on operation #" + std::to_string(conflict.sequence) +
                            " of the group: rank " + std::to_string(rank) + " called " +
                            conflict.ours + ", rank " + std::to_string(conflict.peer) + " called " +
                            conflict.theirs +
                            "; all ranks of a group must make the same calls in the same order",
                        conflict.peer);
}

}  // namespace qcoll::transport
