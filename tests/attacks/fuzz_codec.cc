// Encoded chunks with any bytes in them, scales included: every row of the kernel table stays
// within its buffers and gives the reference's bits, and a wrong length is refused.
#include <algorithm>
#include <cstring>
#include <vector>

#include "fuzz.h"
#include "qcoll/base/error.h"
#include "qcoll/codec/codec.h"
#include "qcoll/wire/layout.h"

using namespace qcoll;
using namespace qcoll::codec;
using attacks::ensure;
using attacks::ExactBuffer;

namespace {

template <class Function>
bool refused(Function function) {
  try {
    function();
    return false;
  } catch (const UsageError&) {
    return true;
  }
}

}  // namespace

QCOLL_FUZZ_TARGET(codec) {
  enum : std::uint8_t { kAnySpec = 1, kWrongLength = 2, kShifted = 4, kLong = 0xf8 };
  const std::uint8_t choice = in.u8();
  const auto dtype = static_cast<DType>(in.u8() % kDTypes);
  wire::CodecSpec spec;
  const std::uint8_t kind = in.u8();
  const std::uint16_t block = in.u16();
  if (choice & kAnySpec) {
    spec.kind = static_cast<wire::CodecSpec::Kind>(kind);
    spec.bits = static_cast<std::uint8_t>(block >> 8);
    spec.block = block;
  } else if (kind % 4 >= 2) {
    spec = {.kind = wire::CodecSpec::Kind::kInt,
            .bits = static_cast<std::uint8_t>(kind % 4 == 2 ? 4 : 8),
            .block = static_cast<std::uint16_t>((1 + block % 128) * 32)};
  } else {
    spec.kind = static_cast<wire::CodecSpec::Kind>(kind % 4);
  }
  const std::size_t count = in.u16() % ((choice & kLong) == kLong ? 9000 : 70);
  const std::uint8_t difference = in.u8();
  const ConstBytes content = in.rest();

  const bool block_of_0 = spec.kind == wire::CodecSpec::Kind::kInt && spec.block == 0;
  const std::size_t right = block_of_0 ? 64 : wire::chunk_layout(spec, dtype, count).bytes;
  const bool wrong_length = (choice & kWrongLength) && difference != 0;
  const std::size_t bytes =
      wrong_length
          ? (difference & 1 ? right + difference : right - std::min<std::size_t>(right, difference))
          : right;
  const std::size_t shift = choice & kShifted ? 1 + difference % 15 : 0;
  ExactBuffer chunk(shift + bytes);
  chunk.fill(content);
  const ConstBytes encoded(chunk.data + shift, bytes);

  // Each input tries one row beside the reference.
  const Kernels& row = *rows()[difference % rows().size()];
  const bool add = kind >= 128 && is_encodable(dtype);
  const auto result = [&](const Kernels& kernels, const ExactBuffer& buffer) {
    if (add)
      decode_add(spec, dtype, encoded, count, reinterpret_cast<float*>(buffer.data), kernels);
    else
      decode(spec, dtype, encoded, count, buffer.data, kernels);
  };
  ExactBuffer expected(count * (add ? sizeof(float) : element_bytes(dtype)));
  ExactBuffer found(expected.size);
  expected.fill(content);
  found.fill(content);
  const bool refuses = refused([&] { result(reference(), expected); });
  ensure(refuses || (bytes == right && shift == 0), "a chunk of another length is refused");
  ensure(refused([&] { result(row, found); }) == refuses, "all rows refuse the same");
  ensure(expected.size == 0 || std::memcmp(found.data, expected.data, found.size) == 0,
         "all rows give the reference's bits");
}
