#include "qcoll/comm/options.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <set>

#include "qcoll/base/error.h"
#include "qcoll/comm/cost_model.h"

namespace qcoll::comm {
namespace {

constexpr std::array<std::string_view, 9> kKeys = {
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "all_gather_dtypes",
    "min_bytes",  "coalesced",      "scope",      "tuning"};

// Chunks hold whole blocks of every level's codec; see comm/chunking.h.
constexpr std::size_t kMaxCommonBlock = 32 * 1024;

// Read elsewhere: at import, when a group is formed, when the codec's kernels are chosen.
constexpr std::array<std::string_view, 8> kOtherVariables = {
    "QCOLL_DEFAULT", "QCOLL_DUMP", "QCOLL_ENCRYPT",       "QCOLL_FORCE_ISA",
    "QCOLL_NODE",    "QCOLL_SHM",  "QCOLL_SOCKET_IFNAME", "QCOLL_THREADS"};

std::string variable_of(std::string_view key) {
  std::string name = "QCOLL_";
  for (const char c : key) name += static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return name;
}

[[noreturn]] void reject(std::string_view key, std::string_view value,
                         const std::string& accepted) {
  throw UsageError("qcoll option " + std::string(key) + "=\"" + std::string(value) +
                   "\" is not understood; accepted: " + accepted);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> items;
  for (;;) {
    const std::size_t at = text.find(separator);
    items.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return items;
    text.remove_prefix(at + 1);
  }
}

std::vector<DType> parse_float_dtypes(std::string_view key, std::string_view text) {
  std::vector<DType> dtypes;
  for (const std::string_view name : split(text, ',')) {
    if (const auto dtype = parse_float_dtype(name))
      dtypes.push_back(*dtype);
    else if (!name.empty() || text.size() > 0)
      reject(key, text, "a list of fp32, bf16, fp16, for example \"bf16,fp16\"");
  }
  std::sort(dtypes.begin(), dtypes.end());
  dtypes.erase(std::unique(dtypes.begin(), dtypes.end()), dtypes.end());
  return dtypes;
}

std::size_t parse_size(std::string_view key, std::string_view text) {
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty())
    reject(key, text, "a number of bytes, 0 or more");
  return value;
}

// Empty: none, so that a group can do without the environment's.
std::shared_ptr<const CostModel> read_tuning(std::string_view key, std::string_view path) {
  if (path.empty()) return nullptr;
  try {
    return CostModel::read(std::string(path));
  } catch (const UsageError& error) {
    throw UsageError("qcoll option " + std::string(key) + "=\"" + std::string(path) +
                     "\" is not a cost model: " + error.what() +
                     ". `qcoll tune -o FILE` writes one");
  }
}

bool parse_bool(std::string_view key, std::string_view text) {
  if (text == "1" || text == "true" || text == "True") return true;
  if (text == "0" || text == "false" || text == "False") return false;
  reject(key, text, "1, true, 0, false");
}

}  // namespace

CodecList parse_codec_list(std::string_view key, std::string_view text) {
  CodecList codecs;
  std::size_t common = 1;
  try {
    for (const std::string_view item : split(text, '/')) {
      codecs.push_back(wire::parse_codec(item));
      common = std::lcm(common, std::max<std::size_t>(codecs.back().block, 1));
      if (common > kMaxCommonBlock) break;
    }
  } catch (const UsageError& error) {
    throw UsageError("qcoll option " + std::string(key) + "=\"" + std::string(text) +
                     "\": " + error.what());
  }
  if (common > kMaxCommonBlock)
    reject(key, text,
           "blocks whose least common multiple is at most " + std::to_string(kMaxCommonBlock) +
               ", for example powers of two");
  return codecs;
}

std::optional<DType> parse_float_dtype(std::string_view text) {
  if (text == "fp32" || text == "float32") return DType::kF32;
  if (text == "bf16" || text == "bfloat16") return DType::kBF16;
  if (text == "fp16" || text == "float16") return DType::kF16;
  return std::nullopt;
}

std::string to_string(const CodecList& codecs) {
  std::string text;
  for (const auto& codec : codecs) text += (text.empty() ? "" : "/") + wire::to_string(codec);
  return text;
}

