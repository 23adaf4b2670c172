// The message header against bytes written down by hand from docs/wire_format.md.
#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <tuple>

#include "qcoll/base/error.h"
#include "qcoll/wire/header.h"

using namespace qcoll;

namespace {

using Raw = std::array<unsigned char, wire::Header::kBytes>;

const wire::Header kHeader{.envelope = {.group = 0x1122334455667788,
                                        .sequence = 0x0102030405060708,
                                        .run = 0x0a0b0c0d,
                                        .collective = wire::Collective::kReduceScatter,
                                        .op = wire::ReduceOp::kAvg,
                                        .dtype = DType::kBF16,
                                        .count = 0x99,
                                        .qualifier = 7},
                           .codec = {wire::CodecSpec::Kind::kInt, 4, 128},
                           .tag = 0x21,
                           .chunk = 3,
                           .elements = 65536,
                           .payload_bytes = 33792};

// The checksum (last four bytes) was computed by another program.
const Raw kGolden{0x51, 0x43, 0x4c, 0x31, 0x01, 0x02, 0x01, 0x02, 0x02, 0x04, 0x80, 0x00, 0x21,
                  0x00, 0x00, 0x00, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x08, 0x07,
                  0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0x99, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
                  0x00, 0x0d, 0x0c, 0x0b, 0x0a, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x00,
                  0x00, 0x84, 0x00, 0x00, 0x07, 0x00, 0x00, 0x00, 0xc3, 0x0f, 0x8c, 0xcc};

const std::byte* bytes(const Raw& raw) { return reinterpret_cast<const std::byte*>(raw.data()); }

// FNV-1a as its definition says, for headers that this test corrupts and signs anew.
void sign(Raw& raw) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::size_t i = 0; i < 60; ++i) hash = (hash ^ raw[i]) * 0x100000001b3u;
  const auto sum = static_cast<std::uint32_t>(hash ^ (hash >> 32));
  for (int i = 0; i < 4; ++i) raw[60 + i] = static_cast<unsigned char>(sum >> (8 * i));
}

std::string rejection(const Raw& raw) {
  try {
    wire::parse_header(bytes(raw));
  } catch (const TransportError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a header is written as documented and read back") {
  Raw raw{};
  wire::write_header(kHeader, reinterpret_cast<std::byte*>(raw.data()));
  for (std::size_t i = 0; i < raw.size(); ++i) {
    CAPTURE(i);
    CHECK_EQ(int{raw[i]}, int{kGolden[i]});
  }
  const wire::Header read = wire::parse_header(bytes(kGolden));
  CHECK(read.envelope == kHeader.envelope);
  CHECK(read.codec == kHeader.codec);
  CHECK_EQ(read.tag, kHeader.tag);
  CHECK_EQ(read.chunk, kHeader.chunk);
  CHECK_EQ(read.elements, kHeader.elements);
  CHECK_EQ(read.payload_bytes, kHeader.payload_bytes);
}

TEST_CASE("a header with any bit flipped is refused") {
  for (std::size_t bit = 0; bit < kGolden.size() * 8; ++bit) {
    Raw raw = kGolden;
    raw[bit / 8] ^= static_cast<unsigned char>(1 << (bit % 8));
    CAPTURE(bit);
    CHECK_FALSE(rejection(raw).empty());
  }
}

TEST_CASE("a well-signed header with a value out of range is refused by the field's name") {
  const std::vector<std::tuple<int, int, std::string>> cases{
      {0, 0x52, "magic"},        {4, 2, "version"},    {5, 0, "collective"},
      {5, 5, "collective"},      {6, 11, "dtype"},     {7, 4, "reduction"},
      {8, 3, "codec kind"},      {9, 5, "codec bits"}, {10, 0x81, "codec block"},
      {11, 0x20, "codec block"}, {8, 0, "codec bits"},
  };
  for (const auto& [offset, value, field] : cases) {
    Raw raw = kGolden;
    raw[offset] = static_cast<unsigned char>(value);
    sign(raw);
    CAPTURE(offset);
    CAPTURE(rejection(raw));
    CHECK_NE(rejection(raw).find(field), std::string::npos);
  }
}

TEST_CASE("random bytes are never a header") {
  std::mt19937 engine(1);
  for (int i = 0; i < 20000; ++i) {
    Raw raw;
    for (auto& b : raw) b = static_cast<unsigned char>(engine());
    if (i % 2 == 0) std::memcpy(raw.data(), kGolden.data(), 5);
    CHECK_FALSE(rejection(raw).empty());
  }
}

TEST_CASE("codecs are parsed, spelled and refused") {
  using wire::parse_codec;
  CHECK(parse_codec("exact") == wire::kExactCodec);
  CHECK_EQ(wire::to_string(parse_codec("int8")), "int8:256");
  CHECK_EQ(wire::to_string(parse_codec("int4")), "int4:128");
  CHECK_EQ(wire::to_string(parse_codec("int4:4096")), "int4:4096");
  CHECK_EQ(wire::to_string(parse_codec("bf16")), "bf16");
  for (const std::string text :
       {"", "int8:", "int8:0", "int8:31", "int8:33", "int8:4128", "int7", "exact:32", "bf16:32",
        "int8:256:1", "int8: 256", "INT8", "int8:+64", "int8:99999999999"}) {
    CAPTURE(text);
    std::string error;
    try {
      parse_codec(text);
    } catch (const UsageError& e) {
      error = e.what();
    }
    CHECK_NE(error.find("\"" + text + "\""), std::string::npos);
    CHECK_NE(error.find("accepted: exact, bf16, int8"), std::string::npos);
  }
}
