// The delegate's verbs in groups that have none, because a delegate cannot encrypt: made of the
// engine's exact all-to-all and all-gather. They carry parameters once and small values often, so
// they are plain: the root sends to every rank itself, and a reduction gathers all that it reduces.
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "backend_native.h"
#include "qcoll/base/error.h"
#include "tensor_args.h"

namespace qcoll::torch_binding {
namespace {

const comm::CodecList kExact = {wire::kExactCodec};

// One tensor for each rank, none of which holds anything.
Tensors nothing(int ranks, const at::Tensor& like) {
  return Tensors(static_cast<std::size_t>(ranks), at::empty({0}, like.options()));
}

void require_root(std::int64_t root, int ranks, const char* verb) {
  if (root < 0 || root >= ranks)
    throw UsageError("qcoll " + std::string(verb) + ": rank " + std::to_string(root) +
                     " is not in 0.." + std::to_string(ranks - 1));
}

const Tensors& list_of_root(const std::vector<Tensors>& lists, int ranks, const at::Tensor& own,
                            const char* verb) {
  if (lists.size() != 1)
    throw UsageError("qcoll " + std::string(verb) + ": expected one list of tensors on the root, " +
                     "got " + std::to_string(lists.size()));
  require_list_of(lists[0], ranks, own, verb);
  return lists[0];
}

// One operand of a reduction after the other, in rank order.
using Fold = at::Tensor (*)(const at::Tensor& so_far, const at::Tensor& next);

Fold fold_of(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  switch (op.op_) {
    case c10d::ReduceOp::AVG:
      if (!tensor.is_floating_point() && !tensor.is_complex()) break;
      [[fallthrough]];
    case c10d::ReduceOp::SUM:
      return [](const at::Tensor& a, const at::Tensor& b) { return a + b; };
    case c10d::ReduceOp::PRODUCT:
      return [](const at::Tensor& a, const at::Tensor& b) { return a * b; };
    case c10d::ReduceOp::MIN:
      return [](const at::Tensor& a, const at::Tensor& b) { return at::minimum(a, b); };
    case c10d::ReduceOp::MAX:
      return [](const at::Tensor& a, const at::Tensor& b) { return at::maximum(a, b); };
    case c10d::ReduceOp::BAND:
      return [](const at::Tensor& a, const at::Tensor& b) { return at::bitwise_and(a, b); };
    case c10d::ReduceOp::BOR:
      return [](const at::Tensor& a, const at::Tensor& b) { return at::bitwise_or(a, b); };
    case c10d::ReduceOp::BXOR:
      return [](const at::Tensor& a, const at::Tensor& b) { return at::bitwise_xor(a, b); };
    default:
      break;
  }
  throw UsageError("qcoll all_reduce: a group without a delegate has no " + text_of(op) + " of " +
                   text_of(tensor));
}

}  // namespace

Pointer<c10d::Work> Backend::broadcast_natively(const at::Tensor& tensor,
                                                const c10d::BroadcastOptions& opts) {
  const NativeCall call{.verb = "broadcast",
                        .title = "qcoll:broadcast",
                        .type = c10d::OpType::BROADCAST,
                        .collective = wire::Collective::kAllToAll,
                        .codec = kExact,
                        .timeout = opts.timeout,
                        .async_op = opts.asyncOp};
  require_root(opts.rootRank, size_, call.verb);
  Tensors inputs = nothing(size_, tensor);
  Tensors outputs = nothing(size_, tensor);
  if (rank_ == opts.rootRank) {
    for (Rank peer = 0; peer < size_; ++peer)
      if (peer != rank_) inputs[peer] = tensor;
  } else {
    outputs[opts.rootRank] = tensor;
  }
  return run_native(call, {tensor}, {tensor},
                    {exchange_step(call, tensor, bytes_of(tensor), inputs, outputs)});
}

Pointer<c10d::Work> Backend::gather_natively(const at::Tensor& input,
                                             const std::vector<Tensors>& lists,
                                             const c10d::GatherOptions& opts) {
  const NativeCall call{.verb = "gather",
                        .title = "qcoll:gather",
                        .type = c10d::OpType::GATHER,
                        .collective = wire::Collective::kAllToAll,
                        .codec = kExact,
                        .timeout = opts.timeout,
                        .async_op = opts.asyncOp};
  require_root(opts.rootRank, size_, call.verb);
  Tensors inputs = nothing(size_, input);
  inputs[opts.rootRank] = input;
  const Tensors outputs =
      rank_ == opts.rootRank ? list_of_root(lists, size_, input, call.verb) : nothing(size_, input);
  return run_native(call, {input}, outputs,
                    {exchange_step(call, input, bytes_of(input), inputs, outputs)});
}

Pointer<c10d::Work> Backend::scatter_natively(const at::Tensor& output,
                                              const std::vector<Tensors>& lists,
                                              const c10d::ScatterOptions& opts) {
  const NativeCall call{.verb = "scatter",
                        .title = "qcoll:scatter",
                        .type = c10d::OpType::SCATTER,
                        .collective = wire::Collective::kAllToAll,
                        .codec = kExact,
                        .timeout = opts.timeout,
                        .async_op = opts.asyncOp};
  require_root(opts.rootRank, size_, call.verb);
  const Tensors inputs = rank_ == opts.rootRank ? list_of_root(lists, size_, output, call.verb)
                                                : nothing(size_, output);
  Tensors outputs = nothing(size_, output);
  outputs[opts.rootRank] = output;
  return run_native(call, inputs, {output},
                    {exchange_step(call, output, bytes_of(output), inputs, outputs)});
}

Pointer<c10d::Work> Backend::reduce_natively(const at::Tensor& tensor,
                                             const c10d::ReduceOptions& opts) {
  require_root(opts.rootRank, size_, "reduce");
  return reduce_all({.verb = "reduce",
                     .title = "qcoll:reduce",
                     .type = c10d::OpType::REDUCE,
                     .collective = wire::Collective::kAllReduce,
                     .codec = kExact,
                     .timeout = opts.timeout,
                     .async_op = opts.asyncOp},
                    rank_ == opts.rootRank ? tensor : tensor.clone(), opts.reduceOp);
}

Pointer<c10d::Work> Backend::reduce_gathered(NativeCall call, const at::Tensor& tensor,
                                             const c10d::ReduceOp& op) {
  require_cpu(tensor, call.verb);
  require_distinct_elements(tensor, call.verb);
  call.collective = wire::Collective::kAllGather;
  call.codec = kExact;
  const Fold fold = fold_of(op, tensor);
  const bool mean = op == c10d::ReduceOp::AVG;
  auto step = make_step(call, tensor, bytes_of(tensor), text_of(op) + ", " + size_text_of(tensor),
                        [this, tensor, fold, mean](const comm::Call& c) {
                          const at::Tensor own = tensor.contiguous();
                          const at::Tensor all = at::empty({size_, own.numel()}, own.options());
                          group_->communicator().all_gather(
                              c, input_data(own), output_slices(all, size_), count_of(own));
                          at::Tensor result = all[0];
                          for (int r = 1; r < size_; ++r) result = fold(result, all[r]);
                          if (mean) result = result / size_;
                          copy_back({result.view(tensor.sizes())}, {tensor});
                        });
  return run_native(call, {tensor}, {tensor}, {std::move(step)});
}

Pointer<c10d::Work> Backend::barrier_natively(const c10d::BarrierOptions& opts) {
  const at::Tensor mine = at::zeros({1}, at::kByte);
  return gather_into({.verb = "barrier",
                      .title = "qcoll:barrier",
                      .type = c10d::OpType::BARRIER,
                      .collective = wire::Collective::kAllGather,
                      .codec = kExact,
                      .timeout = opts.timeout,
                      .async_op = opts.asyncOp},
                     at::empty({size_}, at::kByte), mine);
}

}  // namespace qcoll::torch_binding
