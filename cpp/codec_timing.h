// Times the codec kernels as the engine calls them: a tensor goes chunk by chunk into a ring of
// slots that stays in cache, or comes from one. The yardsticks move as many bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "qcoll/codec/codec.h"

namespace qcoll::torch_binding {

// Each function passes `repeats` times over the whole tensor and returns the seconds of CPU that
// this thread took for one pass.
class CodecTimer {
 public:
  // `source` (float32, bfloat16 or float16) is read, `output` of the same size and type written.
  CodecTimer(at::Tensor source, at::Tensor output);

  double copy(int repeats);  // memcpy
  double add(int repeats);   // output += source in float32
  double encode(const std::string& row, const std::string& codec, int repeats);
  double decode(const std::string& row, const std::string& codec, int repeats);
  // Into the whole output, which must be float32.
  double decode_add(const std::string& row, const std::string& codec, int repeats);
  // One step of a reduce-scatter: chunks of kInputs peers are summed and encoded again. All inputs
  // together have the size of the source.
  double requantize(const std::string& row, const std::string& codec, int repeats);

  static constexpr std::size_t kInputs = 4;

 private:
  class Ring;

  const std::byte* source() const;
  std::byte* output();
  void require_f32(const char* verb) const;

  const at::Tensor source_;
  at::Tensor output_;
  const DType dtype_;
  const std::size_t count_;
  std::vector<float> sums_;
};

}  // namespace qcoll::torch_binding
