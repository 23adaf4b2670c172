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
  if (list[rank_].numel() != input.numel())
    throw UsageError("qcoll all_gather: output " + std::to_string(rank_) +
                     " must have the elements of this rank's input, got " + text_of(list[rank_]) +
                     " and " + text_of(input));
  Tensors dense;
  std::size_t bytes = 0;
  for (const at::Tensor& output : list) {
    require_distinct_elements(output, call.verb);
    dense.push_back(dense_like(output));
    bytes += bytes_of(output);
  }
  const at::Tensor source = input.contiguous();
  // Every rank sees the same sizes, so that all choose the same way.
  const bool equal = all_have_size_of(list, input);
  auto step =
      make_step(call, input, bytes,
                equal ? std::to_string(input.numel()) + " elements per rank" : "sizes by rank",
                [this, list, dense, source, equal](const comm::Call& c) {
                  std::vector<std::byte*> slices;
                  std::vector<std::size_t> counts;
                  for (const at::Tensor& t : dense) {
                    slices.push_back(output_data(t));
                    counts.push_back(count_of(t));
                  }
                  if (equal)
                    group_->communicator().all_gather(c, input_data(source), slices, counts[0]);
                  else  // each sends its own to everybody
                    group_->communicator().all_to_all(
                        c, std::vector<const std::byte*>(size_, input_data(source)),
                        std::vector<std::size_t>(size_, count_of(source)), slices, counts);
                  copy_back(dense, list);
                });
  return run_native(call, inputs, list, {std::move(step)});
}

}  // namespace qcoll::torch_binding
