// What a user may set, how it is spelled, and how settings of different origin combine.
//
// Order: argument of the call > context manager > options of the group > environment > default.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qcoll/base/types.h"
#include "qcoll/wire/codec_spec.h"

namespace qcoll::comm {

class CostModel;

// One codec for each level, inner hop first; one alone serves all levels.
using CodecList = std::vector<wire::CodecSpec>;

// "int8:256/int4:128". Throws UsageError; `key` says which setting it belongs to.
CodecList parse_codec_list(std::string_view key, std::string_view text);
std::string to_string(const CodecList& codecs);

// "bf16" or "bfloat16", and likewise float16 and float32; nothing for other texts.
std::optional<DType> parse_float_dtype(std::string_view text);

enum class Scope : std::uint8_t {
  kAcrossNodes,  // groups inside one node are exact
  kAll,
};

// The ZeRO++ recipe, made safe: weights (16-bit gathers) in int8, gradients in int8 inside a node
// and int4 across, everything else exact.
struct Options {
  CodecList all_gather = {{wire::CodecSpec::Kind::kInt, 8, 256}};
  CodecList reduce_scatter = {{wire::CodecSpec::Kind::kInt, 8, 256},
                              {wire::CodecSpec::Kind::kInt, 4, 128}};
  CodecList all_reduce = {wire::kExactCodec};
  CodecList all_to_all = {wire::kExactCodec};
  std::vector<DType> all_gather_dtypes = {DType::kBF16, DType::kF16};
  std::size_t min_bytes = 64 * 1024;  // of the gathered or unreduced tensor
  bool coalesced = false;             // apply to the coalesced verbs too
  Scope scope = Scope::kAcrossNodes;
  std::shared_ptr<const CostModel> tuning;  // null: a codec is used wherever the others allow it

  // "all_gather=int8:256; reduce_scatter=...": equal on all ranks of a group.
  std::string to_string() const;
};

// Settings of one origin, by key. Keys and spellings are those of qcoll.Options; the environment
// has them in capitals with QCOLL_ before.
class Settings {
 public:
  // Throws UsageError that names the key, the value and what is accepted.
  void set(std::string_view key, std::string_view value);
  // A QCOLL_ variable that nothing reads is refused too: it is a misspelling.
  static Settings from_environment();

  bool empty() const;
  void apply_to(Options& options) const;
  void overlay(const Settings& stronger);

  // A group looks its own part of the file up once, when it is formed.
  static bool belongs_to_a_group(std::string_view key) { return key == "tuning"; }

 private:
  std::optional<CodecList> all_gather_;
  std::optional<CodecList> reduce_scatter_;
  std::optional<CodecList> all_reduce_;
  std::optional<CodecList> all_to_all_;
  std::optional<std::vector<DType>> all_gather_dtypes_;
  std::optional<std::size_t> min_bytes_;
  std::optional<bool> coalesced_;
  std::optional<Scope> scope_;
  std::optional<std::shared_ptr<const CostModel>> tuning_;
};

}  // namespace qcoll::comm
