// Where the parts of an encoded chunk lie. All offset arithmetic of the wire format is here
// (docs/wire_format.md); host and device code share it.
#pragma once

#include <cstddef>

#include "qcoll/base/types.h"
#include "qcoll/wire/codec_spec.h"

namespace qcoll::wire {

inline constexpr std::size_t kPartAlignment = 16;
// int4: 32 elements share 16 bytes; byte i holds element i in its low and element 16 + i in its
// high nibble. Plain loops vectorise over the 16, and on a GPU one AND yields two codes.
inline constexpr std::size_t kInt4Group = 32;

// [payload][scales]: both 16-byte aligned and padded with zero bytes.
struct ChunkLayout {
  std::size_t payload_bytes = 0;  // without padding
  std::size_t scales = 0;         // bf16 scales, one for each block
  std::size_t scales_offset = 0;
  std::size_t bytes = 0;  // the whole chunk
};

// Layout of `count` elements of `dtype` encoded by `spec`.
constexpr ChunkLayout chunk_layout(CodecSpec spec, DType dtype, std::size_t count) {
  ChunkLayout layout;
  switch (spec.kind) {
    case CodecSpec::Kind::kExact:
      layout.payload_bytes = count * element_bytes(dtype);
      break;
    case CodecSpec::Kind::kBf16:
      layout.payload_bytes = count * 2;
      break;
    case CodecSpec::Kind::kInt:
      layout.payload_bytes =
          spec.bits == 8 ? count : ceil_div(count, kInt4Group) * (kInt4Group / 2);
      layout.scales = ceil_div(count, spec.block);
      break;
  }
  layout.scales_offset = align_up(layout.payload_bytes, kPartAlignment);
  layout.bytes = layout.scales_offset + align_up(layout.scales * 2, kPartAlignment);
  return layout;
}

}  // namespace qcoll::wire
