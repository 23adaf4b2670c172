// The one place where a group's failure is recorded. The first cause wins, and every wait of the
// group polls fd() beside what it waits for, so that raising wakes all of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "qcoll/base/error.h"
#include "qcoll/base/fd.h"

namespace qcoll {

class AbortFlag {
 public:
  AbortFlag();

  bool raised() const { return raised_.load(std::memory_order_acquire); }
  // Returns true when this call was the first.
  bool raise(const TransportError& cause);
  // The first cause; valid once raised.
  TransportError cause() const;
  void throw_if_raised() const {
    if (raised()) throw cause();
  }
  int fd() const { return event_.get(); }  // readable from the moment of raising, forever

  // For what cannot poll: `told` runs once, in the thread that raises, or now if it has happened.
  // Returns a number for unsubscribe, after which `told` is not running and will not run.
  std::uint64_t subscribe(std::function<void(const TransportError&)> told);
  void unsubscribe(std::uint64_t number);

 private:
  std::atomic<bool> raised_{false};
  mutable std::mutex mutex_;
  std::optional<TransportError> cause_;
  std::mutex telling_;  // held while subscribers run
  std::uint64_t next_ = 1;
  std::map<std::uint64_t, std::function<void(const TransportError&)>> subscribers_;
  Fd event_;
};

}  // namespace qcoll
