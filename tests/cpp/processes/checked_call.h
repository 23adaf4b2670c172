// One collective on random data, compared with what it must be, in double.
#pragma once

#include <cstddef>
#include <cstdint>
#include <future>
#include <string>
#include <vector>

#include "qcoll/comm/group.h"

namespace qcoll::test {

enum class Verb { kAllGather, kReduceScatter, kAllReduce, kAllToAll };
std::string name_of(Verb verb);

struct CallSpec {
  Verb verb = Verb::kAllReduce;
  std::string codec = "exact";  // as in Options, for each level
  DType dtype = DType::kF32;
  std::size_t count = 0;   // of a slice; of the tensor of an all-reduce
  std::uint64_t seed = 0;  // the same on every rank
  Clock::duration timeout = std::chrono::seconds(60);
};

// Its buffers live as long as the call: the destructor waits for its end.
class CheckedCall {
 public:
  CheckedCall(comm::Group& group, CallSpec spec);
  ~CheckedCall();
  CheckedCall(const CheckedCall&) = delete;
  CheckedCall& operator=(const CheckedCall&) = delete;

  // Throws what the group does when it refuses the call.
  void start(bool inline_if_idle);
  // Waits, and throws the call's error, or one that names what is wrong in the result.
  void check();
  // Of what every rank must have in the same bits; 0 for verbs that give each its own.
  std::uint64_t digest() const;

 private:
  using Buffer = std::vector<std::byte>;

  void prepare();
  void run(std::uint64_t sequence);
  double expected(std::size_t buffer, std::size_t i) const;
  double error_limit() const;
  std::string text() const;
  std::size_t split(Rank from, Rank to) const;
  Buffer filled(Rank from, Rank to, std::size_t count) const;

  comm::Group& group_;
  const CallSpec spec_;
  const int size_;
  const Rank rank_;
  // One allocation for each slice, of its exact size: a sanitizer sees what reaches beyond.
  std::vector<Buffer> inputs_;
  std::vector<Buffer> outputs_;
  std::future<void> ended_;
};

}  // namespace qcoll::test
