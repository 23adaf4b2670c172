// Codec specs and options as the user spells them.
#include <string>

#include "fuzz.h"
#include "qcoll/base/error.h"
#include "qcoll/comm/options.h"

using namespace qcoll;
using namespace qcoll::comm;
using attacks::ensure;

namespace {

// what() is a C string and ends at a zero byte of the value that it quotes.
bool names(const UsageError& error, const std::string& value) {
  return std::string(error.what()).find(value.substr(0, value.find('\0'))) != std::string::npos;
}

void codec(const std::string& text) {
  try {
    const wire::CodecSpec spec = wire::parse_codec(text);
    ensure(wire::parse_codec(wire::to_string(spec)) == spec, "a codec's spelling is read back");
  } catch (const UsageError& error) {
    ensure(names(error, text), "errors name the value");
  }
}

void codec_list(const std::string& text) {
  try {
    const CodecList codecs = parse_codec_list("all_gather", text);
    ensure(!codecs.empty(), "a list has an entry");
    ensure(parse_codec_list("all_gather", to_string(codecs)) == codecs, "lists are read back");
  } catch (const UsageError& error) {
    ensure(names(error, "all_gather"), "errors name the key");
  }
}

}  // namespace

QCOLL_FUZZ_TARGET(options) {
  // All but tuning, which would open whatever file the input names; see fuzz_tuning.cc.
  static constexpr const char* kKeys[] = {
      "all_gather",        "reduce_scatter", "all_reduce", "all_to_all",
      "all_gather_dtypes", "min_bytes",      "coalesced",  "scope"};
  const std::uint8_t choice = in.u8();
  const std::string value = in.text();
  if (choice >= 9) return choice % 2 ? codec(value) : codec_list(value);
  Settings settings;
  try {
    settings.set(choice < 8 ? kKeys[choice] : value, value);
  } catch (const UsageError& error) {
    ensure(names(error, value), "errors name the value");
    return;
  }
  Options options;
  settings.apply_to(options);
  Settings stronger;
  stronger.overlay(settings);
  Options again;
  stronger.apply_to(again);
  ensure(!settings.empty() && options.to_string() == again.to_string(),
         "an overlay on nothing is the same settings");
}
