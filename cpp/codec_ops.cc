#include "codec_ops.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "qcoll/base/error.h"
#include "qcoll/codec/codec.h"
#include "qcoll/wire/layout.h"
#include "tensor_args.h"

namespace qcoll::torch_binding {
namespace {

void require_encodable(const wire::CodecSpec& spec, const at::Tensor& tensor, const char* verb) {
  if (!spec.exact() && !is_encodable(dtype_of(tensor)))
    throw UsageError("qcoll." + std::string(verb) + ": codec \"" + wire::to_string(spec) +
                     "\" takes float32, bfloat16 or float16, got " + text_of(tensor));
}

}  // namespace

at::Tensor encode(const at::Tensor& tensor, const std::string& codec) {
  const wire::CodecSpec spec = wire::parse_codec(codec);
  require_cpu(tensor, "encode");
  require_encodable(spec, tensor, "encode");
  const at::Tensor dense = tensor.contiguous();
  const std::size_t count = count_of(dense);
  const std::size_t bytes = wire::chunk_layout(spec, dtype_of(dense), count).bytes;
  at::Tensor encoded =
      at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
  codec::encode(spec, dtype_of(dense), input_data(dense), count, {output_data(encoded), bytes});
  return encoded;
}

at::Tensor decode(const at::Tensor& bytes, const std::vector<std::int64_t>& shape,
                  at::ScalarType dtype, const std::string& codec) {
  const wire::CodecSpec spec = wire::parse_codec(codec);
  require_cpu(bytes, "decode");
  if (bytes.scalar_type() != at::kByte)
    throw UsageError("qcoll.decode: expected encoded bytes as uint8, got " + text_of(bytes));
  for (const std::int64_t size : shape)
    if (size < 0) throw UsageError("qcoll.decode: the shape has a negative size");
  // Lengths are compared before anything is allocated: a wrong shape must cost nothing.
  const at::Tensor sample = at::empty({0}, at::TensorOptions().dtype(dtype));
  require_encodable(spec, sample, "decode");
  // Far above any memory, and far below where the sizes that follow could overflow.
  constexpr std::size_t kMostElements = std::size_t{1} << 48;
  std::size_t numel = 1;
  for (const std::int64_t size : shape)
    if (__builtin_mul_overflow(numel, static_cast<std::size_t>(size), &numel)) numel = SIZE_MAX;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) numel = 0;
  if (numel > kMostElements)
    throw UsageError("qcoll.decode: the shape " + c10::str(at::IntArrayRef(shape)) +
                     " has more elements than the " + std::to_string(bytes_of(bytes)) +
                     " bytes given can hold in codec \"" + codec + "\"");
  const std::size_t count = numel * sample.element_size() / element_bytes(dtype_of(sample));
  const std::size_t expected = wire::chunk_layout(spec, dtype_of(sample), count).bytes;
  if (expected != bytes_of(bytes))
    throw UsageError("qcoll.decode: " + std::to_string(numel) + " elements of " +
                     c10::toString(dtype) + " in codec \"" + codec + "\" take " +
                     std::to_string(expected) + " bytes, got " + std::to_string(bytes_of(bytes)));
  at::Tensor dense = bytes.contiguous();
  if (reinterpret_cast<std::uintptr_t>(input_data(dense)) % wire::kPartAlignment != 0)
    dense = dense.clone();
  at::Tensor decoded = at::empty(shape, at::TensorOptions().dtype(dtype));
  codec::decode(spec, dtype_of(sample), {input_data(dense), expected}, count, output_data(decoded));
  return decoded;
}

}  // namespace qcoll::torch_binding
