// The contract of the data path, the same for every transport: loopback and real, in place and by
// stream. A transport joins by a line in kTransports.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "map_store.h"
#include "qcoll/base/error.h"
#include "qcoll/transport/exchange.h"
#include "qcoll/transport/loopback.h"
#include "qcoll/transport/net_mesh.h"
#include "ranks.h"

using namespace qcoll;
using namespace qcoll::transport;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kMemory = 4 << 20;
constexpr std::size_t kTags = 8;

struct Transport {
  const char* name;
  bool real;    // processes' transports, here between threads
  bool mapped;  // ranks share memory
  bool encrypted = false;
};
const std::vector<Transport> kTransports{{"loopback, in place", false, true},
                                         {"loopback, streams", false, false},
                                         {"shared memory", true, true},
                                         {"TCP", true, false},
                                         {"TLS", true, false, true}};

// Calls rank_main(mesh) on a thread for each rank.
void with_meshes(const Transport& transport, int size,
                 const std::function<void(Mesh&)>& rank_main) {
  if (!transport.real) {
    auto meshes = make_loopback(std::vector<int>(size, 0), {kMemory, transport.mapped, 0});
    test::run_ranks(size, [&](int rank) { rank_main(*meshes[rank]); });
    return;
  }
  test::MapStore store;
  test::run_ranks(size, [&](int rank) {
    const Deadline deadline(20s);
    NetMesh mesh(store, rank, size,
                 {.node = "one",
                  .agreement = "",
                  .share_memory = transport.mapped,
                  .encrypt = transport.encrypted},
                 std::make_shared<OperationLog>(), deadline);
    mesh.share_memory(store, kMemory, deadline);
    rank_main(mesh);
  });
}

wire::Envelope envelope(std::uint32_t run) {
  return {.group = 5, .sequence = run, .run = run, .dtype = DType::kByte, .count = 1};
}

RingSpec encode_ring(std::uint32_t tag, std::size_t bytes, std::vector<Rank> readers) {
  return {
      .tag = tag, .from = -1, .message_bytes = bytes, .codec = {}, .readers = std::move(readers)};
}
RingSpec receive_ring(std::uint32_t tag, Rank from, std::size_t bytes,
                      std::vector<Rank> readers = {}) {
  return {
      .tag = tag, .from = from, .message_bytes = bytes, .codec = {}, .readers = std::move(readers)};
}

// Fills the payload with a value that depends on tag and index, and publishes.
void send(Exchange& exchange, std::uint32_t tag, std::size_t payload, std::vector<Rank> readers) {
  auto slot = exchange.reserve(tag);
  std::memset(slot.payload(), static_cast<int>(tag * 16 + slot.index), payload);
  wire::write_header({.envelope = exchange.envelope(),
                      .codec = {},
                      .tag = tag,
                      .chunk = slot.index,
                      .elements = static_cast<std::uint32_t>(payload),
                      .payload_bytes = static_cast<std::uint32_t>(payload)},
                     slot.message);
  slot.payload_bytes = static_cast<std::uint32_t>(payload);
  exchange.publish(slot, readers);
}

bool holds(const Exchange::Slot& slot, std::uint32_t tag, std::uint32_t index,
           std::size_t payload) {
  for (std::size_t i = 0; i < payload; ++i)
    if (slot.payload()[i] != static_cast<std::byte>(tag * 16 + index)) return false;
  return true;
}

constexpr std::size_t kPayload = 100000;
constexpr std::size_t kMessage = kPayload + wire::Header::kBytes;

}  // namespace

