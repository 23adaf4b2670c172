// Which codec a call gets, and why. A pure function of what all ranks share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "qcoll/base/types.h"
#include "qcoll/comm/cost_model.h"
#include "qcoll/comm/options.h"
#include "qcoll/topo/topology.h"
#include "qcoll/wire/header.h"

namespace qcoll::comm {

// What context managers say on the calling thread.
struct ThreadPolicy {
  bool exact = false;
  Settings settings;
};

struct CallFacts {
  wire::Collective collective = wire::Collective::kAllGather;
  DType dtype = DType::kByte;
  std::uint64_t bytes = 0;  // of the gathered or unreduced tensor
  bool coalesced = false;
  bool list_form = false;
  bool spans_nodes = false;
  const LayoutCosts* costs = nullptr;  // what option tuning says of the group's layout
};

struct Choice {
  CodecList codecs = {wire::kExactCodec};
  std::string exact_because;  // empty: a codec applies

  bool exact() const { return !exact_because.empty(); }
};

// `given`: the codec= argument of an explicit verb, which always applies; throws UsageError when
// the dtype cannot be encoded.
Choice choose(const Options& options, const ThreadPolicy& thread,
              const std::optional<CodecList>& given, const CallFacts& facts);

// What the cost model says of the call with and without its codec, which is `given` or that of the
// options. In seconds; nothing where nothing was measured.
struct Prediction {
  std::optional<double> exact;
  std::optional<double> coded;
};
Prediction predict(const Options& options, const ThreadPolicy& thread,
                   const std::optional<CodecList>& given, const CallFacts& facts);

// The codec of each level of a topology. The level inside the node takes the first of a list, the
// outermost level that crosses nodes the last, further levels between them the ones between.
std::vector<wire::CodecSpec> codecs_by_level(const CodecList& codecs, const topo::Topology& topo);

}  // namespace qcoll::comm
