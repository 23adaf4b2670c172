// What happened when, for tests and for people who want to see the overlap. Off unless attached.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "qcoll/base/deadline.h"
#include "qcoll/base/types.h"

namespace qcoll {

struct TraceEvent {
  enum class Kind : std::uint8_t { kEncode, kDecode, kSend, kLand };
  Kind kind;
  Rank peer;  // of a send or a landing, else -1
  std::uint32_t tag;
  std::uint32_t chunk;
  Clock::time_point begin;
  Clock::time_point end;
};

class Trace {
 public:
  void record(const TraceEvent& event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
  }
  std::vector<TraceEvent> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

}  // namespace qcoll
