#include "qcoll/base/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace qcoll {
namespace {

// Never destroyed: a fork may happen at any time.
struct Hidden {
  std::mutex mutex;
  std::set<int> fds;
};
Hidden& hidden() {
  static auto* const all = new Hidden;
  return *all;
}

void before_fork() { hidden().mutex.lock(); }
void after_fork_in_parent() { hidden().mutex.unlock(); }
void after_fork_in_child() {
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int fd : hidden().fds) ::dup2(null, fd);
  if (null >= 0) ::close(null);
  hidden().mutex.unlock();
}

}  // namespace

void hide_from_children(int fd) {
  static const int registered =
      ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  static_cast<void>(registered);
  const std::lock_guard lock(hidden().mutex);
  hidden().fds.insert(fd);
}

void forget(int fd) {
  const std::lock_guard lock(hidden().mutex);
  hidden().fds.erase(fd);
}

}  // namespace qcoll
