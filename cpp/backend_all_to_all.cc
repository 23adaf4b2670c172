// All-to-all, single tensors and lists, equal and unequal splits.
#include <algorithm>
#include <numeric>
#include <utility>

#include "backend_native.h"
#include "qcoll/base/error.h"
#include "tensor_args.h"

namespace qcoll::torch_binding {

namespace {

// Elements that each rank's part has, from torch's splits of dimension 0 (empty: equal parts).
std::vector<std::size_t> split_counts(const at::Tensor& tensor,
                                      const std::vector<std::int64_t>& splits, int ranks,
                                      const char* which) {
  const std::int64_t rows = tensor.dim() > 0 ? tensor.size(0) : tensor.numel();
  std::vector<std::int64_t> sizes = splits;
  if (splits.empty()) {
    if (rows % ranks != 0)
      throw UsageError("qcoll all_to_all_single: the " + std::string(which) + " " +
                       text_of(tensor) + " does not divide into " + std::to_string(ranks) +
                       " equal parts; pass " + which + "_split_sizes");
    sizes.assign(ranks, rows / ranks);
  }
  const bool negative =
      std::any_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size < 0; });
  if (negative || sizes.size() != static_cast<std::size_t>(ranks) ||
      std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}) != rows)
    throw UsageError("qcoll all_to_all_single: " + std::string(which) + "_split_sizes must be " +
                     std::to_string(ranks) + " numbers from 0 on that sum to " +
                     std::to_string(rows) + ", the first dimension of " + text_of(tensor));
  const std::size_t row = rows > 0 ? count_of(tensor) / rows : 0;
  std::vector<std::size_t> counts;
  for (const std::int64_t size : sizes) counts.push_back(size * row);
  return counts;
}

template <class Byte>
std::vector<Byte*> consecutive(Byte* data, const std::vector<std::size_t>& counts,
                               std::size_t element) {
  std::vector<Byte*> parts;
  for (const std::size_t count : counts) {
    parts.push_back(data);
    data += count * element;
  }
  return parts;
}

}  // namespace

Pointer<c10d::Work> Backend::exchange_all(NativeCall call, const at::Tensor& output,
                                          const at::Tensor& input,
                                          std::vector<std::int64_t> output_splits,
                                          std::vector<std::int64_t> input_splits) {
  require_cpu(output, call.verb);
  require_cpu(input, call.verb);
  require_same_dtype(output, input, call.verb);
  require_contiguous_output(output, call.verb);
  const at::Tensor source = input.contiguous();
  if (source.numel() > 0 && output.numel() > 0 &&
      input_data(source) < input_data(output) + bytes_of(output) &&
      input_data(output) < input_data(source) + bytes_of(source))
    throw UsageError("qcoll all_to_all_single: input and output must not share memory");
  auto to = split_counts(source, input_splits, size_, "input");
  auto from = split_counts(output, output_splits, size_, "output");
  auto step = make_step(
      call, input, bytes_of(input), "splits by rank",
      [this, source, output, to = std::move(to), from = std::move(from)](const comm::Call& c) {
        const std::size_t element = element_bytes(c.dtype);
        group_->communicator().all_to_all(c, consecutive(input_data(source), to, element), to,
                                          consecutive(output_data(output), from, element), from);
      });
  return run_native(call, {input}, {output}, {std::move(step)});
}

Pointer<c10d::Work> Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<std::int64_t>& output_splits,
                                           std::vector<std::int64_t>& input_splits,
                                           const c10d::AllToAllOptions& opts) {
  return exchange_all({.verb = "all_to_all_single",
                       .title = "qcoll:all_to_all",
                       .type = c10d::OpType::ALLTOALL_BASE,
                       .collective = wire::Collective::kAllToAll,
                       .timeout = opts.timeout,
                       .async_op = opts.asyncOp},
                      output, input, output_splits, input_splits);
}

Pointer<c10d::Work> Backend::all_to_all_with(at::Tensor output, at::Tensor input,
                                             std::vector<std::int64_t> output_splits,
                                             std::vector<std::int64_t> input_splits,
                                             const Codec& codec, bool async_op) {
  return exchange_all({.verb = "all_to_all_single",
                       .title = "qcoll:all_to_all",
                       .type = c10d::OpType::ALLTOALL_BASE,
                       .collective = wire::Collective::kAllToAll,
                       .codec = parse_codec(codec),
                       .async_op = async_op},
                      output, input, std::move(output_splits), std::move(input_splits));
}

// One input for each rank and one output of each, of any sizes.
Backend::Step Backend::exchange_step(const NativeCall& call, const at::Tensor& sample,
                                     std::size_t bytes, const Tensors& inputs,
                                     const Tensors& outputs) const {
  Tensors sources;
  Tensors dense;
  for (const at::Tensor& input : inputs) sources.push_back(input.contiguous());
  for (const at::Tensor& output : outputs) {
    require_distinct_elements(output, call.verb);
    dense.push_back(dense_like(output));
  }
  return make_step(call, sample, bytes, "splits by rank",
                   [this, sources, dense, outputs](const comm::Call& c) {
                     std::vector<const std::byte*> in;
                     std::vector<std::byte*> out;
                     std::vector<std::size_t> to;
                     std::vector<std::size_t> from;
                     for (const at::Tensor& t : sources) {
                       in.push_back(input_data(t));
                       to.push_back(count_of(t));
                     }
                     for (const at::Tensor& t : dense) {
                       out.push_back(output_data(t));
                       from.push_back(count_of(t));
                     }
                     group_->communicator().all_to_all(c, in, to, out, from);
                     copy_back(dense, outputs);
                   });
}

Pointer<c10d::Work> Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllToAllOptions& opts) {
  const NativeCall call{.verb = "all_to_all",
                        .title = "qcoll:all_to_all",
                        .type = c10d::OpType::ALLTOALL,
                        .collective = wire::Collective::kAllToAll,
                        .list_form = true,
                        .timeout = opts.timeout,
                        .async_op = opts.asyncOp};
  if (inputs.empty()) throw UsageError("qcoll all_to_all: the list of inputs is empty");
  require_list_of(inputs, size_, inputs[0], call.verb);
  require_list_of(outputs, size_, inputs[0], call.verb);
  std::size_t bytes = 0;
  for (const at::Tensor& input : inputs) bytes += bytes_of(input);
  return run_native(call, inputs, outputs,
                    {exchange_step(call, inputs[0], bytes, inputs, outputs)});
}

}  // namespace qcoll::torch_binding
