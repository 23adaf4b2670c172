#include "qcoll/wire/codec_spec.h"

#include <charconv>

#include "qcoll/base/error.h"

namespace qcoll::wire {
namespace {

constexpr std::uint16_t kDefaultBlockInt8 = 256;
constexpr std::uint16_t kDefaultBlockInt4 = 128;

[[noreturn]] void reject(std::string_view text, const std::string& why) {
  throw UsageError("codec \"" + std::string(text) + "\": " + why +
                   "; accepted: exact, bf16, int8[:block], int4[:block] with block a multiple of " +
                   std::to_string(kMinBlock) + " from " + std::to_string(kMinBlock) + " to " +
                   std::to_string(kMaxBlock) + ", for example \"int8:256\"");
}

std::uint16_t parse_block(std::string_view text, std::string_view digits) {
  unsigned block = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), block);
  if (error != std::errc{} || end != digits.data() + digits.size() || digits.empty())
    reject(text, "the block \"" + std::string(digits) + "\" is not a number");
  if (block < kMinBlock || block > kMaxBlock || block % kMinBlock != 0)
    reject(text, "block " + std::to_string(block) + " is out of range");
  return static_cast<std::uint16_t>(block);
}

}  // namespace

CodecSpec parse_codec(std::string_view text) {
  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const bool has_block = colon != std::string_view::npos;
  if (name == "exact" || name == "bf16") {
    if (has_block) reject(text, "\"" + std::string(name) + "\" takes no block");
    return {.kind = name == "exact" ? CodecSpec::Kind::kExact : CodecSpec::Kind::kBf16};
  }
  if (name != "int8" && name != "int4") reject(text, "unknown codec");
  const bool is_int8 = name == "int8";
  const std::uint16_t block = has_block ? parse_block(text, text.substr(colon + 1))
                                        : (is_int8 ? kDefaultBlockInt8 : kDefaultBlockInt4);
  return {.kind = CodecSpec::Kind::kInt,
          .bits = static_cast<std::uint8_t>(is_int8 ? 8 : 4),
          .block = block};
}

std::string to_string(CodecSpec spec) {
  switch (spec.kind) {
    case CodecSpec::Kind::kExact:
      return "exact";
    case CodecSpec::Kind::kBf16:
      return "bf16";
    case CodecSpec::Kind::kInt:
      return "int" + std::to_string(spec.bits) + ":" + std::to_string(spec.block);
  }
  return "codec kind " + std::to_string(static_cast<int>(spec.kind));
}

}  // namespace qcoll::wire
