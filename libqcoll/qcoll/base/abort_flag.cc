#include "qcoll/base/abort_flag.h"

#include <sys/eventfd.h>

#include <cerrno>

namespace qcoll {

AbortFlag::AbortFlag() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw TransportError(system_error_text("eventfd", errno));
}

bool AbortFlag::raise(const TransportError& cause) {
  const std::lock_guard telling(telling_);
  std::map<std::uint64_t, std::function<void(const TransportError&)>> subscribers;
  {
    const std::lock_guard lock(mutex_);
    if (cause_) return false;
    cause_ = cause;
    raised_.store(true, std::memory_order_release);
    subscribers.swap(subscribers_);
  }
  const std::uint64_t one = 1;
  // Cannot fail: the counter is far from its limit.
  [[maybe_unused]] const auto written = ::write(event_.get(), &one, sizeof(one));
  for (const auto& [number, told] : subscribers) told(cause);
  return true;
}

std::uint64_t AbortFlag::subscribe(std::function<void(const TransportError&)> told) {
  std::unique_lock lock(mutex_);
  const std::uint64_t number = next_++;
  if (!cause_) {
    subscribers_.emplace(number, std::move(told));
    return number;
  }
  const TransportError cause = *cause_;
  lock.unlock();
  told(cause);
  return number;
}

void AbortFlag::unsubscribe(std::uint64_t number) {
  const std::lock_guard telling(telling_);
  const std::lock_guard lock(mutex_);
  subscribers_.erase(number);
}

TransportError AbortFlag::cause() const {
  const std::lock_guard lock(mutex_);
  return *cause_;
}

}  // namespace qcoll
