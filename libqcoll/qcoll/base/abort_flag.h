// The one place where a group's failure is recorded. The first cause wins, and every wait of the
// group polls fd() beside what it waits for, so that raising wakes all of them.
#pragma once

#include <atomic>
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

 private:
  std::atomic<bool> raised_{false};
  mutable std::mutex mutex_;
  std::optional<TransportError> cause_;
  Fd event_;
};

}  // namespace qcoll
