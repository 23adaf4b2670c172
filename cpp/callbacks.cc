#include "callbacks.h"

#include <pthread.h>

#include <atomic>
#include <thread>
#include <utility>

#include "interpreter_exit.h"

namespace qcoll::torch_binding {
namespace {

constexpr auto kIdleLife = std::chrono::seconds(10);

thread_local bool callback_thread = false;

}  // namespace

// Never destroyed: threads may outlive statics.
Callbacks& Callbacks::shared() {
  static std::atomic<Callbacks*> current{nullptr};
  static std::once_flag once;
  std::call_once(once, [] {
    current.store(new Callbacks);
    ::pthread_atfork(nullptr, nullptr, [] { current.store(new Callbacks); });
  });
  return *current.load();
}

void Callbacks::run(std::function<void()> callback) { submit({std::move(callback), true}); }

void Callbacks::run_unawaited(std::function<void()> call) { submit({std::move(call), false}); }

void Callbacks::submit(Task task) {
  {
    const std::lock_guard lock(mutex_);
    if (task.awaited) ++awaited_;
    queue_.push_back(std::move(task));
    if (static_cast<std::size_t>(idle_) >= queue_.size()) {
      changed_.notify_all();
      return;
    }
    ++idle_;  // the new thread, until it takes its first task
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
    Task task = std::move(queue_.front());
    queue_.pop_front();
    --idle_;
    lock.unlock();
    stay_if_interpreter_ended();
    task.body();
    stay_if_interpreter_ended();
    task.body = nullptr;  // drops its tensors before it counts as done
    lock.lock();
    if (task.awaited) --awaited_;
    ++idle_;
    changed_.notify_all();
  }
  --idle_;
}

void Callbacks::wait_idle_for(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return awaited_ == 0; });
}

}  // namespace qcoll::torch_binding
