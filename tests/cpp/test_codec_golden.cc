// The golden vectors of golden/make_golden.py, which knows nothing of this library: every row
// writes exactly these chunks and reads exactly these elements out of them.
#include <doctest/doctest.h>

#include <fstream>
#include <string>
#include <tuple>
#include <vector>

#include "qcoll/codec/codec.h"
#include "test_codec_data.h"

using namespace qcoll;
using codec_test::Guarded;

namespace {

std::vector<std::uint8_t> bytes_of(const std::string& hex) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<std::uint8_t>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

DType type_named(const std::string& name) {
  for (const DType t : codec_test::kTypes)
    if (name_of(t) == name) return t;
  FAIL("no type " << name);
  return DType::kF32;
}

void check_line(const std::string& codec, const std::string& type, std::size_t count,
                const std::vector<std::uint8_t>& x, const std::vector<std::uint8_t>& chunk,
                const std::vector<std::uint8_t>& y) {
  const wire::CodecSpec spec = wire::parse_codec(codec);
  const DType t = type_named(type);
  const Guarded in(x.size()), encoded(chunk.size()), out(y.size());
  std::memcpy(in.data(), x.data(), x.size());
  for (const codec::Kernels* row : codec::rows()) {
    INFO(row->isa << " " << codec << " " << type << " x " << count);
    codec::encode(spec, t, in.data(), count, {encoded.data(), encoded.size()}, *row);
    CHECK(encoded.bytes() == chunk);
    codec::decode(spec, t, {encoded.data(), encoded.size()}, count, out.data(), *row);
    CHECK(out.bytes() == y);
  }
}

}  // namespace

TEST_CASE("codec golden: every row writes and reads the golden chunks") {
  int lines = 0;
  for (const char* file : {"int8_float32", "int8_bfloat16", "int8_float16", "int4_float32",
                           "int4_bfloat16", "int4_float16"}) {
    std::ifstream in(std::string(QCOLL_GOLDEN_DIR) + "/" + file + ".txt");
    REQUIRE(in.good());
    std::string codec, type, x, chunk, y;
    std::size_t count = 0;
    for (; in >> codec >> type >> count >> x >> chunk >> y; ++lines)
      check_line(codec, type, count, bytes_of(x), bytes_of(chunk), bytes_of(y));
  }
  CHECK(lines == 180);
}