TEST_CASE("several readers take the same slots, each at its own speed") {
  for (const auto& transport : kTransports) {
    CAPTURE(transport.name);
    with_meshes(transport, 3, [&](Mesh& mesh) {
      Exchange exchange(mesh, kTags);
      for (std::uint32_t run = 1; run <= 3; ++run) {
        const Deadline deadline(20s);
        if (mesh.rank() == 0) {
          exchange.begin(envelope(run), std::vector{encode_ring(3, kMessage, {1, 2})}, 2, deadline);
          for (int i = 0; i < 7; ++i) send(exchange, 3, kPayload, {1, 2});
        } else {
          exchange.begin(envelope(run), std::vector{receive_ring(3, 0, kMessage)}, 2, deadline);
          for (std::uint32_t i = 0; i < 7; ++i) {
            if (mesh.rank() == 2) std::this_thread::sleep_for(3ms);
            const auto slot = exchange.receive(0, 3);
            CHECK_EQ(slot.index, i);
            CHECK(holds(slot, 3, i, kPayload));
            exchange.release(slot);
          }
        }
        exchange.finish();
      }
    });
  }
}

TEST_CASE("a landed message is passed on unchanged") {
  for (const auto& transport : kTransports) {
    if (transport.mapped) continue;  // in place there is nothing to land
    CAPTURE(transport.name);
    with_meshes(transport, 3, [&](Mesh& mesh) {
      Exchange exchange(mesh, kTags);
      const Deadline deadline(20s);
      const std::vector<std::vector<RingSpec>> rings{{encode_ring(0, kMessage, {1})},
                                                     {receive_ring(0, 0, kMessage, {2})},
                                                     {receive_ring(0, 1, kMessage)}};
      exchange.begin(envelope(1), rings[mesh.rank()], 2, deadline);
      for (std::uint32_t i = 0; i < 9; ++i) {
        if (mesh.rank() == 0) {
          send(exchange, 0, kPayload, {1});
          continue;
        }
        const auto slot = exchange.receive(mesh.rank() - 1, 0);
        if (mesh.rank() == 1) exchange.publish(slot, std::vector<Rank>{2});
        CHECK(holds(slot, 0, i, kPayload));
        exchange.release(slot);
      }
      exchange.finish();
    });
  }
}

TEST_CASE("a rank that waits for one peer keeps serving the others") {
  for (const auto& transport : kTransports) {
    CAPTURE(transport.name);
    std::atomic<bool> served{false};
    with_meshes(transport, 3, [&](Mesh& mesh) {
      Exchange exchange(mesh, kTags);
      const Deadline deadline(20s);
      constexpr std::size_t kLarge = 900000;  // more than sockets buffer at once
      const std::size_t message = kLarge + wire::Header::kBytes;
      if (mesh.rank() == 0) {
        exchange.begin(envelope(1), std::vector{encode_ring(1, message, {1})}, 2, deadline);
        for (int i = 0; i < 2; ++i) send(exchange, 1, kLarge, {1});
        exchange.finish();  // ends only if rank 1 takes the bytes while it waits for rank 2
        served = true;
      } else if (mesh.rank() == 1) {
        exchange.begin(envelope(1),
                       std::vector{receive_ring(1, 0, message), receive_ring(2, 2, kMessage)}, 2,
                       deadline);
        exchange.release(exchange.receive(2, 2));
        for (int i = 0; i < 2; ++i) exchange.release(exchange.receive(0, 1));
      } else {
        exchange.begin(envelope(1), std::vector{encode_ring(2, kMessage, {1})}, 2, deadline);
        while (!served && !deadline.passed()) std::this_thread::sleep_for(1ms);
        send(exchange, 2, kPayload, {1});
        exchange.finish();
      }
    });
    CHECK(served);
  }
}

TEST_CASE("the reader that holds a slot back is named") {
  for (const auto& transport : kTransports) {
    if (!transport.mapped) continue;  // a stream's messages leave the slot when the kernel has them
    CAPTURE(transport.name);
    std::atomic<bool> done{false};
    with_meshes(transport, 3, [&](Mesh& mesh) {
      Exchange exchange(mesh, kTags);
      if (mesh.rank() == 0) {
        exchange.begin(envelope(1), std::vector{encode_ring(1, kMessage, {1, 2})}, 2,
                       Deadline(300ms));
        std::string text;
        try {
          for (int i = 0; i < 3; ++i) send(exchange, 1, kPayload, {1, 2});
        } catch (const TransportError& error) {
          text = error.what();
          CHECK_EQ(error.peer(), 2);
        }
        CAPTURE(text);
        CHECK_NE(text.find("rank 2"), std::string::npos);
        done = true;
        return;
      }
      exchange.begin(envelope(1), std::vector{receive_ring(1, 0, kMessage)}, 2, Deadline(20s));
      if (mesh.rank() == 1)
        for (int i = 0; i < 2; ++i) exchange.release(exchange.receive(0, 1));
      while (!done) std::this_thread::sleep_for(1ms);
    });
  }
}

