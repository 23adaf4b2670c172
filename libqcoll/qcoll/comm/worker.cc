#include "qcoll/comm/worker.h"

#include <pthread.h>
#include <unistd.h>

namespace qcoll::comm {

Worker::Worker() : owner_pid_(::getpid()) {}

Worker::~Worker() {
  if (owner_pid_ != ::getpid()) {  // a forked child has the object but not its thread
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Worker::submit(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(job));
    if (!thread_.joinable())
      thread_ = std::thread([this] {
        ::pthread_setname_np(::pthread_self(), "qcoll_worker");
        run();
      });
  }
  changed_.notify_all();
}

bool Worker::try_take_turn() {
  const std::lock_guard lock(mutex_);
  if (taken_ || !queue_.empty()) return false;
  taken_ = true;
  return true;
}

void Worker::end_turn() {
  {
    const std::lock_guard lock(mutex_);
    taken_ = false;
  }
  changed_.notify_all();
}

void Worker::wait_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !taken_ && queue_.empty(); });
}

bool Worker::wait_idle_for(Clock::duration limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return !taken_ && queue_.empty(); });
}

void Worker::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !taken_ && (stop_ || !queue_.empty()); });
    if (queue_.empty()) return;
    auto job = std::move(queue_.front());
    queue_.pop_front();
    taken_ = true;
    lock.unlock();
    job();
    job = nullptr;  // what it holds is dropped before the next one can be seen to have started
    lock.lock();
    taken_ = false;
    changed_.notify_all();
  }
}

}  // namespace qcoll::comm
