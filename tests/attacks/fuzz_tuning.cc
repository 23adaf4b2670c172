// Cost models as a file brings them.
#include <cmath>
#include <string>

#include "fuzz.h"
#include "qcoll/base/error.h"
#include "qcoll/comm/cost_model.h"

using namespace qcoll;
using attacks::ensure;

QCOLL_FUZZ_TARGET(tuning) {
  const std::uint64_t bytes = in.u64();
  const std::string text = "qcoll-tuning 1\n" + in.text();
  try {
    const comm::CostModel model = comm::CostModel::parse(text);
    ensure(comm::CostModel::parse(text).fingerprint() == model.fingerprint(), "reading is stable");
    for (const char* layout : {"1+1", "2+2", "3+1", "1+1+1+1/2x2"})
      for (const auto collective : {wire::Collective::kAllGather, wire::Collective::kReduceScatter,
                                    wire::Collective::kAllReduce, wire::Collective::kAllToAll})
        for (const auto dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI64})
          for (const char* codec : {"exact", "int8:256", "int8:256/int4:128"}) {
            const auto seconds = model.predict(layout, collective, dtype,
                                               comm::parse_codec_list("codec", codec), bytes);
            ensure(!seconds || (std::isfinite(*seconds) && *seconds > 0), "times are times");
            ensure(!seconds || is_encodable(dtype), "only what codecs encode has times");
          }
  } catch (const UsageError& error) {
    const std::string said = error.what();
    ensure(said.starts_with("line ") && said.find("expected") != std::string::npos,
           "errors say where and what was expected");
    for (const char c : said) ensure(c >= ' ' && c <= '~', "a message is plain text");
  }
}
