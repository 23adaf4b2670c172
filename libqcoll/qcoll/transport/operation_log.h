// The latest operations of a group, by sequence number: what a rank answers when a stalled peer
// asks where it is. Texts hold only what all ranks must agree on, so that they can be compared.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "qcoll/base/deadline.h"

namespace qcoll::transport {

class OperationLog {
 public:
  // Numbers the operation; sequence numbers start at 1.
  std::uint64_t add(std::string text);
  void started(std::uint64_t sequence);
  void finished(std::uint64_t sequence);

  // Nothing when it has not been called yet, or too long ago.
  std::optional<std::string> text_of(std::uint64_t sequence) const;
  std::uint64_t latest() const;
  // "running all_gather #12 (...) for 0.31 s", "idle since all_gather #12 (...)"
  std::string state() const;

 private:
  enum class Stage : std::uint8_t { kQueued, kRunning, kFinished };
  struct Entry {
    std::uint64_t sequence = 0;
    std::string text;
    Stage stage = Stage::kQueued;
    Clock::time_point changed;
  };
  static constexpr std::size_t kKept = 2000;

  Entry& entry(std::uint64_t sequence) { return entries_[sequence % kKept]; }
  const Entry& entry(std::uint64_t sequence) const { return entries_[sequence % kKept]; }
  void set_stage(std::uint64_t sequence, Stage stage);

  mutable std::mutex mutex_;
  std::uint64_t latest_ = 0;
  std::uint64_t last_changed_ = 0;
  std::array<Entry, kKept> entries_;
};

}  // namespace qcoll::transport
