// TLS with a key that both ends hold: what comes out is what went in, and nobody else takes part.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "qcoll/base/error.h"
#include "qcoll/transport/connection.h"

using namespace qcoll;
using namespace qcoll::transport;
using namespace std::chrono_literals;

namespace {

wire::Secret key_of(int seed) {
  wire::Secret key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i * 7 + seed);
  return key;
}

struct Sockets {
  Sockets() {
    int ends[2];
    REQUIRE_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    a = Fd(ends[0]);
    b = Fd(ends[1]);
  }
  Fd a;
  Fd b;
};

// Both ends of one connection; throws what the dialler's handshake throws.
std::pair<Connection, Connection> connect(Sockets sockets, const wire::Secret& dialler,
                                          const wire::Secret& listener,
                                          std::uint64_t records_per_key = Tls::kRecordsPerKey) {
  auto from = std::make_unique<Tls>(Tls::Role::kDialler, sockets.a.get(), dialler, records_per_key);
  auto to = std::make_unique<Tls>(Tls::Role::kListener, sockets.b.get(), listener, records_per_key);
  bool from_done = false;
  bool to_done = false;
  for (int step = 0; step < 10 && !(from_done && to_done); ++step) {
    if (!from_done) from_done = from->shake() == 0;
    if (!to_done) to_done = to->shake() == 0;
  }
  REQUIRE(from_done);
  REQUIRE(to_done);
  return {Connection(std::move(sockets.a), 1, std::move(from)),
          Connection(std::move(sockets.b), 0, std::move(to))};
}

std::vector<std::byte> random_bytes(std::size_t count, int seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(count);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// Sends all of `bytes` in pieces and takes it out at the other end in others.
std::vector<std::byte> through(Connection& from, Connection& to, ConstBytes bytes, int seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> out(bytes.size());
  std::size_t sent = 0;
  std::size_t got = 0;
  while (got < bytes.size()) {
    if (sent < bytes.size()) sent += from.send(bytes.subspan(sent));
    const std::size_t piece = std::min<std::size_t>(1 + random() % 70000, bytes.size() - got);
    const auto some = to.receive(Bytes(out).subspan(got, piece));
    REQUIRE(some.has_value());
    got += *some;
  }
  return out;
}

}  // namespace

TEST_CASE("bytes of any number come through encrypted connections, both ways") {
  auto [dialler, listener] = connect({}, key_of(1), key_of(1));
  for (const std::size_t count : {1u, 31u, 16384u, 16385u, 1000000u, 5000000u}) {
    const auto bytes = random_bytes(count, static_cast<int>(count));
    CHECK(through(dialler, listener, bytes, 1) == bytes);
    CHECK(through(listener, dialler, bytes, 2) == bytes);
  }
}

TEST_CASE("keys are renewed in the middle of a stream") {
  for (const std::uint64_t records_per_key : {1, 3}) {
    auto [dialler, listener] = connect({}, key_of(1), key_of(1), records_per_key);
    const auto bytes = random_bytes(1000000, 5);
    CHECK(through(dialler, listener, bytes, 1) == bytes);
    CHECK(through(listener, dialler, bytes, 2) == bytes);
  }
}

TEST_CASE("an end without the key does not get in") {
  CHECK_THROWS_AS(connect({}, key_of(1), key_of(2)), ConnectionLost);
}

TEST_CASE("what passes is not what was sent, and does not repeat") {
  Sockets outer;
  const int tap = ::dup(outer.b.get());  // reads before the receiver
  const Fd tapped(tap);
  auto [dialler, listener] = connect(std::move(outer), key_of(1), key_of(1));
  const std::string secret(4000, 'q');
  std::string seen[2];
  for (std::string& text : seen) {
    REQUIRE_EQ(dialler.send(std::as_bytes(std::span(secret))), secret.size());
    text.resize(8000);
    const ssize_t got = ::recv(tap, text.data(), text.size(), MSG_DONTWAIT);
    REQUIRE_GT(got, static_cast<ssize_t>(secret.size()));
    text.resize(static_cast<std::size_t>(got));
    CHECK_EQ(text.find("qqqq"), std::string::npos);
  }
  CHECK_NE(seen[0], seen[1]);
}

TEST_CASE("changed, repeated and missing records end the connection") {
  for (const std::string kind : {"changed", "repeated", "missing", "foreign"}) {
    CAPTURE(kind);
    Sockets outer;
    const Fd writer(::dup(outer.a.get()));
    const Fd reader(::dup(outer.b.get()));
    auto [dialler, listener] = connect(std::move(outer), key_of(1), key_of(1));
    const auto bytes = random_bytes(1000, 3);
    std::vector<std::byte> record(4096);
    REQUIRE_EQ(dialler.send(bytes), bytes.size());
    const ssize_t got = ::recv(reader.get(), record.data(), record.size(), MSG_DONTWAIT);
    REQUIRE_GT(got, 0);
    record.resize(static_cast<std::size_t>(got));
    if (kind == "changed") record[500] ^= std::byte{1};
    if (kind == "repeated") record.insert(record.end(), record.begin(), record.end());
    if (kind == "missing") {
      record.clear();
      REQUIRE_EQ(dialler.send(bytes), bytes.size());
    }
    if (kind == "foreign") record = random_bytes(2000, 4);
    if (!record.empty())
      REQUIRE_EQ(::send(writer.get(), record.data(), record.size(), 0),
                 static_cast<ssize_t>(record.size()));
    std::vector<std::byte> out(4096);
    const auto read_all = [&] {
      for (;;)
        if (const auto some = listener.receive(out); !some || *some == 0) break;
    };
    CHECK_THROWS_AS(read_all(), ConnectionLost);
  }
}

TEST_CASE("the end of an encrypted connection is seen as that of a plain one") {
  auto [dialler, listener] = connect({}, key_of(1), key_of(1));
  std::byte b{};
  CHECK_EQ(listener.receive(std::span(&b, 1)).value(), 0);
  SUBCASE("by the reader") {
    dialler = {};
    CHECK_FALSE(listener.receive(std::span(&b, 1)).has_value());
  }
  SUBCASE("by the writer, without a signal") {
    listener = {};
    const auto bytes = random_bytes(1 << 20, 1);
    CHECK_THROWS_AS(dialler.send(bytes), ConnectionLost);
  }
}
