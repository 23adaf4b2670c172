#include "codec_timing.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <vector>

#include "qcoll/algo/lane.h"
#include "qcoll/base/error.h"
#include "qcoll/comm/chunking.h"
#include "qcoll/wire/header.h"
#include "qcoll/wire/layout.h"
#include "tensor_args.h"

namespace qcoll::torch_binding {
namespace {

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <class Pass>
double timed(int repeats, Pass pass) {
  if (repeats < 1) throw UsageError("CodecTimer: repeats must be positive");
  const double begin = cpu_seconds();
  for (int i = 0; i < repeats; ++i) pass();
  return (cpu_seconds() - begin) / repeats;
}

// The sum as a program without a codec would write it, vectorised for this machine.
__attribute__((optimize("O3"), target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"))) void
plain_add(const float* __restrict x, std::size_t n, float* __restrict sum) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += x[i];
}

}  // namespace

// Slots of encoded chunks, laid out as transport::Exchange lays out a ring.
class CodecTimer::Ring {
 public:
  Ring(const CodecTimer& timer, const std::string& codec)
      : spec_(wire::parse_codec(codec)),
        dtype_(timer.dtype_),
        chunk_(std::min(timer.count_, chunk_of(spec_, dtype_))),
        stride_(align_up(wire::Header::kBytes + bytes_of(chunk_), 64)),
        memory_(algo::kDepth * stride_ + 64) {}

  // Every slot with the first chunk of the source.
  void fill(const std::byte* source) {
    for (std::size_t i = 0; i < algo::kDepth; ++i)
      codec::encode(spec_, dtype_, source, chunk_, slot(i, chunk_));
  }

  // Calls visit(begin, n) for every chunk of `count` elements.
  template <class Visit>
  void for_each_chunk(std::size_t count, Visit visit) const {
    for (std::size_t begin = 0; begin < count; begin += chunk_)
      visit(begin, std::min(chunk_, count - begin));
  }

  Bytes slot(std::size_t begin, std::size_t n) {
    std::byte* const aligned = reinterpret_cast<std::byte*>(
        align_up(reinterpret_cast<std::uintptr_t>(memory_.data()), 64));
    return {aligned + begin / chunk_ % algo::kDepth * stride_ + wire::Header::kBytes, bytes_of(n)};
  }

  wire::CodecSpec spec() const { return spec_; }
  std::size_t chunk() const { return chunk_; }

 private:
  static std::size_t chunk_of(wire::CodecSpec spec, DType dtype) {
    const std::size_t block = std::max<std::size_t>(spec.block, 1);
    return std::max(comm::kChunkBytes / element_bytes(dtype) / block * block, block);
  }
  std::size_t bytes_of(std::size_t n) const { return wire::chunk_layout(spec_, dtype_, n).bytes; }

  const wire::CodecSpec spec_;
  const DType dtype_;
  const std::size_t chunk_;
  const std::size_t stride_;
  std::vector<std::byte> memory_;
};

CodecTimer::CodecTimer(at::Tensor source, at::Tensor output)
    : source_(std::move(source)),
      output_(std::move(output)),
      dtype_(dtype_of(source_)),
      count_(count_of(source_)) {
  require_cpu(source_, "CodecTimer");
  require_cpu(output_, "CodecTimer");
  if (!is_encodable(dtype_) || dtype_of(output_) != dtype_ || count_of(output_) != count_ ||
      count_ == 0 || !source_.is_contiguous() || !output_.is_contiguous())
    throw UsageError(
        "CodecTimer: expected two contiguous tensors of the same size and type, one of float32, "
        "bfloat16 and float16");
}

const std::byte* CodecTimer::source() const { return input_data(source_); }
std::byte* CodecTimer::output() { return output_data(output_); }

void CodecTimer::require_f32(const char* verb) const {
  if (dtype_ != DType::kF32) throw UsageError(std::string(verb) + ": sums are of float32");
}

double CodecTimer::copy(int repeats) {
  return timed(repeats, [&] { std::memcpy(output(), source(), count_ * element_bytes(dtype_)); });
}

double CodecTimer::add(int repeats) {
  require_f32("add");
  return timed(repeats, [&] {
    plain_add(reinterpret_cast<const float*>(source()), count_, reinterpret_cast<float*>(output()));
  });
}

double CodecTimer::encode(const std::string& row, const std::string& codec, int repeats) {
  const codec::Kernels& kernels = codec::row_named(row);
  Ring ring(*this, codec);
  return timed(repeats, [&] {
    ring.for_each_chunk(count_, [&](std::size_t begin, std::size_t n) {
      codec::encode(ring.spec(), dtype_, source() + begin * element_bytes(dtype_), n,
                    ring.slot(begin, n), kernels);
    });
  });
}

double CodecTimer::decode(const std::string& row, const std::string& codec, int repeats) {
  const codec::Kernels& kernels = codec::row_named(row);
  Ring ring(*this, codec);
  ring.fill(source());
  const codec::Store store = codec::store_for(count_ * element_bytes(dtype_));
  return timed(repeats, [&] {
    ring.for_each_chunk(count_, [&](std::size_t begin, std::size_t n) {
      codec::decode(ring.spec(), dtype_, ring.slot(begin, n), n,
                    output() + begin * element_bytes(dtype_), kernels, store);
    });
  });
}

double CodecTimer::decode_add(const std::string& row, const std::string& codec, int repeats) {
  require_f32("decode_add");
  const codec::Kernels& kernels = codec::row_named(row);
  Ring ring(*this, codec);
  ring.fill(source());
  return timed(repeats, [&] {
    ring.for_each_chunk(count_, [&](std::size_t begin, std::size_t n) {
      codec::decode_add(ring.spec(), dtype_, ring.slot(begin, n), n,
                        reinterpret_cast<float*>(output()) + begin, kernels);
    });
  });
}

double CodecTimer::requantize(const std::string& row, const std::string& codec, int repeats) {
  require_f32("requantize");
  const codec::Kernels& kernels = codec::row_named(row);
  std::vector<Ring> inputs(kInputs, Ring(*this, codec));
  for (Ring& ring : inputs) ring.fill(source());
  Ring sent(*this, codec);
  sums_.resize(sent.chunk());
  return timed(repeats, [&] {
    sent.for_each_chunk(count_ / kInputs, [&](std::size_t begin, std::size_t n) {
      codec::decode(sent.spec(), dtype_, inputs[0].slot(begin, n), n, sums_.data(), kernels);
      for (std::size_t k = 1; k < kInputs; ++k)
        codec::decode_add(sent.spec(), dtype_, inputs[k].slot(begin, n), n, sums_.data(), kernels);
      codec::encode(sent.spec(), dtype_, sums_.data(), n, sent.slot(begin, n), kernels);
    });
  });
}

}  // namespace qcoll::torch_binding
