// What other ranks wrote into the rendezvous store: the secret, identities, refusals.
#include <map>
#include <string>
#include <vector>

#include "fuzz.h"
#include "qcoll/base/error.h"
#include "qcoll/topo/topology.h"
#include "qcoll/transport/roll_call.h"

using namespace qcoll;
using namespace qcoll::transport;
using namespace std::chrono_literals;
using attacks::ensure;

namespace {

constexpr int kRanks = 2;

class Written final : public Rendezvous {
 public:
  explicit Written(std::map<std::string, std::string> values) : values_(std::move(values)) {}
  void set(const std::string&, const std::string&) override {}
  bool has(const std::string& key) override { return values_.contains(key); }
  std::string get(const std::string& key, const Deadline&) override {
    const auto found = values_.find(key);
    if (found == values_.end()) throw TransportError("nobody set " + key);
    return found->second;
  }

 private:
  std::map<std::string, std::string> values_;
};

// Both kinds of error are documented; any other ends the program.
template <class Function>
void attempt(Function function) {
  try {
    function();
  } catch (const UsageError&) {
  } catch (const TransportError&) {
  }
}

}  // namespace

QCOLL_FUZZ_TARGET(records) {
  static const Identity mine = own_identity(0, "node", 1, {parse_address("127.0.0.1")}, "a=1; b=2");
  std::map<std::string, std::string> values{{"qcoll/secret", in.text_until('\0')}};
  for (Rank rank = 1; rank < kRanks && !in.empty(); ++rank)
    values[group_key(0, "rank", rank)] = values["qcoll/hello/" + std::to_string(rank)] =
        in.text_until('\0');
  Written store(std::move(values));
  const Deadline deadline(1ms);
  attempt([&] { share_secret(store, 1, kRanks, deadline); });
  attempt([&] { check_refusal_of(store, 1); });
  attempt([&] {
    GroupSecret secret;
    secret.tokens.resize(kRanks);
    const auto all = roll_call(store, mine, secret, deadline);
    ensure(all.size() == kRanks, "there is one identity for each rank");
    std::vector<std::string> labels;
    for (Rank rank = 0; rank < kRanks; ++rank) {
      const Identity& other = all[rank];
      ensure(other.rank == rank && other.port > 0 && other.pid > 0, "a record is its rank's");
      try {
        addresses_to_dial(mine, other);
      } catch (const UsageError&) {
        ensure(false, "addresses of an accepted record are addresses");
      }
      ensure(may_share_memory(mine, other) == may_share_memory(other, mine), "both agree");
      ensure(!other.label().empty(), "it has a text");
      labels.push_back(other.node);
    }
    const topo::Topology topology(0, labels);
  });
}
