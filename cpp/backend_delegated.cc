// The verbs that qcoll does not change: they keep the delegate's behaviour, and gain qcoll's
// sequence numbers and errors. A delegated call ends when the delegate's does or when the group is
// aborted, whichever comes first; the delegate's own abort wakes nobody.
#include <utility>

#include "backend.h"
#include "callbacks.h"
#include "interpreter_exit.h"
#include "qcoll/base/error.h"
#include "tensor_args.h"

namespace qcoll::torch_binding {
namespace {

// An error of the caller (a dtype that the delegate cannot average) stays what it is, and the group
// lives. Anything else comes from the delegate's transport, and ends the group.
std::exception_ptr blame(comm::Group& group, std::uint64_t sequence, Clock::time_point since,
                         const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    return error;
  } catch (const std::logic_error&) {
    return error;
  } catch (const std::exception& e) {
    const TransportError cause = group.fail_delegated(e.what());
    return std::make_exception_ptr(group.in_context(sequence, cause, since));
  }
}

std::exception_ptr error_of(c10d::Work& work) {
  try {
    work.wait();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

Pointer<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

}  // namespace

c10d::Backend& Backend::delegate_or_throw(const char* verb) const {
  if (!delegate_ && !may_delegate())
    throw UsageError("qcoll " + std::string(verb) +
                     ": this call needs the delegate backend, which does not encrypt, and with "
                     "QCOLL_ENCRYPT=1 nothing passes in the clear; QCOLL_ENCRYPT=native lets what "
                     "goes through the delegate do so");
  if (!delegate_)
    throw UsageError("qcoll " + std::string(verb) +
                     ": this communicator was made without a delegate backend, which this verb "
                     "needs; use a torch.distributed process group");
  return *delegate_;
}

Pointer<c10d::Work> Backend::delegate(const char* verb, c10d::OpType type, const std::string& text,
                                      const Tensors& inputs, Tensors outputs,
                                      std::chrono::milliseconds timeout, bool async_op,
                                      const Delegated& call) {
  const StayAtExit stay;
  c10d::Backend& backend = delegate_or_throw(verb);
  const std::uint64_t sequence =
      group_->begin_delegated(std::string(verb) + "(" + text + ") on the delegate");
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : inputs)
    if (!tensor.is_sparse()) bytes += bytes_of(tensor);
  comm::CollectiveStats stats{.calls = 1, .payload_bytes = bytes};
  stats.exact_calls["delegated to " + backend.getBackendName()] = 1;
  group_->stats().add(verb, stats);

  // No title: the delegate's own work is in the profile already.
  auto work = c10::make_intrusive<HostWork>(rank_, type, nullptr, inputs, std::move(outputs),
                                            timeout_of(timeout));
  work->set_sequence(sequence);
  // While somebody waits, find out about ranks that made another call, which the delegate cannot.
  work->set_stall_probe([group = group_] { group->probe(); });
  const auto since = Clock::now();
  Pointer<c10d::Work> inner;
  try {
    inner = call(backend);
  } catch (...) {
    group_->end_delegated(sequence, false);
    throw;
  }
  const std::uint64_t subscription = group_->abort_flag().subscribe(
      [work, sequence, since, group = group_.get()](const TransportError& cause) {
        work->complete(std::make_exception_ptr(group->in_context(sequence, cause, since)));
      });
  const auto end = [work, sequence, since, subscription, group = group_](std::exception_ptr error) {
    stay_if_interpreter_ended();  // a thread of the delegate that woke late
    work->complete(error ? blame(*group, sequence, since, error) : nullptr);
    group->end_delegated(sequence, error == nullptr);
    group->abort_flag().unsubscribe(subscription);
  };
  if (const auto future = future_of(*inner))
    future->addCallback([end](c10::ivalue::Future& done) {
      end(done.hasError() ? done.exception_ptr() : nullptr);
    });
  else  // some of gloo's works are composed of others and have no future: a thread waits for them
    Callbacks::shared().run_unawaited([end, inner] { end(error_of(*inner)); });
  if (!async_op) work->wait(kNoTimeout);
  return track(work);
}

Pointer<c10d::Work> Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = single(tensors, "broadcast");
  require_cpu(tensor, "broadcast");
  if (!delegate_) return broadcast_natively(tensor, opts);
  return delegate("broadcast", c10d::OpType::BROADCAST,
                  size_text_of(tensor) + " from rank " + std::to_string(opts.rootRank), tensors,
                  tensors, opts.timeout, opts.asyncOp,
                  [&](c10d::Backend& gloo) { return gloo.broadcast(tensors, opts); });
}

Pointer<c10d::Work> Backend::allreduce_sparse(Tensors& tensors,
                                              const c10d::AllreduceOptions& opts) {
  return delegate("all_reduce", c10d::OpType::_ALLREDUCE_SPARSE, "sparse tensor", tensors, tensors,
                  opts.timeout, opts.asyncOp,
                  [&](c10d::Backend& gloo) { return gloo.allreduce_sparse(tensors, opts); });
}

Pointer<c10d::Work> Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = single(tensors, "reduce");
  require_cpu(tensor, "reduce");
  if (!delegate_) return reduce_natively(tensor, opts);
  return delegate("reduce", c10d::OpType::REDUCE,
                  text_of(opts.reduceOp) + ", " + size_text_of(tensor) + " to rank " +
                      std::to_string(opts.rootRank),
                  tensors, tensors, opts.timeout, opts.asyncOp,
                  [&](c10d::Backend& gloo) { return gloo.reduce(tensors, opts); });
}

Pointer<c10d::Work> Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  Tensors flat;
  for (const Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  return delegate("all_gather_coalesced", c10d::OpType::ALLGATHER_COALESCED,
                  std::to_string(inputs.size()) + " tensors", inputs, std::move(flat), opts.timeout,
                  opts.asyncOp, [&](c10d::Backend& gloo) {
                    return gloo.allgather_coalesced(outputs, inputs, opts);
                  });
}

Pointer<c10d::Work> Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::GatherOptions& opts) {
  const at::Tensor& input = single(inputs, "gather");
  require_cpu(input, "gather");
  if (!delegate_) return gather_natively(input, outputs, opts);
  return delegate("gather", c10d::OpType::GATHER,
                  size_text_of(input) + " to rank " + std::to_string(opts.rootRank), inputs,
                  outputs.empty() ? Tensors{} : outputs[0], opts.timeout, opts.asyncOp,
                  [&](c10d::Backend& gloo) { return gloo.gather(outputs, inputs, opts); });
}

Pointer<c10d::Work> Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& opts) {
  const at::Tensor& output = single(outputs, "scatter");
  require_cpu(output, "scatter");
  if (!delegate_) return scatter_natively(output, inputs, opts);
  return delegate("scatter", c10d::OpType::SCATTER,
                  size_text_of(output) + " from rank " + std::to_string(opts.rootRank),
                  inputs.empty() ? Tensors{} : inputs[0], outputs, opts.timeout, opts.asyncOp,
                  [&](c10d::Backend& gloo) { return gloo.scatter(outputs, inputs, opts); });
}

Pointer<c10d::Work> Backend::barrier(const c10d::BarrierOptions& opts) {
  if (!delegate_) return barrier_natively(opts);
  return delegate("barrier", c10d::OpType::BARRIER, "", {}, {}, opts.timeout, opts.asyncOp,
                  [&](c10d::Backend& gloo) { return gloo.barrier(opts); });
}

}  // namespace qcoll::torch_binding
