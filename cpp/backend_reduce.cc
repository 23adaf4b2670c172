// Reduce-scatter and all-reduce in their forms. Reductions that the engine does not compute go to
// the delegate.
#include <algorithm>
#include <utility>

#include "backend_native.h"
#include "qcoll/base/error.h"
#include "tensor_args.h"

namespace qcoll::torch_binding {

Backend::Step Backend::scatter_step(const NativeCall& call, comm::Reduction reduction,
                                    const at::Tensor& output, const at::Tensor& input) const {
  const at::Tensor source = input.contiguous();
  require_own_slice_or_apart(source, output, rank_, call.verb);
  return make_step(call, input, bytes_of(input),
                   std::string(wire::name_of(reduction.op)) + ", " +
                       std::to_string(output.numel()) + " elements per rank",
                   [this, reduction, output, source](const comm::Call& c) {
                     group_->communicator().reduce_scatter(c, reduction,
                                                           input_slices(source, size_),
                                                           output_data(output), count_of(output));
                   });
}

Backend::Step Backend::reduce_step(const NativeCall& call, comm::Reduction reduction,
                                   const at::Tensor& tensor) const {
  require_distinct_elements(tensor, call.verb);
  return make_step(call, tensor, bytes_of(tensor),
                   std::string(wire::name_of(reduction.op)) + ", " +
                       std::to_string(tensor.numel()) + " elements",
                   [this, reduction, tensor](const comm::Call& c) {
                     const at::Tensor dense = tensor.contiguous();
                     group_->communicator().all_reduce(c, reduction, output_data(dense),
                                                       count_of(dense));
                     copy_back({dense}, {tensor});
                   });
}

Pointer<c10d::Work> Backend::scatter_from(NativeCall call, const at::Tensor& given_output,
                                          const at::Tensor& given_input, const c10d::ReduceOp& op) {
  const at::Tensor output = summable_view(given_output, op);
  const at::Tensor input = summable_view(given_input, op);
  require_cpu(output, call.verb);
  require_cpu(input, call.verb);
  require_same_dtype(output, input, call.verb);
  require_contiguous_output(output, call.verb);
  require_ratio(input, "input", output, "output", size_, call.verb);
  const auto reduction = native_reduction(op, dtype_of(input));
  if (reduction)
    return run_native(call, {input}, {output}, {scatter_step(call, *reduction, output, input)});
  if (call.codec)
    throw UsageError(
        "qcoll.reduce_scatter_tensor: a codec needs float32, bfloat16 or float16 and "
        "sum, avg or premul_sum, got " +
        text_of(input) + " and " + text_of(op));
  at::Tensor out = output;
  at::Tensor in = input;
  c10d::ReduceScatterOptions opts;
  opts.reduceOp = op;
  opts.timeout = timeout_of(call.timeout);
  return delegate(call.verb, call.type, text_of(op) + ", " + size_text_of(output), {input},
                  {output}, call.timeout, call.async_op,
                  [&](c10d::Backend& gloo) { return gloo._reduce_scatter_base(out, in, opts); });
}

Pointer<c10d::Work> Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& opts) {
  return scatter_from({.verb = "reduce_scatter_tensor",
                       .title = "qcoll:_reduce_scatter_base",
                       .type = c10d::OpType::_REDUCE_SCATTER_BASE,
                       .collective = wire::Collective::kReduceScatter,
                       .timeout = opts.timeout,
                       .async_op = opts.asyncOp},
                      output, input, opts.reduceOp);
}

Pointer<c10d::Work> Backend::reduce_scatter_with(at::Tensor output, at::Tensor input,
                                                 const c10d::ReduceOp& op, const Codec& codec,
                                                 bool async_op) {
  return scatter_from({.verb = "reduce_scatter_tensor",
                       .title = "qcoll:_reduce_scatter_base",
                       .type = c10d::OpType::_REDUCE_SCATTER_BASE,
                       .collective = wire::Collective::kReduceScatter,
                       .codec = parse_codec(codec),
                       .async_op = async_op},
                      output, input, op);
}

Pointer<c10d::Work> Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  const NativeCall call{.verb = "reduce_scatter_tensor_coalesced",
                        .title = "qcoll:reduce_scatter_tensor_coalesced",
                        .type = c10d::OpType::COALESCED,
                        .collective = wire::Collective::kReduceScatter,
                        .coalesced = true,
                        .timeout = opts.timeout,
                        .async_op = opts.asyncOp};
  if (outputs.size() != inputs.size())
    throw UsageError("qcoll " + std::string(call.verb) + ": got " + std::to_string(outputs.size()) +
                     " outputs for " + std::to_string(inputs.size()) + " inputs");
  std::vector<Step> steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_cpu(outputs[i], call.verb);
    require_cpu(inputs[i], call.verb);
    require_same_dtype(outputs[i], inputs[i], call.verb);
    require_contiguous_output(outputs[i], call.verb);
    require_ratio(inputs[i], "input", outputs[i], "output", size_, call.verb);
    const auto reduction = native_reduction(opts.reduceOp, dtype_of(inputs[i]));
    if (!reduction)
      return delegate(call.verb, call.type,
                      text_of(opts.reduceOp) + ", " + std::to_string(inputs.size()) + " tensors",
                      inputs, outputs, call.timeout, call.async_op, [&](c10d::Backend& gloo) {
                        return gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts);
                      });
    steps.push_back(scatter_step(call, *reduction, outputs[i], inputs[i]));
  }
  return run_native(call, inputs, outputs, std::move(steps));
}

