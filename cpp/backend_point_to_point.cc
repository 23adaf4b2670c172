// Send and receive. They run on the delegate, are no collectives, and take no sequence numbers
// of the group's.
#include <atomic>
#include <utility>

#include "backend.h"
#include "interpreter_exit.h"
#include "qcoll/base/error.h"
#include "tensor_args.h"

namespace qcoll::torch_binding {
namespace {

// The delegate's work, with the group's failures: a wait ends when the group is aborted, and an
// error of the delegate's transport ends the group. There is no thread behind it: a work of gloo
// advances by itself, and completes in wait().
class PointToPointWork final : public c10d::Work {
 public:
  PointToPointWork(int rank, c10d::OpType type, std::string call, int peer,
                   Pointer<c10d::Work> inner, std::shared_ptr<comm::Group> group,
                   std::chrono::milliseconds timeout)
      : Work(rank, type),
        call_(std::move(call)),
        peer_(peer),
        inner_(std::move(inner)),
        group_(std::move(group)),
        timeout_(timeout) {
    std::optional<transport::OperationLog::Conflict> none;
    number_ = group_->messages().add(call_, &none);
    group_->messages().started(number_);
  }
  ~PointToPointWork() override {
    // Nobody waited for it: it is known to be over, or counts as running.
    if (!recorded_ && inner_->isCompleted()) record(inner_->isSuccess());
  }

  bool isCompleted() override { return failed() || inner_->isCompleted(); }
  bool isSuccess() const override { return !failed() && inner_->isSuccess(); }
  std::exception_ptr exception() const override {
    const std::lock_guard lock(error_mutex_);
    return error_ ? error_ : inner_->exception();
  }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { inner_->abort(); }
  std::uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
  Pointer<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }

  bool wait(std::chrono::milliseconds timeout) override {
    const StayAtExit stay;
    // What has arrived before the failure is still good.
    if (!inner_->isCompleted() && group_->abort_flag().raised()) fail(group_->abort_flag().cause());
    const std::uint64_t subscription =
        group_->abort_flag().subscribe([this](const TransportError&) { inner_->abort(); });
    bool done = false;
    std::optional<TransportError> failure;
    try {
      done = inner_->wait(timeout == kNoTimeout ? timeout_ : timeout);
    } catch (const c10::Error&) {
      group_->abort_flag().unsubscribe(subscription);
      throw;  // of the caller
    } catch (const std::exception& e) {
      failure = group_->fail_delegated(e.what(), peer_);
    }
    group_->abort_flag().unsubscribe(subscription);
    if (failure) fail(*failure);
    if (!done && group_->abort_flag().raised()) fail(group_->abort_flag().cause());
    if (done) record(true);
    return done;
  }

 private:
  bool failed() const {
    const std::lock_guard lock(error_mutex_);
    return error_ != nullptr;
  }
  void record(bool well) {
    if (!recorded_.exchange(true)) group_->messages().ended(number_, well);
  }
  [[noreturn]] void fail(const TransportError& cause) {
    record(false);
    const TransportError error = group_->in_context(call_, cause, begun_);
    {
      const std::lock_guard lock(error_mutex_);
      error_ = std::make_exception_ptr(error);
    }
    throw error;
  }

  const std::string call_;
  const int peer_;
  const Pointer<c10d::Work> inner_;
  const std::shared_ptr<comm::Group> group_;
  const std::chrono::milliseconds timeout_;  // gloo's own is that of its connecting
  const Clock::time_point begun_ = Clock::now();
  std::uint64_t number_ = 0;  // in the flight record
  std::atomic<bool> recorded_{false};
  mutable std::mutex error_mutex_;
  std::exception_ptr error_;
};

}  // namespace

Pointer<c10d::Work> Backend::point_to_point(const char* verb, c10d::OpType type,
                                            const Tensors& tensors, int peer,
                                            const Delegated& call) {
  group_->check_usable();
  const std::string text = std::string(verb) + "(" + text_of(single(tensors, verb)) +
                           (type == c10d::OpType::SEND ? " to " : " from ") +
                           (peer < 0 ? "any rank" : "rank " + std::to_string(peer)) + ")";
  Pointer<c10d::Work> inner;
  const auto since = Clock::now();
  try {
    inner = call(delegate_or_throw(verb));
  } catch (const c10::Error&) {
    throw;  // of the caller, as are logic errors
  } catch (const std::logic_error&) {
    throw;
  } catch (const std::exception& e) {
    throw group_->in_context(text, group_->fail_delegated(e.what(), peer), since);
  }
  return track(c10::make_intrusive<PointToPointWork>(rank_, type, text, peer, std::move(inner),
                                                     group_, options_->timeout));
}

Pointer<c10d::Work> Backend::send(Tensors& tensors, int to, int tag) {
  return point_to_point("send", c10d::OpType::SEND, tensors, to,
                        [&](c10d::Backend& gloo) { return gloo.send(tensors, to, tag); });
}

Pointer<c10d::Work> Backend::recv(Tensors& tensors, int from, int tag) {
  return point_to_point("recv", c10d::OpType::RECV, tensors, from,
                        [&](c10d::Backend& gloo) { return gloo.recv(tensors, from, tag); });
}

Pointer<c10d::Work> Backend::recvAnysource(Tensors& tensors, int tag) {
  return point_to_point("recv", c10d::OpType::RECVANYSOURCE, tensors, -1,
                        [&](c10d::Backend& gloo) { return gloo.recvAnysource(tensors, tag); });
}

}  // namespace qcoll::torch_binding
