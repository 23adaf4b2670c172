// Runs the callbacks of futures, and calls that block. Callbacks may themselves wait for
// other collectives (PowerSGD and torch's quantization hooks do), so they never run on a group's
// worker, and a fixed number of threads would not do: a task that finds none idle gets a new one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace qcoll::torch_binding {

class Callbacks {
 public:
  static Callbacks& shared();  // of this process: a forked child has its own

  void run(std::function<void()> callback);
  // For a call into the delegate that may be stuck until its own timeout: nobody waits for it.
  void run_unawaited(std::function<void()> call);
  void wait_idle_for(std::chrono::milliseconds patience);  // until every callback has run
  static bool on_this_thread();  // whether the caller is one of these threads

 private:
  struct Task {
    std::function<void()> body;
    bool awaited = true;
  };
  void submit(Task task);
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  int idle_ = 0;
  int awaited_ = 0;  // queued and running
};

}  // namespace qcoll::torch_binding
