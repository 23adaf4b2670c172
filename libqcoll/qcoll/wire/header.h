// The header before every message (docs/wire_format.md): 64 bytes, little-endian, versioned,
// self-describing and validated before anything behind it is looked at.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "qcoll/base/types.h"
#include "qcoll/wire/codec_spec.h"

namespace qcoll::wire {

enum class Collective : std::uint8_t {
  kAllGather = 1,
  kReduceScatter = 2,
  kAllReduce = 3,
  kAllToAll = 4,
};

enum class ReduceOp : std::uint8_t { kNone = 0, kSum = 1, kAvg = 2, kPremulSum = 3 };

std::string_view name_of(Collective collective);
std::string_view name_of(ReduceOp op);

// What all ranks of a group must agree on for one call.
struct Envelope {
  std::uint64_t group = 0;     // random, made when the group is formed
  std::uint64_t sequence = 0;  // of the collective in its group
  std::uint32_t run = 0;       // of the schedule in its group (an all-reduce runs two)
  Collective collective = Collective::kAllGather;
  ReduceOp op = ReduceOp::kNone;
  DType dtype = DType::kByte;
  // Elements of a slice; in an all-to-all, whose splits differ, those of the message's pair.
  std::uint64_t count = 0;
  // Of a premul_sum the factor, as the bits of a float32. (Of a gather, later: the generation of
  // what is gathered.)
  std::uint32_t qualifier = 0;

  friend bool operator==(const Envelope&, const Envelope&) = default;
};

// "reduce_scatter #12 (avg, float32, 1024 elements per rank)"
std::string describe(const Envelope& envelope);

struct Header {
  static constexpr std::size_t kBytes = 64;
  static constexpr std::uint32_t kMagic = 0x314c4351;  // "QCL1"
  static constexpr std::uint8_t kVersion = 1;

  Envelope envelope;
  CodecSpec codec;             // of this message: levels may differ
  std::uint32_t tag = 0;       // which ring of slots the message belongs to
  std::uint32_t chunk = 0;     // index within the ring's sequence of messages
  std::uint32_t elements = 0;  // encoded in this message
  std::uint32_t payload_bytes = 0;
};

void write_header(const Header& header, std::byte* at);  // kBytes bytes

// Throws TransportError that names the field, its value and what was expected.
Header parse_header(const std::byte* at);

}  // namespace qcoll::wire
