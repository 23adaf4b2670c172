#include "callbacks.h"

#include <pthread.h>

#include <thread>
#include <utility>

namespace qcoll::torch_binding {
namespace {

constexpr auto kIdleLife = std::chrono::seconds(10);

thread_local bool callback_thread = false;

}  // namespace

Callbacks& Callbacks::shared() {
  static auto* const callbacks = new Callbacks;  // never destroyed: threads may outlive statics
  return *callbacks;
}

void Callbacks::run(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(callback));
    if (static_cast<std::size_t>(idle_) >= queue_.size()) {
      changed_.notify_all();
      return;
    }
    ++idle_;  // the new thread, until it takes its first callback
  }
  std::thread([this] {
    ::pthread_setname_np(::pthread_self(), "qcoll_callback");
    serve();
  }).detach();
}

bool Callbacks::on_this_thread() { return callback_thread; }

void Callbacks::serve() {
  callback_thread = true;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!changed_.wait_for(lock, kIdleLife, [&] { return !queue_.empty(); })) break;
    auto callback = std::move(queue_.front());
    queue_.pop_front();
    --idle_;
    ++running_;
    lock.unlock();
    callback();
    callback = nullptr;  // drops its tensors before it counts as done
    lock.lock();
    --running_;
    ++idle_;
    changed_.notify_all();
  }
  --idle_;
}

void Callbacks::wait_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && running_ == 0; });
}

}  // namespace qcoll::torch_binding
