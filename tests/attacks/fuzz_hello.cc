// A hello as a stranger sends it.
#include <algorithm>

#include "fuzz.h"
#include "qcoll/transport/handshake.h"

using namespace qcoll;
using namespace qcoll::transport;
using attacks::ensure;

QCOLL_FUZZ_TARGET(hello) {
  const ConstBytes raw = in.rest();
  const auto hello = parse_hello(raw);
  if (!hello) return;
  ensure(raw.size() == Hello::kBytes, "only a whole hello is taken");
  const auto again = serialize(*hello);
  ensure(std::equal(again.begin(), again.end(), raw.begin()), "a hello has one form only");
}
