// Groups over the real transports: shared memory and TCP between threads of one process, formed
// through an in-process store.
#include <doctest/doctest.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <tuple>

#include "map_store.h"
#include "qcoll/base/error.h"
#include "qcoll/comm/group.h"
#include "ranks.h"

using namespace qcoll;
using namespace std::chrono_literals;

namespace {

struct Setup {
  std::string nodes = "01";
  bool share_memory = true;
  bool encrypt = false;
  Clock::duration timeout = 30s;
};

comm::GroupConfig config_of(const Setup& setup, int rank) {
  const auto nodes = test::nodes_of(setup.nodes);
  return {.rank = rank,
          .size = static_cast<int>(nodes.size()),
          .options = {},
          .node = "node" + std::to_string(nodes[rank]),
          .agreement = "",
          .share_memory = setup.share_memory,
          .encrypt = setup.encrypt,
          .timeout = setup.timeout};
}

// Gathers rank + 1 in every element; returns whether all arrived.
bool gather_works(comm::Group& group, std::size_t count, bool inline_if_idle,
                  Clock::duration timeout = 30s) {
  const int size = group.topology().size();
  const Rank rank = group.topology().rank();
  std::vector<float> in(count, static_cast<float>(rank + 1));
  std::vector<float> out(count * size);
  std::vector<std::byte*> slices;
  for (int r = 0; r < size; ++r)
    slices.push_back(reinterpret_cast<std::byte*>(out.data() + r * count));
  std::promise<void> ended;
  group.enqueue(
      "all_gather(float32, " + std::to_string(count) + ")", inline_if_idle,
      [&](std::uint64_t sequence) {
        comm::Call call{.verb = "all_gather", .sequence = sequence, .dtype = DType::kF32};
        call.choice.exact_because = "test";
        call.timeout = timeout;
        group.communicator().all_gather(call, reinterpret_cast<const std::byte*>(in.data()), slices,
                                        count);
      },
      [&](std::exception_ptr error) { error ? ended.set_exception(error) : ended.set_value(); });
  ended.get_future().get();
  for (int r = 0; r < size; ++r)
    for (std::size_t i = 0; i < count; ++i)
      if (out[r * count + i] != static_cast<float>(r + 1)) return false;
  return true;
}

}  // namespace

TEST_CASE("groups form over shared memory and TCP and gather") {
  for (const std::string nodes : {"0", "00", "01", "0011", "010", "00112"})
    for (const auto [share_memory, encrypt] :
         {std::pair(true, false), std::pair(false, false), std::pair(true, true)}) {
      CAPTURE(nodes);
      CAPTURE(encrypt);
      test::MapStore store;
      const Setup setup{.nodes = nodes, .share_memory = share_memory, .encrypt = encrypt};
      const int size = static_cast<int>(nodes.size());
      test::run_ranks(size, [&](int rank) {
        comm::Group group(store, config_of(setup, rank));
        for (Rank peer = 0; peer < size; ++peer)
          CHECK_EQ(group.mesh().mapped(peer),
                   share_memory && peer != rank && nodes[peer] == nodes[rank]);
        for (const std::size_t count : {1, 1000, 200000})
          for (const bool inline_if_idle : {true, false})
            CHECK(gather_works(group, count, inline_if_idle));
      });
    }
}

TEST_CASE("several groups work at once from several threads") {
  test::MapStore stores[3];
  test::run_ranks(6, [&](int thread) {
    comm::Group group(stores[thread / 2], config_of({.nodes = "01"}, thread % 2));
    for (int i = 0; i < 50; ++i) CHECK(gather_works(group, 5000, i % 2 == 0));
  });
}

TEST_CASE("abort wakes a blocked rank and refuses later calls with the first cause") {
  test::MapStore store;
  test::run_ranks(2, [&](int rank) {
    comm::Group group(store, config_of({.nodes = "01"}, rank));
    if (rank == 1) {
      std::this_thread::sleep_for(100ms);
      group.abort("the user said so");
    } else {
      const auto since = Clock::now();
      CHECK_THROWS_AS(gather_works(group, 100, true), TransportError);
      CHECK_LT(Clock::now() - since, 5s);  // not the timeout of 30 s
    }
    std::string refusal;
    try {
      gather_works(group, 100, true);
    } catch (const TransportError& error) {
      refusal = error.what();
    }
    CAPTURE(refusal);
    CHECK_NE(refusal.find("the user said so"), std::string::npos);
    CHECK_NE(refusal.find("make a new one"), std::string::npos);
  });
}

