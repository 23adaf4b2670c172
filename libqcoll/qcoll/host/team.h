// Threads that work on one chunk together. They belong to one data path and are asleep, or about
// to be, between chunks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace qcoll::host {

class Team {
 public:
  // This thread included; with 1 there are no others. They start at the first piece of work.
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  using Work = std::function<void(std::size_t begin, std::size_t count)>;
  // Cuts 0..count into parts at multiples of `unit`, which whoever is free takes, and returns when
  // all are done: a thread that the system does not run holds nothing up. Small counts stay on the
  // calling thread. What a part throws is thrown here.
  template <class Callable>
  void split(std::size_t count, std::size_t unit, const Callable& work) {
    if (threads_ == 1 || count < 2 * kLeastElements)
      work(std::size_t{0}, count);
    else
      share(count, unit, work);
  }

 private:
  // Below this, waking another thread takes longer than the work.
  static constexpr std::size_t kLeastElements = 8 * 1024;

  void share(std::size_t count, std::size_t unit, const Work& work);
  void start();
  void serve();
  bool work_on_next();  // false: nothing is left to take

  const int threads_;
  const int owner_pid_;
  std::vector<std::thread> others_;
  // The turn in the upper half, the parts that nobody has taken in the lower: whoever takes one
  // knows that it is of this turn, and that the turn lasts until the part is done.
  std::atomic<std::uint64_t> ticket_{0};
  std::atomic<std::uint32_t> turn_{0};  // to sleep on; changes after ticket_, and at the end
  std::atomic<bool> stop_{false};
  // Of this turn.
  const Work* work_ = nullptr;
  std::size_t count_ = 0;
  std::size_t part_count_ = 0;
  std::vector<std::exception_ptr> errors_;  // by part
  std::atomic<std::uint32_t> done_{0};
};

}  // namespace qcoll::host
