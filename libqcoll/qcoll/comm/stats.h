// What a group has sent, by the name of the verb.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace qcoll::comm {

struct CollectiveStats {
  std::uint64_t calls = 0;
  std::uint64_t payload_bytes = 0;  // as the caller passed them: gathered, or unreduced
  std::uint64_t within_node_bytes = 0;
  std::uint64_t across_nodes_bytes = 0;
  std::map<std::string, std::uint64_t> exact_calls;  // by reason
  std::uint64_t nonfinite_blocks = 0;
  double encode_seconds = 0;
  double decode_seconds = 0;
  double wait_seconds = 0;

  void operator+=(const CollectiveStats& other) {
    calls += other.calls;
    payload_bytes += other.payload_bytes;
    within_node_bytes += other.within_node_bytes;
    across_nodes_bytes += other.across_nodes_bytes;
    for (const auto& [reason, count] : other.exact_calls) exact_calls[reason] += count;
    nonfinite_blocks += other.nonfinite_blocks;
    encode_seconds += other.encode_seconds;
    decode_seconds += other.decode_seconds;
    wait_seconds += other.wait_seconds;
  }
};

class Stats {
 public:
  void add(const std::string& verb, const CollectiveStats& call) {
    const std::lock_guard lock(mutex_);
    by_verb_[verb] += call;
  }
  std::map<std::string, CollectiveStats> snapshot() const {
    const std::lock_guard lock(mutex_);
    return by_verb_;
  }
  void reset() {
    const std::lock_guard lock(mutex_);
    by_verb_.clear();
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, CollectiveStats> by_verb_;
};

}  // namespace qcoll::comm
