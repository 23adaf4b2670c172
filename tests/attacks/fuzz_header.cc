// The header of a message, and the arithmetic that follows from it.
#include <algorithm>
#include <array>
#include <cstring>

#include "fuzz.h"
#include "qcoll/base/error.h"
#include "qcoll/wire/bytes.h"
#include "qcoll/wire/header.h"
#include "qcoll/wire/layout.h"

using namespace qcoll;
using namespace qcoll::wire;
using attacks::ensure;

QCOLL_FUZZ_TARGET(header) {
  enum : std::uint8_t { kRightMagic = 1, kRightChecksum = 2 };
  const std::uint8_t choice = in.u8();
  attacks::ExactBuffer raw(Header::kBytes);
  raw.fill({});
  const ConstBytes given = in.bytes(Header::kBytes);
  std::copy(given.begin(), given.end(), raw.data);
  if (choice & kRightMagic) {
    put(raw.data, Header::kMagic);
    raw.data[4] = std::byte{Header::kVersion};
  }
  if (choice & kRightChecksum) {
    const std::uint64_t hash = fnv1a(raw.data, Header::kBytes - 4);
    put(raw.data + Header::kBytes - 4, static_cast<std::uint32_t>(hash ^ (hash >> 32)));
  }
  Header header;
  try {
    header = parse_header(raw.data);
  } catch (const TransportError& error) {
    ensure(std::strstr(error.what(), "malformed message header") != nullptr, "errors say so");
    return;
  }
  std::array<std::byte, Header::kBytes> again;
  write_header(header, again.data());
  ensure(std::equal(again.begin(), again.end(), raw.data), "a header has one form only");
  ensure(!describe(header.envelope).empty() && !to_string(header.codec).empty(), "it has a text");
  ensure(parse_codec(to_string(header.codec)) == header.codec, "its codec has a spelling");

  const ChunkLayout layout = chunk_layout(header.codec, header.envelope.dtype, header.elements);
  ensure(layout.payload_bytes <= layout.scales_offset && layout.scales_offset <= layout.bytes &&
             layout.scales_offset + 2 * layout.scales <= layout.bytes,
         "the parts of a chunk lie within it, one after the other");
}
