#include "qcoll/host/team.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "qcoll/base/types.h"

namespace qcoll::host {
namespace {

// So that a thread that comes late, or not at all, leaves little undone.
constexpr std::size_t kPartsPerThread = 2;
// About 20 us: as long as the next chunk of the same call usually takes to come.
constexpr int kSpins = 2000;

}  // namespace

Team::Team(int threads)
    : threads_(threads),
      owner_pid_(::getpid()),
      errors_(static_cast<std::size_t>(threads) * kPartsPerThread) {}

Team::~Team() {
  if (owner_pid_ != ::getpid()) {  // a forked child has the object but not its threads
    for (auto& other : others_) other.detach();
    return;
  }
  stop_.store(true, std::memory_order_release);
  turn_.fetch_add(1, std::memory_order_release);
  turn_.notify_all();
  for (auto& other : others_) other.join();
}

void Team::start() {
  for (int i = 1; i < threads_; ++i)
    others_.emplace_back([this] {
      ::pthread_setname_np(::pthread_self(), "qcoll_codec");
      serve();
    });
}

void Team::serve() {
  for (int spins = 0; !stop_.load(std::memory_order_acquire); ++spins) {
    const std::uint32_t turn = turn_.load(std::memory_order_acquire);
    if (work_on_next())
      spins = 0;
    else if (spins < kSpins)
      __builtin_ia32_pause();
    else
      turn_.wait(turn, std::memory_order_acquire);
  }
}

bool Team::work_on_next() {
  constexpr std::uint64_t kPartsMask = 0xffffffff;
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if ((ticket & kPartsMask) == 0) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acquire));
  const std::size_t part = (ticket & kPartsMask) - 1;
  const std::size_t begin = std::min(part * part_count_, count_);
  try {
    if (begin < count_) (*work_)(begin, std::min(part_count_, count_ - begin));
  } catch (...) {
    errors_[part] = std::current_exception();
  }
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void Team::share(std::size_t count, std::size_t unit, const Work& work) {
  const std::size_t parts = std::min(errors_.size(), count / kLeastElements);
  if (others_.empty()) start();
  work_ = &work;
  count_ = count;
  part_count_ = align_up(ceil_div(count, parts), unit);
  done_.store(0, std::memory_order_relaxed);
  const std::uint64_t turn = turn_.load(std::memory_order_relaxed) + 1;
  ticket_.store(turn << 32 | parts, std::memory_order_release);
  turn_.store(static_cast<std::uint32_t>(turn), std::memory_order_release);
  turn_.notify_all();
  while (work_on_next()) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != parts; ++spins) {
    if (spins < kSpins)
      __builtin_ia32_pause();
    else
      std::this_thread::yield();
  }
  std::exception_ptr first;
  for (auto& error : errors_) {
    if (!first) first = error;
    error = nullptr;
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace qcoll::host