Pointer<c10d::Work> Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& opts) {
  const NativeCall call{.verb = "reduce_scatter",
                        .title = "qcoll:reduce_scatter",
                        .type = c10d::OpType::REDUCE_SCATTER,
                        .collective = wire::Collective::kReduceScatter,
                        .list_form = true,
                        .timeout = opts.timeout,
                        .async_op = opts.asyncOp};
  const at::Tensor& output = single(outputs, call.verb);
  if (inputs.size() != 1)
    throw UsageError("qcoll reduce_scatter: expected one list of inputs, got " +
                     std::to_string(inputs.size()));
  const Tensors& list = inputs[0];
  require_cpu(output, call.verb);
  require_distinct_elements(output, call.verb);
  require_list_of(list, size_, output, call.verb);
  const auto reduction = native_reduction(opts.reduceOp, dtype_of(output));
  const bool equal = all_have_size_of(list, output);
  if (!reduction || !equal)
    return delegate(
        call.verb, call.type,
        text_of(opts.reduceOp) + ", " + (equal ? size_text_of(output) : "sizes by rank"), list,
        outputs, call.timeout, call.async_op,
        [&](c10d::Backend& gloo) { return gloo.reduce_scatter(outputs, inputs, opts); });
  Tensors sources;
  for (const at::Tensor& input : list) sources.push_back(input.contiguous());
  const at::Tensor dense = dense_like(output);
  auto step = make_step(
      call, output, bytes_of(output) * size_,
      text_of(opts.reduceOp) + ", " + std::to_string(output.numel()) + " elements per rank",
      [this, reduction, sources, dense, output](const comm::Call& c) {
        std::vector<const std::byte*> slices;
        for (const at::Tensor& t : sources) slices.push_back(input_data(t));
        group_->communicator().reduce_scatter(c, *reduction, slices, output_data(dense),
                                              count_of(dense));
        copy_back({dense}, {output});
      });
  return run_native(call, list, outputs, {std::move(step)});
}

Pointer<c10d::Work> Backend::reduce_all(NativeCall call, const at::Tensor& given,
                                        const c10d::ReduceOp& op) {
  const at::Tensor tensor = given.is_sparse() ? given : summable_view(given, op);
  const auto reduction = tensor.is_sparse() ? std::nullopt : native_reduction(op, dtype_of(tensor));
  if (reduction) {
    require_cpu(tensor, call.verb);
    return run_native(call, {tensor}, {tensor}, {reduce_step(call, *reduction, tensor)});
  }
  const bool may_be_exact =
      !call.codec || std::all_of(call.codec->begin(), call.codec->end(),
                                 [](const wire::CodecSpec& codec) { return codec.exact(); });
  if (!delegate_ && may_be_exact && !tensor.is_sparse())
    return reduce_gathered(std::move(call), tensor, op);
  if (call.codec)
    throw UsageError(
        "qcoll.all_reduce: a codec needs float32, bfloat16 or float16 and sum, avg or "
        "premul_sum, got " +
        text_of(tensor) + " and " + text_of(op));
  Tensors tensors{tensor};
  c10d::AllreduceOptions opts;
  opts.reduceOp = op;
  opts.timeout = timeout_of(call.timeout);
  const std::string what =
      text_of(op) + ", " + (tensor.is_sparse() ? "sparse tensor" : size_text_of(tensor));
  return delegate(call.verb, call.type, what, tensors, tensors, call.timeout, call.async_op,
                  [&](c10d::Backend& gloo) { return gloo.allreduce(tensors, opts); });
}

Pointer<c10d::Work> Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return reduce_all({.verb = "all_reduce",
                     .title = "qcoll:all_reduce",
                     .type = c10d::OpType::ALLREDUCE,
                     .collective = wire::Collective::kAllReduce,
                     .timeout = opts.timeout,
                     .async_op = opts.asyncOp},
                    single(tensors, "all_reduce"), opts.reduceOp);
}

Pointer<c10d::Work> Backend::all_reduce_with(at::Tensor tensor, const c10d::ReduceOp& op,
                                             const Codec& codec, bool async_op) {
  return reduce_all({.verb = "all_reduce",
                     .title = "qcoll:all_reduce",
                     .type = c10d::OpType::ALLREDUCE,
                     .collective = wire::Collective::kAllReduce,
                     .codec = parse_codec(codec),
                     .async_op = async_op},
                    tensor, op);
}

Pointer<c10d::Work> Backend::allreduce_coalesced(Tensors& tensors,
                                                 const c10d::AllreduceCoalescedOptions& opts) {
  const NativeCall call{.verb = "all_reduce_coalesced",
                        .title = "qcoll:all_reduce",
                        .type = c10d::OpType::ALLREDUCE_COALESCED,
                        .collective = wire::Collective::kAllReduce,
                        .coalesced = true,
                        .timeout = opts.timeout,
                        .async_op = opts.asyncOp};
  std::vector<Step> steps;
  for (const at::Tensor& tensor : tensors) {
    require_cpu(tensor, call.verb);
    const auto reduction = native_reduction(opts.reduceOp, dtype_of(tensor));
    if (!reduction)
      return delegate(call.verb, call.type,
                      text_of(opts.reduceOp) + ", " + std::to_string(tensors.size()) + " tensors",
                      tensors, tensors, call.timeout, call.async_op,
                      [&](c10d::Backend& gloo) { return gloo.allreduce_coalesced(tensors, opts); });
    steps.push_back(reduce_step(call, *reduction, tensor));
  }
  return run_native(call, tensors, tensors, std::move(steps));
}

}  // namespace qcoll::torch_binding
