// What the verbs on qcoll's engine share.
#pragma once

#include <optional>

#include "backend.h"

namespace qcoll::torch_binding {

std::optional<comm::CodecList> parse_codec(const Backend::Codec& codec);

// `tensor` itself when the engine can write into it, else memory to copy back from.
at::Tensor dense_like(const at::Tensor& tensor);
void copy_back(const Tensors& dense, const Tensors& outputs);

bool all_have_size_of(const Tensors& tensors, const at::Tensor& one);
// One CPU tensor for each rank, all of the dtype of `other`. Throws UsageError.
void require_list_of(const Tensors& tensors, int ranks, const at::Tensor& other, const char* verb);

}  // namespace qcoll::torch_binding
