#include "qcoll/wire/header.h"

#include <bit>

#include "qcoll/base/error.h"
#include "qcoll/wire/bytes.h"

namespace qcoll::wire {
namespace {

// Offsets of the fields; docs/wire_format.md has the same table.
enum Offset : std::size_t {
  kMagicAt = 0,
  kVersionAt = 4,
  kCollectiveAt = 5,
  kDTypeAt = 6,
  kOpAt = 7,
  kCodecKindAt = 8,
  kCodecBitsAt = 9,
  kCodecBlockAt = 10,
  kTagAt = 12,
  kGroupAt = 16,
  kSequenceAt = 24,
  kCountAt = 32,
  kRunAt = 40,
  kChunkAt = 44,
  kElementsAt = 48,
  kPayloadBytesAt = 52,
  kQualifierAt = 56,
  kChecksumAt = 60,
};

std::uint32_t checksum(const std::byte* header) {
  const std::uint64_t hash = fnv1a(header, kChecksumAt);
  return static_cast<std::uint32_t>(hash ^ (hash >> 32));
}

[[noreturn]] void reject(const std::string& field, std::uint64_t value,
                         const std::string& expected) {
  throw TransportError("malformed message header: " + field + " is " + std::to_string(value) +
                       ", expected " + expected +
                       "; the peer runs another version of qcoll or is not qcoll");
}

CodecSpec parse_codec_fields(const std::byte* at) {
  const auto kind = get<std::uint8_t>(at + kCodecKindAt);
  const auto bits = get<std::uint8_t>(at + kCodecBitsAt);
  const auto block = get<std::uint16_t>(at + kCodecBlockAt);
  if (kind > static_cast<std::uint8_t>(CodecSpec::Kind::kInt)) reject("codec kind", kind, "0..2");
  const CodecSpec spec{static_cast<CodecSpec::Kind>(kind), bits, block};
  if (spec.kind == CodecSpec::Kind::kInt) {
    if (bits != 4 && bits != 8) reject("codec bits", bits, "4 or 8");
    if (block < kMinBlock || block > kMaxBlock || block % kMinBlock != 0)
      reject("codec block", block, "a multiple of 32 from 32 to 4096");
  } else if (bits != 0 || block != 0) {
    reject("codec bits or block", bits + block, "0 for a codec without blocks");
  }
  return spec;
}

}  // namespace

std::string_view name_of(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kAllToAll:
      return "all_to_all";
  }
  return "unknown collective";
}

std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kNone:
      return "no reduction";
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kPremulSum:
      return "premul_sum";
  }
  return "unknown reduction";
}

std::string describe(const Envelope& envelope) {
  std::string text(name_of(envelope.collective));
  text += " #" + std::to_string(envelope.sequence) + " (";
  if (envelope.op != ReduceOp::kNone) text += std::string(name_of(envelope.op));
  if (envelope.op == ReduceOp::kPremulSum)
    text += " by " + std::to_string(std::bit_cast<float>(envelope.qualifier));
  if (envelope.op != ReduceOp::kNone) text += ", ";
  text += std::string(name_of(envelope.dtype)) + ", ";
  switch (envelope.collective) {
    case Collective::kAllToAll:
      return text + "splits by rank)";
    case Collective::kAllReduce:
      return text + std::to_string(envelope.count) + " elements)";
    default:
      return text + std::to_string(envelope.count) + " elements per rank)";
  }
}

void write_header(const Header& header, std::byte* at) {
  const Envelope& envelope = header.envelope;
  put(at + kMagicAt, Header::kMagic);
  put(at + kVersionAt, Header::kVersion);
  put(at + kCollectiveAt, static_cast<std::uint8_t>(envelope.collective));
  put(at + kDTypeAt, static_cast<std::uint8_t>(envelope.dtype));
  put(at + kOpAt, static_cast<std::uint8_t>(envelope.op));
  put(at + kCodecKindAt, static_cast<std::uint8_t>(header.codec.kind));
  put(at + kCodecBitsAt, header.codec.bits);
  put(at + kCodecBlockAt, header.codec.block);
  put(at + kTagAt, header.tag);
  put(at + kGroupAt, envelope.group);
  put(at + kSequenceAt, envelope.sequence);
  put(at + kCountAt, envelope.count);
  put(at + kRunAt, envelope.run);
  put(at + kChunkAt, header.chunk);
  put(at + kElementsAt, header.elements);
  put(at + kPayloadBytesAt, header.payload_bytes);
  put(at + kQualifierAt, envelope.qualifier);
  put(at + kChecksumAt, checksum(at));
}

Header parse_header(const std::byte* at) {
  if (const auto magic = get<std::uint32_t>(at + kMagicAt); magic != Header::kMagic)
    reject("magic", magic, std::to_string(Header::kMagic));
  if (const auto version = get<std::uint8_t>(at + kVersionAt); version != Header::kVersion)
    reject("version", version, std::to_string(Header::kVersion));
  if (const auto sum = get<std::uint32_t>(at + kChecksumAt); sum != checksum(at))
    reject("checksum", sum, std::to_string(checksum(at)));
  const auto collective = get<std::uint8_t>(at + kCollectiveAt);
  if (collective < 1 || collective > 4) reject("collective", collective, "1..4");
  const auto dtype = get<std::uint8_t>(at + kDTypeAt);
  if (dtype >= kDTypes) reject("dtype", dtype, "0.." + std::to_string(kDTypes - 1));
  const auto op = get<std::uint8_t>(at + kOpAt);
  if (op > static_cast<std::uint8_t>(ReduceOp::kPremulSum)) reject("reduction", op, "0..3");

  Header header;
  header.envelope = {.group = get<std::uint64_t>(at + kGroupAt),
                     .sequence = get<std::uint64_t>(at + kSequenceAt),
                     .run = get<std::uint32_t>(at + kRunAt),
                     .collective = static_cast<Collective>(collective),
                     .op = static_cast<ReduceOp>(op),
                     .dtype = static_cast<DType>(dtype),
                     .count = get<std::uint64_t>(at + kCountAt),
                     .qualifier = get<std::uint32_t>(at + kQualifierAt)};
  header.codec = parse_codec_fields(at);
  header.tag = get<std::uint32_t>(at + kTagAt);
  header.chunk = get<std::uint32_t>(at + kChunkAt);
  header.elements = get<std::uint32_t>(at + kElementsAt);
  header.payload_bytes = get<std::uint32_t>(at + kPayloadBytesAt);
  return header;
}

}  // namespace qcoll::wire
