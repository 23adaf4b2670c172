#include "tensor_args.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>

#include <sstream>

#include "qcoll/base/error.h"

namespace qcoll::torch_binding {

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kF32;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kHalf:
      return DType::kF16;
    case at::kDouble:
      return DType::kF64;
    case at::kChar:
      return DType::kI8;
    case at::kByte:
      return DType::kU8;
    case at::kShort:
      return DType::kI16;
    case at::kInt:
      return DType::kI32;
    case at::kLong:
      return DType::kI64;
    case at::kBool:
      return DType::kBool;
    default:
      return DType::kByte;
  }
}

std::size_t bytes_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
}

std::size_t count_of(const at::Tensor& tensor) {
  return bytes_of(tensor) / element_bytes(dtype_of(tensor));
}

std::string text_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << tensor.sizes();
  return text.str();
}

std::string size_text_of(const at::Tensor& tensor) {
  return std::to_string(tensor.numel()) + " elements of " + c10::toString(tensor.scalar_type());
}

void require_cpu(const at::Tensor& tensor, const char* verb) {
  if (tensor.is_sparse())
    throw UsageError("qcoll " + std::string(verb) + ": sparse tensors are not supported");
  if (tensor.is_conj() || tensor.is_neg())
    throw UsageError("qcoll " + std::string(verb) +
                     ": the tensor is a lazy conjugate or negative, whose memory holds other "
                     "values; pass tensor.resolve_conj().resolve_neg()");
  if (tensor.device().is_cpu()) return;
  throw UsageError(
      "qcoll " + std::string(verb) + ": the tensor is on " + tensor.device().str() +
      ", but this build of qcoll has no CUDA half; use CPU tensors, or another backend "
      "for this device (\"cpu:qcoll,cuda:nccl\")");
}

void require_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* verb) {
  if (a.scalar_type() != b.scalar_type())
    throw UsageError("qcoll " + std::string(verb) +
                     ": input and output must have the same dtype, got " + text_of(a) + " and " +
                     text_of(b));
}

void require_distinct_elements(const at::Tensor& output, const char* verb) {
  if (at::has_internal_overlap(output) != at::MemOverlap::Yes) return;
  throw UsageError(
      "qcoll " + std::string(verb) + ": several elements of the output " + text_of(output) +
      " share memory (an expanded tensor?); pass output.contiguous() and copy from it");
}

void require_contiguous_output(const at::Tensor& tensor, const char* verb) {
  if (!tensor.is_contiguous())
    throw UsageError("qcoll " + std::string(verb) + ": the output " + text_of(tensor) +
                     " is not contiguous; pass a contiguous tensor and copy from it");
}

void require_ratio(const at::Tensor& gathered, const char* gathered_name, const at::Tensor& part,
                   const char* part_name, int ranks, const char* verb) {
  if (gathered.numel() == part.numel() * ranks) return;
  throw UsageError("qcoll " + std::string(verb) + ": the " + gathered_name +
                   " must have world size (" + std::to_string(ranks) +
                   ") times the elements of the " + part_name + ", got " + text_of(gathered) +
                   " and " + text_of(part));
}

void require_own_slice_or_apart(const at::Tensor& whole, const at::Tensor& part, int rank,
                                const char* verb) {
  const std::byte* const begin = input_data(whole);
  const std::byte* const end = begin + bytes_of(whole);
  const std::byte* const at = input_data(part);
  const bool apart = at + bytes_of(part) <= begin || at >= end;
  if (apart || part.numel() == 0 || at == begin + rank * bytes_of(part)) return;
  throw UsageError("qcoll " + std::string(verb) +
                   ": input and output overlap; they may only share memory in place, when the "
                   "smaller tensor is exactly slice " +
                   std::to_string(rank) + " (this rank's) of the larger one");
}

const at::Tensor& single(const std::vector<at::Tensor>& tensors, const char* verb) {
  if (tensors.size() != 1)
    throw UsageError("qcoll " + std::string(verb) + ": expected one tensor, got " +
                     std::to_string(tensors.size()));
  return tensors[0];
}

const std::byte* input_data(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

std::byte* output_data(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

std::vector<const std::byte*> input_slices(const at::Tensor& tensor, int ranks) {
  const std::size_t slice = bytes_of(tensor) / ranks;
  std::vector<const std::byte*> slices;
  for (int r = 0; r < ranks; ++r) slices.push_back(input_data(tensor) + r * slice);
  return slices;
}

std::vector<std::byte*> output_slices(const at::Tensor& tensor, int ranks) {
  const std::size_t slice = bytes_of(tensor) / ranks;
  std::vector<std::byte*> slices;
  for (int r = 0; r < ranks; ++r) slices.push_back(output_data(tensor) + r * slice);
  return slices;
}

std::optional<comm::Reduction> native_reduction(const c10d::ReduceOp& op, DType dtype) {
  if (!is_encodable(dtype)) return std::nullopt;
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return comm::Reduction{wire::ReduceOp::kSum};
    case c10d::ReduceOp::AVG:
      return comm::Reduction{wire::ReduceOp::kAvg};
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto& supplement = static_cast<c10d::NCCLPreMulSumSupplement&>(*op.supplement_);
      const double factor = supplement.tensor_factor.defined()
                                ? supplement.tensor_factor.item<double>()
                                : supplement.double_factor;
      return comm::Reduction{wire::ReduceOp::kPremulSum, static_cast<float>(factor)};
    }
    default:
      return std::nullopt;
  }
}

at::Tensor summable_view(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const bool linear = op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG ||
                      op.op_ == c10d::ReduceOp::PREMUL_SUM;
  return tensor.is_complex() && linear ? at::view_as_real(tensor) : tensor;
}

std::string text_of(const c10d::ReduceOp& op) {
  constexpr const char* kNames[] = {"sum",  "avg", "product", "min",       "max",
                                    "band", "bor", "bxor",    "premul_sum"};
  const auto index = static_cast<std::size_t>(op.op_);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

}  // namespace qcoll::torch_binding
