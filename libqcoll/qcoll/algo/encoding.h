// What a message of a ring holds, as a pure function of what all ranks share.
#pragma once

#include "qcoll/base/types.h"
#include "qcoll/wire/codec_spec.h"
#include "qcoll/wire/layout.h"

namespace qcoll::algo {

struct Encoding {
  wire::CodecSpec codec;
  DType dtype = DType::kF32;  // of the elements that are encoded

  std::size_t part_bytes(std::size_t count) const {
    return wire::chunk_layout(codec, dtype, count).bytes;
  }
};

// Sums are fp32 and are encoded from there. An exact sum on its way to the next hop takes the
// tensor's own width, so that "exact" moves the bytes that a user of any other backend expects;
// but fp16 sums travel as fp32, because a sum may pass 65504 where the mean does not.
constexpr Encoding encoding_of(wire::CodecSpec codec, DType dtype, bool partial_sums) {
  if (!partial_sums) return {codec, dtype};
  if (codec.exact() && dtype == DType::kBF16)
    return {{.kind = wire::CodecSpec::Kind::kBf16}, DType::kF32};
  return {codec, DType::kF32};
}

}  // namespace qcoll::algo
