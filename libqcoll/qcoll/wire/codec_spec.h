// The identity of a codec, as options spell it and as messages carry it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace qcoll::wire {

struct CodecSpec {
  enum class Kind : std::uint8_t { kExact = 0, kBf16 = 1, kInt = 2 };

  Kind kind = Kind::kExact;
  std::uint8_t bits = 0;    // kInt: 4 or 8
  std::uint16_t block = 0;  // kInt: elements that share one scale, a multiple of 32 in [32, 4096]

  constexpr bool exact() const { return kind == Kind::kExact; }
  friend constexpr bool operator==(const CodecSpec&, const CodecSpec&) = default;
};

inline constexpr CodecSpec kExactCodec{};
inline constexpr std::uint16_t kMinBlock = 32;
inline constexpr std::uint16_t kMaxBlock = 4096;

// "exact", "bf16", "int8[:block]" (block 256 unless given), "int4[:block]" (block 128).
// Throws UsageError that names the text and the accepted forms.
CodecSpec parse_codec(std::string_view text);

// The canonical spelling, block included: parse_codec(to_string(spec)) == spec.
std::string to_string(CodecSpec spec);

}  // namespace qcoll::wire
