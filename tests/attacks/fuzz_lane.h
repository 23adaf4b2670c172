// One receiving rank, as a collective runs it: a lane over an exchange of the loopback transport.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "fuzz.h"
#include "qcoll/base/error.h"
#include "qcoll/host/host_lane.h"
#include "qcoll/transport/board.h"
#include "qcoll/transport/exchange.h"
#include "qcoll/transport/loopback.h"
#include "qcoll/wire/bytes.h"

namespace qcoll::attacks {

inline constexpr std::size_t kTags = 2;
inline constexpr std::uint32_t kTag = 1;
inline constexpr std::uint32_t kDepth = 2;
inline constexpr std::size_t kMemory = 256 << 10;

// What the receiver expects, chosen by the input too.
struct Expectation {
  explicit Expectation(Source& in) {
    static constexpr wire::CodecSpec kCodecs[] = {{wire::CodecSpec::Kind::kExact, 0, 0},
                                                  {wire::CodecSpec::Kind::kBf16, 0, 0},
                                                  {wire::CodecSpec::Kind::kInt, 8, 32},
                                                  {wire::CodecSpec::Kind::kInt, 4, 64}};
    const std::uint8_t choice = in.u8();
    call.codecs = {kCodecs[choice % 4]};
    parts = 1 + choice / 4 % 3;
    count = in.u8();
    call.envelope = {.group = 42,
                     .sequence = 7,
                     .run = 3,
                     .collective = wire::Collective::kReduceScatter,
                     .op = wire::ReduceOp::kSum,
                     .dtype = static_cast<DType>(choice / 12 % kFloatDTypes),
                     .count = count};
    call.chunk = 256;
    call.depth = kDepth;
  }
  // A header that is right for message `chunk`.
  wire::Header header(std::uint32_t chunk) const {
    const algo::Encoding encoding{call.codecs[0], call.envelope.dtype};
    return {.envelope = call.envelope,
            .codec = encoding.codec,
            .tag = kTag,
            .chunk = chunk,
            .elements = static_cast<std::uint32_t>(count),
            .payload_bytes = static_cast<std::uint32_t>(parts * encoding.part_bytes(count))};
  }

  host::LaneCall call;
  std::size_t parts = 1;
  std::size_t count = 0;
};

// A right header with bytes of the input in it; its checksum is made right if `repair`.
inline void damaged_header(const Expectation& expected, std::uint32_t chunk, Source& in,
                           std::size_t damages, bool repair, std::byte* at) {
  wire::write_header(expected.header(chunk), at);
  for (std::size_t i = 0; i < damages; ++i) {
    const std::size_t where = in.u8() % wire::Header::kBytes;
    at[where] = static_cast<std::byte>(in.u8());
  }
  if (!repair) return;
  const std::uint64_t hash = wire::fnv1a(at, wire::Header::kBytes - 4);
  wire::put(at + wire::Header::kBytes - 4, static_cast<std::uint32_t>(hash ^ (hash >> 32)));
}

// Receives up to three messages and decodes them. Errors of the transport end it; any other
// exception ends the program.
inline void receive_all(transport::Mesh& mesh, Expectation& expected, const Deadline& deadline) {
  ExactBuffer output(expected.parts * expected.count * element_bytes(expected.call.envelope.dtype));
  ExactBuffer sum(expected.call.chunk * sizeof(float));
  sum.fill({});
  float* const sums[] = {reinterpret_cast<float*>(sum.data)};
  expected.call.outputs = {output.data};
  const algo::RingPlan plan{.tag = kTag, .from = 1, .parts = expected.parts};
  try {
    transport::Exchange exchange(mesh, kTags);
    host::LaneCounters counters;
    host::Team team(1);
    host::HostLane lane(exchange, expected.call, sums, deadline, counters, team);
    lane.open({&plan, 1});
    const transport::Memory& memory = mesh.memory_of(mesh.mapped(1) ? 1 : 0);
    for (int i = 0; i < 3; ++i) {
      const auto slot = lane.receive(1, kTag, expected.count);
      const std::size_t offset = slot.slot.message - memory.data();
      ensure(offset <= memory.bytes() &&
                 wire::Header::kBytes + slot.slot.payload_bytes <= memory.bytes() - offset,
             "a message lies within the memory");
      for (std::size_t part = 0; part < expected.parts; ++part) {
        lane.decode(slot, part,
                    {.slice = 0, .begin = part * expected.count, .count = expected.count});
        lane.add_slot(0, slot, part, expected.count, i == 0);
      }
      lane.release(slot);
    }
  } catch (const TransportError&) {
  }
}

}  // namespace qcoll::attacks
