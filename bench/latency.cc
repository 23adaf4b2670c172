// Seconds of one small all-gather between two ranks, without Python and torch: two threads with a
// group each, over the real transports. Prints "layer layout p10 median p90", in microseconds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "map_store.h"
#include "qcoll/comm/group.h"

using namespace qcoll;

namespace {

constexpr std::size_t kCount = 128;  // float32 of each rank: 1 KiB gathered
constexpr int kCalls = 200;          // in a row, for one time
constexpr int kTimes = 201;

void measure(const std::string& layout, comm::Group& group, bool through_group) {
  std::vector<float> mine(kCount, 1.0F);
  std::vector<float> whole(2 * kCount);
  const std::vector<std::byte*> slices{reinterpret_cast<std::byte*>(whole.data()),
                                       reinterpret_cast<std::byte*>(whole.data() + kCount)};
  std::uint64_t sequence = group.latest_sequence();
  const auto gather = [&](std::uint64_t number) {
    comm::Call call{.verb = "all_gather", .sequence = number, .dtype = DType::kF32};
    call.choice.exact_because = "benchmark";
    call.timeout = std::chrono::seconds(30);
    group.communicator().all_gather(call, reinterpret_cast<const std::byte*>(mine.data()), slices,
                                    kCount);
  };
  std::vector<double> microseconds;
  for (int i = 0; i < kTimes; ++i) {
    const auto begin = Clock::now();
    for (int k = 0; k < kCalls; ++k) {
      if (through_group)
        group.enqueue("all_gather(128 elements per rank of Float, codec exact)", true, gather,
                      [](std::exception_ptr error) {
                        if (error) std::rethrow_exception(error);
                      });
      else
        gather(++sequence);
    }
    const std::chrono::duration<double, std::micro> spent = Clock::now() - begin;
    microseconds.push_back(spent.count() / kCalls);
  }
  std::sort(microseconds.begin(), microseconds.end());
  if (group.topology().rank() == 0)
    std::printf("%s %s %.3f %.3f %.3f\n", through_group ? "group" : "communicator", layout.c_str(),
                microseconds[kTimes / 10], microseconds[kTimes / 2], microseconds[kTimes * 9 / 10]);
}

}  // namespace

int main() {
  for (const bool one_node : {true, false}) {
    // Calls of a group number themselves, those of a bare communicator are numbered here.
    for (const bool through_group : {false, true}) {
      test::MapStore store;
      std::vector<std::thread> ranks;
      for (int rank = 0; rank < 2; ++rank)
        ranks.emplace_back([&, rank] {
          comm::GroupConfig config{.rank = rank, .size = 2, .options = {}};
          config.node = one_node ? "node" : "node" + std::to_string(rank);
          comm::Group group(store, config);
          measure(one_node ? "shared-memory" : "loopback-TCP", group, through_group);
        });
      for (auto& rank : ranks) rank.join();
    }
  }
}
