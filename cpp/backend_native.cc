// How a verb runs on qcoll's engine: its policy is resolved here, on the calling thread, and the
// schedules are queued with it.
#include "backend_native.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "interpreter_exit.h"
#include "qcoll/base/error.h"
#include "tensor_args.h"
#include "thread_policy.h"

namespace qcoll::torch_binding {

std::optional<comm::CodecList> parse_codec(const Backend::Codec& codec) {
  if (!codec) return std::nullopt;
  return comm::parse_codec_list("codec", *codec);
}

at::Tensor dense_like(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : at::empty(tensor.sizes(), tensor.options());
}

void copy_back(const Tensors& dense, const Tensors& outputs) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < dense.size(); ++i)
    if (!dense[i].is_same(outputs[i])) at::Tensor(outputs[i]).copy_(dense[i]);
}

bool all_have_size_of(const Tensors& tensors, const at::Tensor& one) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& t) { return t.numel() == one.numel(); });
}

void require_list_of(const Tensors& tensors, int ranks, const at::Tensor& other, const char* verb) {
  if (tensors.size() != static_cast<std::size_t>(ranks))
    throw UsageError("qcoll " + std::string(verb) + ": expected a list of " +
                     std::to_string(ranks) + " tensors, one for each rank, got " +
                     std::to_string(tensors.size()));
  for (const at::Tensor& tensor : tensors) {
    require_cpu(tensor, verb);
    require_same_dtype(tensor, other, verb);
  }
}

Backend::Step Backend::make_step(const NativeCall& call, const at::Tensor& tensor,
                                 std::size_t bytes, const std::string& what,
                                 std::function<void(const comm::Call&)> run) const {
  const DType dtype = dtype_of(tensor);
  comm::Choice choice = comm::choose(group_->options(), thread_policy(), call.codec,
                                     {.collective = call.collective,
                                      .dtype = dtype,
                                      .bytes = bytes,
                                      .coalesced = call.coalesced,
                                      .list_form = call.list_form,
                                      .spans_nodes = group_->topology().spans_nodes(),
                                      .costs = group_->costs()});
  group_->communicator().check(call.collective, dtype, choice);
  const std::string text = what + " of " + c10::toString(tensor.scalar_type()) + ", codec " +
                           comm::to_string(choice.codecs);
  return {text, call.verb, dtype, std::move(choice), std::move(run)};
}

Pointer<c10d::Work> Backend::run_native(const NativeCall& call, const Tensors& inputs,
                                        const Tensors& outputs, std::vector<Step> steps) {
  const StayAtExit stay;
  const auto timeout = timeout_of(call.timeout);
  auto work = c10::make_intrusive<HostWork>(rank_, call.type, call.title, inputs, outputs, timeout);
  std::string text = std::string(call.verb) + "(";
  for (std::size_t i = 0; i < std::min<std::size_t>(steps.size(), 4); ++i)
    text += (i ? "; " : "") + steps[i].text;
  text += steps.size() > 4 ? "; ... " + std::to_string(steps.size()) + " tensors)" : ")";

  const bool synchronous = !call.async_op;
  auto body = [this, work, timeout, synchronous, steps = std::move(steps)](std::uint64_t sequence) {
    std::optional<at::ThreadLocalStateGuard> guard;
    if (!synchronous) guard.emplace(work->caller_state());
    for (const Step& step : steps)
      step.run({.verb = step.verb,
                .sequence = sequence,
                .dtype = step.dtype,
                .choice = step.choice,
                .timeout = timeout});
  };
  work->set_sequence(
      group_->enqueue(text, synchronous, std::move(body),
                      [work](std::exception_ptr error) { work->complete(std::move(error)); }));
  if (synchronous) work->wait(kNoTimeout);
  return track(work);
}

// Ranks that do not come are its normal result: the group lives on, unlike after gloo's own. The
// text is gloo's, which programs look for.
void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const StayAtExit stay;
  group_->check_usable();
  const auto timeout = timeout_of(opts.timeout);
  std::vector<Rank> absent;
  const auto since = Clock::now();
  try {
    absent = group_->mesh().links().monitored_barrier(Deadline(timeout));
  } catch (const TransportError& cause) {
    throw group_->in_context("monitored_barrier()", cause, since);
  }
  if (absent.empty()) return;
  if (!wait_all_ranks) absent = {absent.front()};
  std::string text =
      "[Rank " + std::to_string(rank_) + "]: Rank" + (absent.size() > 1 ? "s " : " ");
  for (std::size_t i = 0; i < absent.size(); ++i)
    text += (i ? ", " : "") + std::to_string(absent[i]);
  throw std::runtime_error(text + " failed to pass monitoredBarrier in " +
                           std::to_string(timeout.count()) +
                           " ms: Rank 0 timed out in monitoredBarrier");
}

}  // namespace qcoll::torch_binding