std::string Options::to_string() const {
  std::string dtypes;
  for (const DType dtype : all_gather_dtypes)
    dtypes += (dtypes.empty() ? "" : ",") + std::string(name_of(dtype));
  return "all_gather=" + comm::to_string(all_gather) +
         "; reduce_scatter=" + comm::to_string(reduce_scatter) +
         "; all_reduce=" + comm::to_string(all_reduce) +
         "; all_to_all=" + comm::to_string(all_to_all) + "; all_gather_dtypes=" + dtypes +
         "; min_bytes=" + std::to_string(min_bytes) + "; coalesced=" + (coalesced ? "1" : "0") +
         "; scope=" + (scope == Scope::kAll ? "all" : "across_nodes") +
         "; tuning=" + (tuning ? "contents " + tuning->fingerprint() : "none");
}

void Settings::set(std::string_view key, std::string_view value) {
  if (key == "all_gather")
    all_gather_ = parse_codec_list(key, value);
  else if (key == "reduce_scatter")
    reduce_scatter_ = parse_codec_list(key, value);
  else if (key == "all_reduce")
    all_reduce_ = parse_codec_list(key, value);
  else if (key == "all_to_all")
    all_to_all_ = parse_codec_list(key, value);
  else if (key == "all_gather_dtypes")
    all_gather_dtypes_ = parse_float_dtypes(key, value);
  else if (key == "min_bytes")
    min_bytes_ = parse_size(key, value);
  else if (key == "coalesced")
    coalesced_ = parse_bool(key, value);
  else if (key == "scope") {
    if (value != "all" && value != "across_nodes") reject(key, value, "across_nodes, all");
    scope_ = value == "all" ? Scope::kAll : Scope::kAcrossNodes;
  } else if (key == "tuning") {
    tuning_ = read_tuning(key, value);
  } else {
    std::string keys;
    for (const auto k : kKeys) keys += (keys.empty() ? "" : ", ") + std::string(k);
    throw UsageError("qcoll has no option \"" + std::string(key) + "\"; it has " + keys);
  }
}

Settings Settings::from_environment() {
  Settings settings;
  std::set<std::string, std::less<>> known(kOtherVariables.begin(), kOtherVariables.end());
  for (const std::string_view key : kKeys) {
    const std::string name = variable_of(key);
    known.insert(name);
    if (const char* value = std::getenv(name.c_str()); value != nullptr && *value != '\0') try {
        settings.set(key, value);
      } catch (const UsageError& error) {
        throw UsageError("environment variable " + name + ": " + error.what());
      }
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view name =
        std::string_view(*entry).substr(0, std::string_view(*entry).find('='));
    if (!name.starts_with("QCOLL_") || known.contains(name)) continue;
    std::string names;
    for (const auto& k : known) names += (names.empty() ? "" : ", ") + k;
    throw UsageError("the environment has " + std::string(name) +
                     ", which qcoll does not know; it knows " + names);
  }
  return settings;
}

bool Settings::empty() const {
  return !all_gather_ && !reduce_scatter_ && !all_reduce_ && !all_to_all_ && !all_gather_dtypes_ &&
         !min_bytes_ && !coalesced_ && !scope_ && !tuning_;
}

void Settings::apply_to(Options& options) const {
  if (all_gather_) options.all_gather = *all_gather_;
  if (reduce_scatter_) options.reduce_scatter = *reduce_scatter_;
  if (all_reduce_) options.all_reduce = *all_reduce_;
  if (all_to_all_) options.all_to_all = *all_to_all_;
  if (all_gather_dtypes_) options.all_gather_dtypes = *all_gather_dtypes_;
  if (min_bytes_) options.min_bytes = *min_bytes_;
  if (coalesced_) options.coalesced = *coalesced_;
  if (scope_) options.scope = *scope_;
  if (tuning_) options.tuning = *tuning_;
}

void Settings::overlay(const Settings& stronger) {
  const auto take = [](auto& mine, const auto& theirs) {
    if (theirs) mine = theirs;
  };
  take(all_gather_, stronger.all_gather_);
  take(reduce_scatter_, stronger.reduce_scatter_);
  take(all_reduce_, stronger.all_reduce_);
  take(all_to_all_, stronger.all_to_all_);
  take(all_gather_dtypes_, stronger.all_gather_dtypes_);
  take(min_bytes_, stronger.min_bytes_);
  take(coalesced_, stronger.coalesced_);
  take(scope_, stronger.scope_);
  take(tuning_, stronger.tuning_);
}

}  // namespace qcoll::comm
