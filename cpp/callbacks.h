// Runs the callbacks of futures. They may themselves wait for other collectives (PowerSGD and
// torch's quantization hooks do), so they never run on a group's worker, and a fixed number of
// threads would not do: a callback that finds none idle gets a new one.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace qcoll::torch_binding {

class Callbacks {
 public:
  static Callbacks& shared();

  void run(std::function<void()> callback);
  void wait_idle();
  static bool on_this_thread();  // whether the caller is one of these threads

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  int idle_ = 0;
  int running_ = 0;
};

}  // namespace qcoll::torch_binding
