// From tensors to pointers and counts, with the checks that make them safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "qcoll/base/types.h"
#include "qcoll/comm/communicator.h"

namespace qcoll::torch_binding {

DType dtype_of(const at::Tensor& tensor);
// Elements as the engine counts them: types it does not know are counted in bytes.
std::size_t count_of(const at::Tensor& tensor);
std::size_t bytes_of(const at::Tensor& tensor);
std::string text_of(const at::Tensor& tensor);  // "Float[3, 4]", for the caller
// "12 elements of Float": what ranks must agree on. Shapes may differ.
std::string size_text_of(const at::Tensor& tensor);

// All throw UsageError naming the verb, the tensor and what was expected.
void require_cpu(const at::Tensor& tensor, const char* verb);
void require_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* verb);
void require_distinct_elements(const at::Tensor& output, const char* verb);
// Output memory must be dense and in order; an input may be copied instead.
void require_contiguous_output(const at::Tensor& tensor, const char* verb);
// gathered = `ranks` times part.
void require_ratio(const at::Tensor& gathered, const char* gathered_name, const at::Tensor& part,
                   const char* part_name, int ranks, const char* verb);
// `part` must be apart from `whole`, or be exactly slice `rank` of it (in place).
void require_own_slice_or_apart(const at::Tensor& whole, const at::Tensor& part, int rank,
                                const char* verb);
const at::Tensor& single(const std::vector<at::Tensor>& tensors, const char* verb);

const std::byte* input_data(const at::Tensor& tensor);
std::byte* output_data(const at::Tensor& tensor);
// Equal slices, by rank.
std::vector<const std::byte*> input_slices(const at::Tensor& tensor, int ranks);
std::vector<std::byte*> output_slices(const at::Tensor& tensor, int ranks);

// The reduction if the engine computes it: SUM, AVG and PREMUL_SUM of float32, bfloat16, float16.
std::optional<comm::Reduction> native_reduction(const c10d::ReduceOp& op, DType dtype);
std::string text_of(const c10d::ReduceOp& op);
// Complex numbers are summed by parts: a view as pairs of reals when `op` allows it.
at::Tensor summable_view(const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace qcoll::torch_binding
