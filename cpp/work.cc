#include "work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <utility>

#include "callbacks.h"
#include "interpreter_exit.h"
#include "qcoll/base/error.h"

namespace qcoll::torch_binding {
namespace {

constexpr auto kProbeEvery = std::chrono::seconds(1);

c10::intrusive_ptr<c10::ivalue::Future> make_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

}  // namespace

HostWork::HostWork(int rank, c10d::OpType type, const char* title,
                   const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs,
                   std::chrono::milliseconds timeout)
    : Work(rank, type, title, std::optional<std::vector<at::Tensor>>(inputs)),
      outputs_(std::move(outputs)),
      timeout_(timeout) {}

void HostWork::complete(std::exception_ptr error) {
  if (ended_.exchange(true)) return;
  milliseconds_ = std::chrono::duration<float, std::milli>(Clock::now() - begun_).count();
  // Before the future: a callback must find the work completed.
  finish(std::move(error));
  {
    const std::lock_guard lock(mutex_);
    if (!claim_settling()) return;
  }
  auto self = c10::intrusive_ptr<HostWork>::reclaim_copy(this);
  Callbacks::shared().run([self = std::move(self)]() mutable {
    const at::ThreadLocalStateGuard guard(self->caller_state_);
    self->settle_future();
    self.reset();
  });
}

bool HostWork::claim_settling() {
  if (!future_ || !completed_ || settled_) return false;
  settled_ = true;
  return true;
}

void HostWork::settle_future() {
  if (exception_)
    future_->setError(exception_);
  else
    future_->markCompleted(c10::IValue(outputs_));
}

std::vector<at::Tensor> HostWork::result() {
  TORCH_CHECK(isCompleted(), "qcoll: the work has not completed; wait() before result()");
  return outputs_;
}

bool HostWork::wait(std::chrono::milliseconds timeout) {
  const StayAtExit stay;
  std::unique_lock lock(mutex_);
  while (timeout == kNoTimeout && !cv_.wait_for(lock, kProbeEvery, [&] { return completed_; })) {
    if (!stall_probe_) continue;
    lock.unlock();
    stall_probe_();
    lock.lock();
  }
  if (timeout != kNoTimeout && !cv_.wait_for(lock, timeout, [&] { return completed_; }))
    throw TransportError("qcoll: wait() timed out after " + std::to_string(timeout.count()) +
                         " ms; operation #" + std::to_string(sequence_) + " is still running");
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> HostWork::getFuture() {
  bool settle = false;
  {
    const std::lock_guard lock(mutex_);
    if (!future_) {
      future_ = make_future();
      settle = claim_settling();
    }
  }
  if (settle) settle_future();  // nobody has a callback on it yet
  return future_;
}

JoinedWork::JoinedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool JoinedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& w) { return w->isCompleted(); });
}

bool JoinedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& w) { return w->isSuccess(); });
}

std::exception_ptr JoinedWork::exception() const {
  for (const auto& work : works_)
    if (auto error = work->exception()) return error;
  return nullptr;
}

std::vector<at::Tensor> JoinedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_)
    for (auto& tensor : work->result()) all.push_back(std::move(tensor));
  return all;
}

bool JoinedWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  return true;
}

// The tensors of all works, in order.
c10::intrusive_ptr<c10::ivalue::Future> JoinedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures)->then(
      [](c10::ivalue::Future& all) {
        std::vector<at::Tensor> tensors;
        for (const c10::IValue& one : all.value().toListRef())
          for (at::Tensor& tensor : one.toFuture()->value().toTensorVector())
            tensors.push_back(std::move(tensor));
        return c10::IValue(std::move(tensors));
      },
      c10::ListType::create(c10::TensorType::get()));
}

}  // namespace qcoll::torch_binding
