// A point in time by which a blocking call must have ended.
#pragma once

#include <algorithm>
#include <chrono>

namespace qcoll {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  explicit Deadline(Clock::duration timeout) : start_(Clock::now()), at_(start_ + timeout) {}

  Clock::time_point at() const { return at_; }
  bool passed() const { return Clock::now() >= at_; }
  double elapsed_seconds() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }
  double timeout_seconds() const { return std::chrono::duration<double>(at_ - start_).count(); }
  // For poll(2): time left, at least 0 and at most `cap`, rounded up to whole milliseconds.
  int poll_milliseconds(std::chrono::milliseconds cap) const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now());
    return static_cast<int>(std::clamp(left, std::chrono::milliseconds(0), cap).count());
  }

 private:
  Clock::time_point start_;
  Clock::time_point at_;
};

}  // namespace qcoll
