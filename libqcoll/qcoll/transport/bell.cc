#include "qcoll/transport/bell.h"

#include <fcntl.h>

#include <cerrno>
#include <string>

#include "qcoll/base/error.h"

namespace qcoll::transport {

Bell Bell::create() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    throw TransportError(system_error_text("pipe2", errno));
  Bell bell;
  bell.read_ = Fd(ends[0]);
  bell.write_ = Fd(ends[1]);
  return bell;
}

Bell Bell::attach(int pid, int write_fd) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(write_fd);
  Bell bell;
  // With a reading end of its own, a ring for a process that has died is no SIGPIPE.
  bell.write_ = Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!bell.write_) throw TransportError(system_error_text("open of " + path, errno));
  return bell;
}

void Bell::ring() const {
  const char byte = 0;
  // EAGAIN: the pipe is full of rings.
  [[maybe_unused]] const auto written = ::write(write_.get(), &byte, 1);
}

void Bell::quiet() const {
  char rings[64];
  while (::read(read_.get(), rings, sizeof(rings)) == sizeof(rings)) {
  }
}

}  // namespace qcoll::transport