TEST_CASE("a message of another call is refused with both calls named") {
  for (const auto& transport : kTransports) {
    CAPTURE(transport.name);
    with_meshes(transport, 2, [&](Mesh& mesh) {
      Exchange exchange(mesh, kTags);
      auto call = envelope(1);
      if (mesh.rank() == 0) {
        call.collective = wire::Collective::kReduceScatter;
        call.op = wire::ReduceOp::kAvg;
        exchange.begin(call, std::vector{encode_ring(1, kMessage, {1})}, 2, Deadline(5s));
        send(exchange, 1, kPayload, {1});
        exchange.finish();
        return;
      }
      exchange.begin(call, std::vector{receive_ring(1, 0, kMessage)}, 2, Deadline(5s));
      std::string text;
      try {
        exchange.receive(0, 1);
      } catch (const TransportError& error) {
        text = error.what();
      }
      CAPTURE(text);
      CHECK_NE(text.find("all_gather #1"), std::string::npos);
      CHECK_NE(text.find("reduce_scatter #1 (avg"), std::string::npos);
    });
  }
}

TEST_CASE("hostile bytes in a slot or a stream are an error, not a crash") {
  for (const auto& transport : kTransports) {
    for (const int attack : {0, 1, 2}) {
      CAPTURE(transport.name);
      CAPTURE(attack);
      with_meshes(transport, 2, [&](Mesh& mesh) {
        Exchange exchange(mesh, kTags);
        if (mesh.rank() == 0) {
          exchange.begin(envelope(1), std::vector{encode_ring(1, kMessage, {1})}, 2, Deadline(5s));
          auto slot = exchange.reserve(1);
          wire::Header header{.envelope = exchange.envelope(), .codec = {}, .tag = 1, .chunk = 0};
          header.payload_bytes = attack == 0 ? 0xffffffffu : kPayload;  // far beyond the slot
          if (attack == 1) header.chunk = 77;
          wire::write_header(header, slot.message);
          if (attack == 2) slot.message[20] ^= std::byte{1};  // breaks the checksum
          slot.payload_bytes = kPayload;
          try {
            exchange.publish(slot, std::vector<Rank>{1});
            exchange.finish();
          } catch (const TransportError&) {  // the sender may notice first
            if (mesh.mapped(1)) return;
          }
          return;
        }
        exchange.begin(envelope(1), std::vector{receive_ring(1, 0, kMessage)}, 2, Deadline(1s));
        CHECK_THROWS_AS(exchange.receive(0, 1), TransportError);
      });
    }
  }
}

