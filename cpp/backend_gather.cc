// All-gather in its four forms.
#include <utility>

#include "backend_native.h"
#include "qcoll/base/error.h"
#include "tensor_args.h"

namespace qcoll::torch_binding {

Backend::Step Backend::gather_step(const NativeCall& call, const at::Tensor& output,
                                   const at::Tensor& input) const {
  require_cpu(output, call.verb);
  require_cpu(input, call.verb);
  require_same_dtype(output, input, call.verb);
  require_contiguous_output(output, call.verb);
  require_ratio(output, "output", input, "input", size_, call.verb);
  const at::Tensor source = input.contiguous();
  require_own_slice_or_apart(output, source, rank_, call.verb);
  return make_step(call, output, bytes_of(output),
                   std::to_string(input.numel()) + " elements per rank",
                   [this, output, source](const comm::Call& c) {
                     group_->communicator().all_gather(
                         c, input_data(source), output_slices(output, size_), count_of(source));
                   });
}

Pointer<c10d::Work> Backend::gather_into(NativeCall call, const at::Tensor& output,
                                         const at::Tensor& input) {
  return run_native(call, {input}, {output}, {gather_step(call, output, input)});
}

Pointer<c10d::Work> Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& opts) {
  return gather_into({.verb = "all_gather_into_tensor",
                      .title = "qcoll:_all_gather_base",
                      .type = c10d::OpType::_ALLGATHER_BASE,
                      .collective = wire::Collective::kAllGather,
                      .timeout = opts.timeout,
                      .async_op = opts.asyncOp},
                     output, input);
}

Pointer<c10d::Work> Backend::all_gather_with(at::Tensor output, at::Tensor input,
                                             const Codec& codec, bool async_op) {
  return gather_into({.verb = "all_gather_into_tensor",
                      .title = "qcoll:_all_gather_base",
                      .type = c10d::OpType::_ALLGATHER_BASE,
                      .collective = wire::Collective::kAllGather,
                      .codec = parse_codec(codec),
                      .async_op = async_op},
                     output, input);
}

Pointer<c10d::Work> Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                             const c10d::AllgatherOptions& opts) {
  const NativeCall call{.verb = "all_gather_into_tensor_coalesced",
                        .title = "qcoll:all_gather_into_tensor_coalesced",
                        .type = c10d::OpType::COALESCED,
                        .collective = wire::Collective::kAllGather,
                        .coalesced = true,
                        .timeout = opts.timeout,
                        .async_op = opts.asyncOp};
  if (outputs.size() != inputs.size())
    throw UsageError("qcoll " + std::string(call.verb) + ": got " + std::to_string(outputs.size()) +
                     " outputs for " + std::to_string(inputs.size()) + " inputs");
  std::vector<Step> steps;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    steps.push_back(gather_step(call, outputs[i], inputs[i]));
  return run_native(call, inputs, outputs, std::move(steps));
}

// Lists whose tensors differ in size go to the delegate; every rank sees the same sizes.
Pointer<c10d::Work> Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& opts) {
  const NativeCall call{.verb = "all_gather",
                        .title = "qcoll:all_gather",
                        .type = c10d::OpType::ALLGATHER,
                        .collective = wire::Collective::kAllGather,
                        .list_form = true,
                        .timeout = opts.timeout,
                        .async_op = opts.asyncOp};
  const at::Tensor& input = single(inputs, call.verb);
  if (outputs.size() != 1)
    throw UsageError("qcoll all_gather: expected one list of outputs, got " +
                     std::to_string(outputs.size()));
  const Tensors& list = outputs[0];
  require_cpu(input, call.verb);
  require_list_of(list, size_, input, call.verb);
  if (!all_have_size_of(list, list[0]) || list[0].numel() != input.numel())
    return delegate(call.verb, call.type, "lists of unequal sizes", inputs, list, call.timeout,
                    call.async_op,
                    [&](c10d::Backend& gloo) { return gloo.allgather(outputs, inputs, opts); });
  Tensors dense;
  for (const at::Tensor& output : list) dense.push_back(dense_like(output));
  const at::Tensor source = input.contiguous();
  auto step = make_step(
      call, input, bytes_of(input) * size_, std::to_string(input.numel()) + " elements per rank",
      [this, list, dense, source](const comm::Call& c) {
        std::vector<std::byte*> slices;
        for (const at::Tensor& t : dense) slices.push_back(output_data(t));
        group_->communicator().all_gather(c, input_data(source), slices, count_of(source));
        copy_back(dense, list);
      });
  return run_native(call, inputs, list, {std::move(step)});
}

}  // namespace qcoll::torch_binding
