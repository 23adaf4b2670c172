#include "qcoll/base/abort_flag.h"

#include <sys/eventfd.h>

#include <cerrno>

namespace qcoll {

AbortFlag::AbortFlag() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw TransportError(system_error_text("eventfd", errno));
}

bool AbortFlag::raise(const TransportError& cause) {
  {
    const std::lock_guard lock(mutex_);
    if (cause_) return false;
    cause_ = cause;
    raised_.store(true, std::memory_order_release);
  }
  const std::uint64_t one = 1;
  // Cannot fail: the counter is far from its limit.
  [[maybe_unused]] const auto written = ::write(event_.get(), &one, sizeof(one));
  return true;
}

TransportError AbortFlag::cause() const {
  const std::lock_guard lock(mutex_);
  return *cause_;
}

}  // namespace qcoll