TEST_CASE("messages beyond the schedule are an error before their slots get other uses") {
  for (const auto& transport : kTransports) {
    if (transport.mapped) continue;  // nobody writes into another's memory
    for (const std::size_t missing : {0, 10}) {
      CAPTURE(transport.name);
      CAPTURE(missing);
      std::atomic<bool> sent{false};
      std::atomic<bool> done{false};
      with_meshes(transport, 3, [&](Mesh& mesh) {
        if (mesh.rank() == 0) {  // one message that is expected, and one that is not
          Connection stream = mesh.connect(1, Deadline(5s));
          std::vector<std::byte> message(wire::Header::kBytes + 16);
          for (const std::uint32_t chunk : {0u, 1u}) {
            wire::write_header({.envelope = envelope(1),
                                .codec = {},
                                .tag = 1,
                                .chunk = chunk,
                                .elements = 16,
                                .payload_bytes = 16},
                               message.data());
            const std::size_t bytes = message.size() - chunk * missing;
            REQUIRE_EQ(stream.send(ConstBytes(message).first(bytes)), bytes);
          }
          sent = true;
          while (!done) std::this_thread::sleep_for(1ms);
          return;
        }
        Exchange exchange(mesh, kTags);
        if (mesh.rank() == 2) {
          while (!sent) std::this_thread::sleep_for(1ms);
          exchange.begin(envelope(1), std::vector{encode_ring(2, kMessage, {1})}, 2, Deadline(5s));
          send(exchange, 2, 16, {1});
          exchange.finish();
          while (!done) std::this_thread::sleep_for(1ms);
          return;
        }
        exchange.begin(envelope(1),
                       std::vector{receive_ring(1, 0, kMessage), receive_ring(2, 2, kMessage)}, 2,
                       Deadline(5s));
        exchange.release(exchange.receive(0, 1));
        exchange.release(exchange.receive(2, 2));  // takes in what rank 0 has sent before
        int culprit = -1;
        try {
          exchange.finish();
        } catch (const TransportError& error) {
          culprit = error.peer();
        }
        done = true;
        CHECK_EQ(culprit, 0);
      });
    }
  }
}

TEST_CASE("ring controls that lead outside the peer's slots are an error, not a crash") {
  const std::uint64_t huge = ~std::uint64_t{0};
  struct Attack {
    std::uint64_t offset, slot_bytes;
    std::uint32_t depth;
  };
  const Attack good{Board::control_bytes(kTags, 2), align_up(kMessage, 64), 2};
  for (const Attack& attack :
       {Attack{good.offset, good.slot_bytes, 0}, Attack{huge - 63, good.slot_bytes, 2},
        Attack{huge - 127, 128, 2}, Attack{good.offset, huge - 63, 2},
        Attack{0, good.slot_bytes, 2}, Attack{good.offset, 0, 2}, Attack{good.offset, 32, 2},
        Attack{good.offset + 1, good.slot_bytes, 2},
        Attack{good.offset, huge & ~63ull, 0xffffffff}}) {
    CAPTURE(attack.offset);
    CAPTURE(attack.slot_bytes);
    CAPTURE(attack.depth);
    for (const auto& transport : kTransports) {
      with_meshes(transport, 2, [&](Mesh& mesh) {
        if (!mesh.mapped(1 - mesh.rank())) return;
        Exchange exchange(mesh, kTags);
        if (mesh.rank() == 0) {
          exchange.begin(envelope(1), std::vector{encode_ring(1, kMessage, {1})}, 2, Deadline(5s));
          const Board board(mesh.memory_of(0), kTags, 2);
          auto& control = board.control(1);
          control.offset = attack.offset;
          control.slot_bytes = attack.slot_bytes;
          control.depth = attack.depth;
          send(exchange, 1, kPayload, {1});
          return;
        }
        exchange.begin(envelope(1), std::vector{receive_ring(1, 0, kMessage)}, 2, Deadline(1s));
        CHECK_THROWS_AS(exchange.receive(0, 1), TransportError);
      });
    }
  }
}

TEST_CASE("a connection that breaks in the middle of a message is an error that names the peer") {
  int ends[2];
  REQUIRE_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  std::vector<std::byte> message(200);
  wire::write_header({.envelope = envelope(1), .codec = {}, .payload_bytes = 136}, message.data());
  REQUIRE_EQ(::send(ends[1], message.data(), 150, 0), 150);
  ::close(ends[1]);
  ReceiveStream stream(Connection(Fd(ends[0]), 9));
  REQUIRE_NE(stream.header(), nullptr);
  std::vector<std::byte> slot(200);
  stream.accept(slot.data());
  try {
    stream.fill();
    FAIL("the end went unnoticed");
  } catch (const ConnectionLost& error) {
    CHECK_EQ(error.peer(), 9);
    CHECK_NE(std::string(error.what()).find("rank 9"), std::string::npos);
  }
}
