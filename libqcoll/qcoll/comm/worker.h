// The thread that runs a group's collectives in order. The data path belongs to whoever holds the
// turn: the worker's thread, or a caller that found the queue empty and runs its call inline.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "qcoll/base/deadline.h"

namespace qcoll::comm {

class Worker {
 public:
  Worker();
  ~Worker();  // runs what is queued (abort the group first to make that quick), then joins
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Jobs must not throw. Started on first use.
  void submit(std::function<void()> job);
  // Takes the turn if nothing is queued or running. The caller then runs its job and calls
  // end_turn().
  bool try_take_turn();
  void end_turn();
  void wait_idle();
  bool wait_idle_for(Clock::duration limit);  // false: still busy

 private:
  void run();

  const int owner_pid_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool taken_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace qcoll::comm
