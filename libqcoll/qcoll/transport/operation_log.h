// The latest operations of a group, by sequence number: what a rank answers when a stalled peer
// asks where it is, and what the flight record shows. Texts hold only what all ranks must agree on,
// so that they can be compared.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "qcoll/base/deadline.h"
#include "qcoll/base/error.h"
#include "qcoll/base/types.h"

namespace qcoll::transport {

class OperationLog {
 public:
  // What another rank says its operation of that number is, if this rank's differs.
  struct Conflict {
    std::uint64_t sequence = 0;
    std::string ours;
    Rank peer = -1;
    std::string theirs;
  };

  enum class Stage : std::uint8_t { kQueued, kRunning, kFinished, kFailed };
  struct Entry {
    std::uint64_t sequence = 0;
    std::string text;
    Stage stage = Stage::kQueued;
    Clock::time_point queued;
    Clock::time_point started;  // of stages after kQueued
    Clock::time_point ended;    // of kFinished and kFailed
  };
  static constexpr std::size_t kKept = 2000;

  // Numbers the operation; sequence numbers start at 1. Sets `conflict` if another rank has told
  // of a different one.
  std::uint64_t add(std::string text, std::optional<Conflict>* conflict);
  // Compares now, or when this rank gets there.
  std::optional<Conflict> compare(std::uint64_t sequence, Rank peer, const std::string& theirs);
  void started(std::uint64_t sequence);
  void ended(std::uint64_t sequence, bool well);

  // Nothing when it has not been called yet, or too long ago.
  std::optional<std::string> text_of(std::uint64_t sequence) const;
  std::uint64_t latest() const;
  // "in all_gather(...) #12 for 0.31 s", "idle for 0.31 s after all_gather(...) #12"
  std::string state() const;
  std::vector<Entry> entries() const;  // those that are kept, oldest first

 private:
  Entry& entry(std::uint64_t sequence) { return entries_[sequence % kKept]; }
  const Entry& entry(std::uint64_t sequence) const { return entries_[sequence % kKept]; }

  mutable std::mutex mutex_;
  std::uint64_t latest_ = 0;
  std::uint64_t last_changed_ = 0;
  std::array<Entry, kKept> entries_;
  std::map<std::uint64_t, std::pair<Rank, std::string>> told_;  // by others, of calls to come
};

// The error of a group whose ranks called different things.
TransportError conflict_error(Rank rank, const OperationLog::Conflict& conflict);

}  // namespace qcoll::transport
