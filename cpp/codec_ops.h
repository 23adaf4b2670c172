// The codec alone, on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace qcoll::torch_binding {

// One chunk as docs/wire_format.md lays it out, in a uint8 tensor.
at::Tensor encode(const at::Tensor& tensor, const std::string& codec);
at::Tensor decode(const at::Tensor& bytes, const std::vector<std::int64_t>& shape,
                  at::ScalarType dtype, const std::string& codec);

}  // namespace qcoll::torch_binding
