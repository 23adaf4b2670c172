// The table of kernel rows, and the front functions that cut a chunk into payload and scales.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "qcoll/base/error.h"
#include "qcoll/codec/codec.h"
#include "qcoll/wire/layout.h"

namespace qcoll::codec {

namespace v2 {
extern const Kernels kernels;
}
namespace v3 {
extern const Kernels kernels;
}
namespace v4 {
extern const Kernels kernels;
}

namespace {

std::vector<const Kernels*> runnable_rows() {
  std::vector<const Kernels*> rows{&reference()};
  if (__builtin_cpu_supports("x86-64-v2")) rows.push_back(&v2::kernels);
  if (__builtin_cpu_supports("x86-64-v3")) rows.push_back(&v3::kernels);
  if (__builtin_cpu_supports("x86-64-v4")) rows.push_back(&v4::kernels);
  return rows;
}

const Kernels& choose() {
  const char* forced = std::getenv("QCOLL_FORCE_ISA");
  if (forced == nullptr) return *rows().back();
  try {
    return row_named(forced);
  } catch (const UsageError& e) {
    throw UsageError(std::string("QCOLL_FORCE_ISA: ") + e.what());
  }
}

int index_of(DType dtype) { return static_cast<int>(dtype); }

// A chunk that passed its checks, cut into its parts.
template <class Byte>
struct Chunk {
  wire::ChunkLayout layout;
  Byte* payload;
  Byte* scales;
};

template <class Byte>
Chunk<Byte> cut(const char* verb, wire::CodecSpec spec, DType dtype, std::size_t count,
                std::span<Byte> encoded) {
  const auto fail = [&](const std::string& what) {
    throw UsageError(std::string("codec::") + verb + " of " + std::to_string(count) + " " +
                     std::string(name_of(dtype)) + " elements by " + to_string(spec) + ": " + what);
  };
  if (!spec.exact() && !is_encodable(dtype))
    fail("the codec takes float32, bfloat16 and float16 only; use exact");
  const bool known = spec.kind == wire::CodecSpec::Kind::kInt
                         ? (spec.bits == 4 || spec.bits == 8) && spec.block >= wire::kMinBlock &&
                               spec.block <= wire::kMaxBlock && spec.block % wire::kMinBlock == 0
                         : spec.kind <= wire::CodecSpec::Kind::kBf16;
  if (!known) fail("no such codec");
  const wire::ChunkLayout layout = wire::chunk_layout(spec, dtype, count);
  if (encoded.size() != layout.bytes)
    fail("the chunk holds " + std::to_string(encoded.size()) + " bytes, expected exactly " +
         std::to_string(layout.bytes));
  const auto address = reinterpret_cast<std::uintptr_t>(encoded.data());
  if (address % wire::kPartAlignment != 0)
    fail("the chunk lies " + std::to_string(address % wire::kPartAlignment) + " bytes past a " +
         std::to_string(wire::kPartAlignment) + "-byte boundary, expected on one");
  return {layout, encoded.data(), encoded.data() + layout.scales_offset};
}

// Where elements from `begin` on lie, in bytes of the payload.
std::size_t payload_offset(wire::CodecSpec spec, DType dtype, std::size_t begin) {
  if (spec.kind == wire::CodecSpec::Kind::kInt) return spec.bits == 8 ? begin : begin / 2;
  return begin * (spec.exact() ? element_bytes(dtype) : 2);
}

// The same chunk, of which only a part is looked at.
template <class Byte>
Chunk<Byte> cut(const char* verb, wire::CodecSpec spec, DType dtype, std::size_t count,
                std::span<Byte> encoded, Part part) {
  Chunk<Byte> chunk = cut(verb, spec, dtype, count, encoded);
  if (part.begin % part_unit(spec) != 0 || part.begin > count || part.count > count - part.begin)
    throw UsageError(std::string("codec::") + verb + ": elements " + std::to_string(part.begin) +
                     " + " + std::to_string(part.count) + " are no part of " +
                     std::to_string(count) + " in units of " + std::to_string(part_unit(spec)));
  chunk.payload += payload_offset(spec, dtype, part.begin);
  if (spec.block > 0) chunk.scales += part.begin / spec.block * 2;
  return chunk;
}

void zero_padding(const Chunk<std::byte>& chunk) {
  const wire::ChunkLayout& layout = chunk.layout;
  std::fill(chunk.payload + layout.payload_bytes, chunk.scales, std::byte{0});
  std::fill(chunk.scales + layout.scales * 2, chunk.payload + layout.bytes, std::byte{0});
}

}  // namespace

std::span<const Kernels* const> rows() {
  static const std::vector<const Kernels*> all = runnable_rows();
  return all;
}

const Kernels& row_named(std::string_view isa) {
  std::string names;
  for (const Kernels* row : rows()) {
    if (row->isa == isa) return *row;
    names += (names.empty() ? "" : ", ") + std::string(row->isa);
  }
  throw UsageError("no kernel row \"" + std::string(isa) + "\"; this machine runs: " + names);
}

const Kernels& best() {
  static const Kernels& row = choose();
  return row;
}

std::size_t part_unit(wire::CodecSpec spec) {
  constexpr std::size_t kLine = 64;  // elements: whole cache lines of every type
  return spec.block == 0 ? kLine : std::lcm<std::size_t>(spec.block, kLine);
}

std::size_t encode(wire::CodecSpec spec, DType dtype, const void* x, std::size_t count,
                   Bytes encoded, const Kernels& kernels) {
  return encode_part(spec, dtype, x, count, encoded, {0, count}, kernels);
}

std::size_t encode_part(wire::CodecSpec spec, DType dtype, const void* x, std::size_t count,
                        Bytes encoded, Part part, const Kernels& kernels) {
  if (part.begin == 0 && count > 0) zero_padding(cut("encode", spec, dtype, count, encoded));
  const Chunk<std::byte> chunk = cut("encode", spec, dtype, count, encoded, part);
  if (part.count == 0) return 0;
  auto* scales = reinterpret_cast<std::uint16_t*>(chunk.scales);
  switch (spec.kind) {
    case wire::CodecSpec::Kind::kExact:
      std::memcpy(chunk.payload, x, part.count * element_bytes(dtype));
      return 0;
    case wire::CodecSpec::Kind::kBf16:
      kernels.to_bf16[index_of(dtype)](x, part.count,
                                       reinterpret_cast<std::uint16_t*>(chunk.payload));
      return 0;
    case wire::CodecSpec::Kind::kInt:
      break;
  }
  const auto& encode_of = spec.bits == 8 ? kernels.encode_int8 : kernels.encode_int4;
  return encode_of[index_of(dtype)](x, part.count, spec.block, chunk.payload, scales);
}

void decode(wire::CodecSpec spec, DType dtype, ConstBytes encoded, std::size_t count, void* y,
            const Kernels& kernels, Store store) {
  decode_part(spec, dtype, encoded, count, {0, count}, y, kernels, store);
}

void decode_part(wire::CodecSpec spec, DType dtype, ConstBytes encoded, std::size_t count,
                 Part part, void* y, const Kernels& kernels, Store store) {
  const Chunk<const std::byte> chunk = cut("decode", spec, dtype, count, encoded, part);
  if (part.count == 0) return;
  const auto* scales = reinterpret_cast<const std::uint16_t*>(chunk.scales);
  switch (spec.kind) {
    case wire::CodecSpec::Kind::kExact:
      if (store == Store::kStreaming)
        kernels.stream_copy(chunk.payload, part.count * element_bytes(dtype), y);
      else
        std::memcpy(y, chunk.payload, part.count * element_bytes(dtype));
      return;
    case wire::CodecSpec::Kind::kBf16:
      kernels.from_bf16[index_of(dtype)](reinterpret_cast<const std::uint16_t*>(chunk.payload),
                                         part.count, y, store);
      return;
    case wire::CodecSpec::Kind::kInt:
      break;
  }
  const auto& decode_of = spec.bits == 8 ? kernels.decode_int8 : kernels.decode_int4;
  decode_of[index_of(dtype)](chunk.payload, scales, part.count, spec.block, y, store);
}

void decode_add(wire::CodecSpec spec, DType dtype, ConstBytes encoded, std::size_t count,
                float* sum, const Kernels& kernels) {
  decode_add_part(spec, dtype, encoded, count, {0, count}, sum, kernels);
}

void decode_add_part(wire::CodecSpec spec, DType dtype, ConstBytes encoded, std::size_t count,
                     Part part, float* sum, const Kernels& kernels) {
  const Chunk<const std::byte> chunk = cut("decode_add", spec, dtype, count, encoded, part);
  if (!is_encodable(dtype))
    throw UsageError("codec::decode_add: sums are of float32, bfloat16 and float16, not of " +
                     std::string(name_of(dtype)));
  if (part.count == 0) return;
  const auto* scales = reinterpret_cast<const std::uint16_t*>(chunk.scales);
  switch (spec.kind) {
    case wire::CodecSpec::Kind::kExact:
      kernels.widen_add[index_of(dtype)](chunk.payload, part.count, sum);
      return;
    case wire::CodecSpec::Kind::kBf16:
      kernels.widen_add[index_of(DType::kBF16)](chunk.payload, part.count, sum);
      return;
    case wire::CodecSpec::Kind::kInt:
      break;
  }
  const auto add = spec.bits == 8 ? kernels.add_int8 : kernels.add_int4;
  add(chunk.payload, scales, part.count, spec.block, sum);
}

}  // namespace qcoll::codec
