// The handle of one call on CPU tensors.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "qcoll/base/deadline.h"

namespace qcoll::torch_binding {

class HostWork final : public c10d::Work {
 public:
  // `title` names the call in profiles; it must stay valid.
  HostWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
           std::vector<at::Tensor> outputs, std::chrono::milliseconds timeout);

  // Ends the work; later calls do nothing. Callbacks of the future run on their own threads.
  void complete(std::exception_ptr error);

  void set_sequence(std::uint64_t sequence) { sequence_ = sequence; }
  // Called about once a second while a thread waits.
  void set_stall_probe(std::function<void()> probe) { stall_probe_ = std::move(probe); }
  const at::ThreadLocalState& caller_state() const { return caller_state_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  std::vector<at::Tensor> result() override;
  // kNoTimeout waits for the call's own end (its own timeout included). A shorter wait that
  // expires throws and leaves the call running.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override { return milliseconds_; }
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  bool claim_settling();  // true once: for who must settle the future; mutex_ held
  void settle_future();

  std::vector<at::Tensor> outputs_;
  const std::chrono::milliseconds timeout_;
  const at::ThreadLocalState caller_state_;
  const Clock::time_point begun_ = Clock::now();
  std::function<void()> stall_probe_;
  std::atomic<bool> ended_{false};
  std::uint64_t sequence_ = 0;
  float milliseconds_ = 0;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made on demand
  bool settled_ = false;
};

// Several works as one: done when all are, fails with the first failure.
class JoinedWork final : public c10d::Work {
 public:
  JoinedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace qcoll::torch_binding
