#include "qcoll/comm/policy.h"

#include <algorithm>

#include "qcoll/base/error.h"

namespace qcoll::comm {
namespace {

const CodecList& option_for(const Options& options, wire::Collective collective) {
  switch (collective) {
    case wire::Collective::kAllGather:
      return options.all_gather;
    case wire::Collective::kReduceScatter:
      return options.reduce_scatter;
    case wire::Collective::kAllReduce:
      return options.all_reduce;
    case wire::Collective::kAllToAll:
      return options.all_to_all;
  }
  throw UsageError("unknown collective");
}

bool all_exact(const CodecList& codecs) {
  return std::all_of(codecs.begin(), codecs.end(), [](const auto& c) { return c.exact(); });
}

Prediction predict(const CodecList& codecs, const CallFacts& facts) {
  static const CodecList kExact = {wire::kExactCodec};
  if (facts.costs == nullptr) return {};
  const auto seconds = [&](const CodecList& list) {
    return facts.costs->predict(facts.collective, facts.dtype, list, facts.bytes);
  };
  return {.exact = seconds(kExact), .coded = all_exact(codecs) ? std::nullopt : seconds(codecs)};
}

// Options of a group as the thread's context managers leave them; copied only if these say
// something.
class Effective {
 public:
  Effective(const Options& options, const ThreadPolicy& thread) : options_(&options) {
    if (thread.settings.empty()) return;
    thread.settings.apply_to(overlaid_.emplace(options));
    options_ = &*overlaid_;
  }
  Effective(const Effective&) = delete;
  Effective& operator=(const Effective&) = delete;
  const Options& operator*() const { return *options_; }

 private:
  const Options* options_;
  std::optional<Options> overlaid_;
};

std::string why_exact(const Options& options, const ThreadPolicy& thread, const CallFacts& facts) {
  if (thread.exact) return "inside qcoll.exact()";
  if (!is_encodable(facts.dtype))
    return "dtype " + std::string(name_of(facts.dtype)) + " is not encoded";
  if (facts.list_form) return "list form";
  if (facts.coalesced && !options.coalesced) return "coalesced verb (option coalesced is off)";
  const CodecList& codecs = option_for(options, facts.collective);
  if (all_exact(codecs)) return "option " + std::string(name_of(facts.collective)) + "=exact";
  const auto& dtypes = options.all_gather_dtypes;
  if (facts.collective == wire::Collective::kAllGather &&
      std::find(dtypes.begin(), dtypes.end(), facts.dtype) == dtypes.end())
    return "dtype " + std::string(name_of(facts.dtype)) + " is not in option all_gather_dtypes";
  // Splits differ between ranks, so that their sizes cannot decide.
  const bool sized = facts.collective != wire::Collective::kAllToAll;
  if (sized && facts.bytes < options.min_bytes)
    return "smaller than option min_bytes=" + std::to_string(options.min_bytes);
  if (options.scope == Scope::kAcrossNodes && !facts.spans_nodes)
    return "group inside one node (option scope=across_nodes)";
  // Without the times, which depend on the size: statistics count calls by reason.
  const Prediction times = predict(codecs, facts);
  if (times.exact && times.coded && *times.exact <= *times.coded)
    return "exact is faster than " + to_string(codecs) + " by the cost model (option tuning)";
  return "";
}

}  // namespace

Choice choose(const Options& options, const ThreadPolicy& thread,
              const std::optional<CodecList>& given, const CallFacts& facts) {
  const auto exactly = [](std::string because) {
    return Choice{.codecs = {wire::kExactCodec}, .exact_because = std::move(because)};
  };
  if (given) {
    if (all_exact(*given)) return exactly("codec=\"exact\" in the call");
    if (!is_encodable(facts.dtype))
      throw UsageError("codec=\"" + to_string(*given) + "\" cannot encode " +
                       std::string(name_of(facts.dtype)) +
                       "; pass float32, bfloat16 or float16, or codec=\"exact\"");
    return {.codecs = *given, .exact_because = {}};
  }
  const Effective effective(options, thread);
  if (std::string because = why_exact(*effective, thread, facts); !because.empty())
    return exactly(std::move(because));
  return {.codecs = option_for(*effective, facts.collective), .exact_because = {}};
}

Prediction predict(const Options& options, const ThreadPolicy& thread,
                   const std::optional<CodecList>& given, const CallFacts& facts) {
  const Effective effective(options, thread);
  return predict(given ? *given : option_for(*effective, facts.collective), facts);
}

std::vector<wire::CodecSpec> codecs_by_level(const CodecList& codecs, const topo::Topology& topo) {
  std::vector<wire::CodecSpec> by_level;
  const auto& levels = topo.levels();
  std::size_t crossing = 0;
  for (std::size_t l = 0; l < levels.size(); ++l) {
    if (!levels[l].crosses_nodes) {
      by_level.push_back(codecs.front());
      continue;
    }
    const bool outermost = l + 1 == levels.size();
    by_level.push_back(outermost ? codecs.back() : codecs[std::min(++crossing, codecs.size() - 1)]);
  }
  return by_level;
}

}  // namespace qcoll::comm
