// Groups of real processes, above all for sanitizers, under which the Python tests do not run.
//
//   qcoll_processes [--brief] [SCENARIO...]
//
// Status 0: every rank of every scenario was right.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <deque>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../ranks.h"
#include "checked_call.h"
#include "file_store.h"
#include "qcoll/base/error.h"
#include "rank_processes.h"

using namespace qcoll;
using namespace std::chrono_literals;
using test::CallSpec;
using test::CheckedCall;
using test::FileStore;
using test::Verb;
namespace fs = std::filesystem;

namespace {

bool brief = false;

#if defined(__SANITIZE_THREAD__)
constexpr auto kWakeLimit = 3s;  // every access costs ten times as much
#else
constexpr auto kWakeLimit = 1s;
#endif

struct Setup {
  std::string nodes;
  std::string transport;  // memory, tcp, encrypted

  int size() const { return static_cast<int>(nodes.size()); }
  std::string text() const { return "nodes " + nodes + ", " + transport; }
};

// "tcp": streams within nodes too. "encrypted" has memory within them.
std::vector<Setup> setups() {
  if (brief) return {{"001", "encrypted"}, {"01", "memory"}};
  std::vector<Setup> all;
  for (const std::string nodes : {"0011", "001", "01"})
    for (const std::string transport : {"memory", "tcp", "encrypted"})
      all.push_back({nodes, transport});
  all.push_back({"00", "memory"});
  return all;
}

std::unique_ptr<comm::Group> form(const Setup& setup, Rank rank, const fs::path& folder) {
  FileStore store(folder);
  comm::GroupConfig config{.rank = rank, .size = setup.size(), .options = {}, .node = ""};
  config.node = test::labels_of(test::nodes_of(setup.nodes))[rank];
  config.share_memory = setup.transport != "tcp";
  config.encrypt = setup.transport == "encrypted";
  config.timeout = 60s;
  return std::make_unique<comm::Group>(store, config);
}

void expect(bool right, const std::string& what) {
  if (!right) throw std::runtime_error(what);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ---- many collectives ---------------------------------------------------------------------------

// What may be in flight together.
std::vector<std::vector<CallSpec>> plan() {
  const std::vector<DType> floats{DType::kF32, DType::kBF16, DType::kF16};
  std::vector<std::vector<CallSpec>> batches;
  const auto add = [&](Verb verb, std::size_t count) {
    auto& batch = batches.emplace_back();
    for (const DType dtype : floats)
      for (const std::string codec : {"exact", "int8:256", "int8:256/int4:128"})
        batch.push_back({.verb = verb, .codec = codec, .dtype = dtype, .count = count});
    if (verb == Verb::kReduceScatter || verb == Verb::kAllReduce) return;
    for (const DType dtype : {DType::kF64, DType::kI64, DType::kU8, DType::kI16, DType::kBool})
      batch.push_back({.verb = verb, .dtype = dtype, .count = count});
  };
  const std::vector<Verb> verbs{Verb::kAllGather, Verb::kReduceScatter, Verb::kAllReduce,
                                Verb::kAllToAll};
  const std::vector<std::size_t> counts =
      brief ? std::vector<std::size_t>{1, 5001} : std::vector<std::size_t>{0, 1, 257, 10007};
  for (const std::size_t count : counts)
    for (const Verb verb : verbs) add(verb, count);
  // Of several chunks.
  for (const Verb verb : verbs)
    for (const std::string codec : {"exact", "int8:256/int4:128"})
      batches.push_back({{.verb = verb, .codec = codec, .count = 200003}});
  return batches;
}

// Every rank's digest must be that of this one.
void compare_digests(comm::Group& group, std::uint64_t digest) {
  const int size = group.topology().size();
  std::vector<std::uint64_t> all(size);
  std::vector<std::byte*> slices;
  for (auto& other : all) slices.push_back(reinterpret_cast<std::byte*>(&other));
  std::promise<void> ended;
  group.enqueue(
      "all_gather of digests", true,
      [&](std::uint64_t sequence) {
        comm::Call call{.verb = "digests", .sequence = sequence, .dtype = DType::kI64};
        call.choice.exact_because = "digests";
        group.communicator().all_gather(call, reinterpret_cast<const std::byte*>(&digest), slices,
                                        1);
      },
      [&](std::exception_ptr error) { error ? ended.set_exception(error) : ended.set_value(); });
  ended.get_future().get();
  for (Rank r = 0; r < size; ++r)
    expect(all[r] == digest, "rank " + std::to_string(r) + " has other bits than rank " +
                                 std::to_string(group.topology().rank()));
}

enum class Mode { kInline, kQueued, kMixed };

void run_plan(comm::Group& group, Mode mode, std::uint64_t seed) {
  std::uint64_t digest = 0;
  for (const auto& batch : plan()) {
    std::deque<CheckedCall> calls;
    for (CallSpec spec : batch) {
      spec.seed = ++seed;
      calls.emplace_back(group, spec);
    }
    bool at_once = mode == Mode::kInline;
    for (CheckedCall& call : calls) {
      if (mode == Mode::kMixed) at_once = !at_once;
      call.start(at_once);
    }
    for (CheckedCall& call : calls) {
      call.check();
      digest = digest * 31 + call.digest();
    }
  }
  compare_digests(group, digest);
}

// Two groups on a thread each, and a third thread that looks on as a monitor would.
void collectives(const Setup& setup, Mode second, Rank rank, const fs::path& folder) {
  const auto first = form(setup, rank, folder / "first");
  std::atomic<int> at_work{2};
  test::run_ranks(3, [&](int thread) {
    if (thread == 2) {
      while (at_work > 0) {
        first->flight_record();
        first->stats().snapshot();
        std::this_thread::sleep_for(1ms);
      }
      return;
    }
    const std::shared_ptr<void> done(nullptr, [&](void*) { --at_work; });
    if (thread == 0) return run_plan(*first, Mode::kInline, 0);
    const auto group = form(setup, rank, folder / "second");
    run_plan(*group, second, 5000);
    group->shutdown(30s);
  });
}

bool scenario_collectives() {
  bool well = true;
  int number = 0;
  for (const Setup& setup : setups()) {
    const Mode second = ++number % 2 == 0 ? Mode::kMixed : Mode::kQueued;
    well &= test::run_processes({.name = "collectives, " + setup.text(),
                                 .size = setup.size(),
                                 .victim = {},
                                 .run = [&](Rank rank, const fs::path& folder) {
                                   collectives(setup, second, rank, folder);
                                 }});
  }
  return well;
}

// ---- groups that come and go --------------------------------------------------------------------

void forming(const Setup& setup, Rank rank, const fs::path& folder) {
  for (int round = 0; round < (brief ? 3 : 10); ++round) {
    // Two at a time; the last of a process ends the thread that serves them.
    test::run_ranks(2, [&](int thread) {
      const auto name = std::to_string(round) + "-" + std::to_string(thread);
      const auto group = form(setup, rank, folder / name);
      CheckedCall call(*group, {.count = 1000, .seed = 1});
      call.start(round % 2 == 0);
      call.check();
      // Half of them leave with a goodbye of their own, half by the destructor.
      if (thread == 0) group->shutdown(10s);
    });
  }
}

bool scenario_forming() {
  bool well = true;
  for (const Setup& setup : setups())
    well &= test::run_processes(
        {.name = "forming, " + setup.text(),
         .size = setup.size(),
         .victim = {},
         .run = [&](Rank rank, const fs::path& folder) { forming(setup, rank, folder); }});
  return well;
}

// ---- the end of a group -------------------------------------------------------------------------

constexpr int kCallsBefore = 5;

// Collectives until one fails, several at a time when they are queued.
TransportError call_until_error(comm::Group& group, bool queued, std::atomic<int>& ended) {
  try {
    for (std::uint64_t seed = 1;; ++seed) {
      std::deque<CheckedCall> calls;
      for (int i = 0; i < (queued ? 3 : 1); ++i)
        calls.emplace_back(group, CallSpec{.verb = i == 1 ? Verb::kAllGather : Verb::kAllReduce,
                                           .codec = i == 2 ? "exact" : "int8:256/int4:128",
                                           .count = 60001,
                                           .seed = seed});
      for (CheckedCall& call : calls) call.start(!queued);
      for (CheckedCall& call : calls) call.check();
      ++ended;
    }
  } catch (const TransportError& error) {
    return error;
  }
}

// All processes of a machine share this clock.
void note_time(FileStore& notes) {
  notes.set("ended", std::to_string(Clock::now().time_since_epoch().count()));
}

void expect_soon_after(FileStore& notes, Clock::time_point now) {
  const Clock::time_point since{Clock::duration(std::stoll(notes.get("ended", Deadline(5s))))};
  expect(now - since < kWakeLimit,
         "woke only " + std::to_string(std::chrono::duration<double>(now - since).count()) +
             " s later");
}

void expect_refused(comm::Group& group, const std::string& why) {
  try {
    CheckedCall call(group, {.count = 10});
    call.start(true);
    call.check();
  } catch (const TransportError& error) {
    return expect(
        contains(error.what(), why),
        "a later call is refused with: " + std::string(error.what()) + "; expected in it: " + why);
  }
  throw std::runtime_error("a later call works; expected: " + why);
}

void death(const Setup& setup, Rank victim, int delay, Rank rank, const fs::path& folder) {
  const auto group = form(setup, rank, folder / "group");
  FileStore notes(folder / "notes");
  const bool queued = delay % 2 == 1;
  std::atomic<int> ended{0};
  std::thread killer;
  if (rank == victim)
    killer = std::thread([&] {
      while (ended < kCallsBefore) std::this_thread::yield();
      std::this_thread::sleep_for(delay * 700us);
      note_time(notes);
      ::kill(::getpid(), SIGKILL);
    });
  const TransportError error = call_until_error(*group, queued, ended);
  const auto now = Clock::now();
  if (killer.joinable()) killer.join();
  expect(error.peer() == victim && contains(error.what(), "rank " + std::to_string(victim)),
         "the death of rank " + std::to_string(victim) + " is told as: " + error.what());
  expect_soon_after(notes, now);
  expect_refused(*group, "rank " + std::to_string(victim));
}

bool scenario_death() {
  bool well = true;
  for (const Setup& setup : setups())
    for (int delay = 0; delay < (brief ? 2 : 6); ++delay) {
      const Rank victim = delay % 3 == 0 ? 0 : setup.size() - 1;
      well &= test::run_processes({.name = "death of rank " + std::to_string(victim) + " after " +
                                           std::to_string(delay) + " steps, " + setup.text(),
                                   .size = setup.size(),
                                   .victim = victim,
                                   .run = [&](Rank rank, const fs::path& folder) {
                                     death(setup, victim, delay, rank, folder);
                                   }});
    }
  return well;
}

void abort(const Setup& setup, int delay, Rank rank, const fs::path& folder) {
  const auto group = form(setup, rank, folder / "group");
  FileStore notes(folder / "notes");
  std::atomic<int> ended{0};
  std::thread aborter;
  if (rank == 1)
    aborter = std::thread([&] {
      while (ended < kCallsBefore) std::this_thread::yield();
      std::this_thread::sleep_for(delay * 700us);
      note_time(notes);
      group->abort("the user said so");
    });
  const TransportError error = call_until_error(*group, delay % 2 == 1, ended);
  const auto now = Clock::now();
  if (aborter.joinable()) aborter.join();
  expect(contains(error.what(), "the user said so"),
         "an abort is told as: " + std::string(error.what()));
  expect_soon_after(notes, now);
  expect_refused(*group, "the user said so");
}

bool scenario_abort() {
  bool well = true;
  for (const Setup& setup : setups())
    for (int delay = 0; delay < (brief ? 2 : 6); ++delay)
      well &= test::run_processes(
          {.name = "abort after " + std::to_string(delay) + " steps, " + setup.text(),
           .size = setup.size(),
           .victim = {},
           .run = [&](Rank rank, const fs::path& folder) { abort(setup, delay, rank, folder); }});
  return well;
}

// Queued calls end before the goodbye, also those of a rank that came late.
void shut_down_well(const Setup& setup, Rank rank, const fs::path& folder) {
  const auto group = form(setup, rank, folder / "well");
  if (rank == 1) std::this_thread::sleep_for(50ms);
  std::deque<CheckedCall> calls;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const Verb verb = std::vector{Verb::kAllGather, Verb::kReduceScatter, Verb::kAllReduce,
                                  Verb::kAllToAll}[seed % 4];
    calls.emplace_back(*group,
                       CallSpec{.verb = verb, .codec = "int8:256", .count = 30001, .seed = seed});
    calls.back().start(false);
  }
  group->shutdown(30s);
  for (CheckedCall& call : calls) call.check();
  expect_refused(*group, "has been shut down");
}

void shut_down_in_flight(const Setup& setup, Rank rank, const fs::path& folder) {
  const auto group = form(setup, rank, folder / "in_flight");
  if (rank > 0) {
    for (const Deadline deadline(20s); !group->abort_flag().raised() && !deadline.passed();)
      std::this_thread::sleep_for(1ms);
    return expect_refused(*group, "calls still in flight");
  }
  CheckedCall call(*group, {.count = 1000, .seed = 1});
  call.start(false);
  group->shutdown(20ms);
  try {
    call.check();
  } catch (const TransportError& error) {
    return expect(contains(error.what(), "calls still in flight"), error.what());
  }
  throw std::runtime_error("a call without its peers works");
}

bool scenario_shutdown() {
  bool well = true;
  for (const Setup& setup : setups())
    well &= test::run_processes({.name = "shutdown, " + setup.text(),
                                 .size = setup.size(),
                                 .victim = {},
                                 .run = [&](Rank rank, const fs::path& folder) {
                                   shut_down_well(setup, rank, folder);
                                   shut_down_in_flight(setup, rank, folder);
                                 }});
  return well;
}

struct Scenario {
  const char* name;
  bool (*run)();
};
constexpr Scenario kScenarios[] = {{"collectives", scenario_collectives},
                                   {"forming", scenario_forming},
                                   {"death", scenario_death},
                                   {"abort", scenario_abort},
                                   {"shutdown", scenario_shutdown}};

}  // namespace

int main(int argc, char** argv) {
  std::set<std::string> asked(argv + 1, argv + argc);
  brief = asked.erase("--brief") > 0;
  const bool all = asked.empty();
  bool well = true;
  for (const Scenario& scenario : kScenarios) {
    if (!all && asked.erase(scenario.name) == 0) continue;
    const Deadline watch(0s);
    const bool right = scenario.run();
    std::printf("%s: %s, %.1f s\n", scenario.name, right ? "right" : "wrong",
                watch.elapsed_seconds());
    std::fflush(stdout);
    well &= right;
  }
  for (const std::string& name : asked) std::fprintf(stderr, "no scenario %s\n", name.c_str());
  return well && asked.empty() ? 0 : 1;
}