TEST_CASE("a rank that calls something else is named on every rank, neighbours or not") {
  test::MapStore store;
  std::vector<std::string> errors(4);
  test::run_ranks(4, [&](int rank) {
    comm::Group group(store, config_of({.nodes = "0011"}, rank));
    try {
      gather_works(group, rank == 2 ? 101 : 100, true);
    } catch (const TransportError& error) {
      errors[rank] = error.what();
    }
  });
  for (const auto& text : errors) {
    CAPTURE(text);
    CHECK_NE(text.find("ranks disagree"), std::string::npos);
    CHECK_NE(text.find("100"), std::string::npos);
    CHECK_NE(text.find("101"), std::string::npos);
  }
}

TEST_CASE("a late rank is named on every rank, with where it was") {
  test::MapStore store;
  std::vector<std::string> errors(3);
  test::run_ranks(3, [&](int rank) {
    comm::Group group(store, config_of({.nodes = "012"}, rank));
    CHECK(gather_works(group, 10, true));
    try {
      if (rank == 2)
        while (!group.abort_flag().raised()) std::this_thread::sleep_for(10ms);
      gather_works(group, 20, true, 1500ms);
    } catch (const TransportError& error) {
      errors[rank] = error.what();
    }
  });
  for (const auto& text : errors) {
    CAPTURE(text);
    CHECK_NE(text.find("timed out"), std::string::npos);
    CHECK_NE(text.find("rank 2"), std::string::npos);
    CHECK_NE(text.find("idle"), std::string::npos);
  }
}

TEST_CASE("a rank that leaves while others wait for it is named") {
  test::MapStore store;
  test::run_ranks(2, [&](int rank) {
    comm::Group group(store, config_of({.nodes = "01"}, rank));
    if (rank == 1) return;
    std::string text;
    try {
      gather_works(group, 100, true);
    } catch (const TransportError& error) {
      text = error.what();
    }
    CAPTURE(text);
    CHECK_NE(text.find("rank 1"), std::string::npos);
    CHECK_NE(text.find("left the group"), std::string::npos);
  });
}

TEST_CASE("ranks with different options learn which and whose when the group is formed") {
  test::MapStore store;
  std::vector<std::string> errors(2);
  test::run_ranks(2, [&](int rank) {
    auto config = config_of({.nodes = "01"}, rank);
    if (rank == 1) config.options.min_bytes = 5;
    try {
      comm::Group group(store, config);
    } catch (const UsageError& error) {
      errors[rank] = error.what();
    }
  });
  for (const auto& text : errors) {
    CAPTURE(text);
    CHECK_NE(text.find("min_bytes"), std::string::npos);
    CHECK_NE(text.find("65536"), std::string::npos);
    CHECK_NE(text.find("rank 1"), std::string::npos);
  }
}

TEST_CASE("a group may go as soon as its last call was told, whatever its worker does still") {
  test::MapStore store;
  std::promise<void> gone;
  test::run_ranks(2, [&](int rank) {
    auto group = std::make_unique<comm::Group>(store, config_of({.nodes = "01"}, rank));
    std::promise<void> told;
    group->enqueue(
        "nothing", false, [](std::uint64_t) {},
        [&](std::exception_ptr) {
          told.set_value();
          std::this_thread::sleep_for(100ms);  // the worker still holds the call
        });
    told.get_future().get();
    if (rank == 0) {
      group.reset();
      gone.set_value();
      return;
    }
    gone.get_future().get();
    std::this_thread::sleep_for(50ms);
    CHECK_FALSE(group->abort_flag().raised());
  });
}

TEST_CASE("ringing for a listener that is gone raises no signal") {
  auto listener = std::make_unique<transport::Bell>(transport::Bell::create());
  const auto ringer = transport::Bell::attach(::getpid(), listener->ring_fd());
  listener.reset();
  const auto before = ::signal(SIGPIPE, SIG_DFL);
  for (int i = 0; i < 100000; ++i) ringer.ring();  // more than a pipe holds
  ::signal(SIGPIPE, before);
}
