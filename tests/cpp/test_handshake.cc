// The handshake's bytes, and what a listener does with strangers.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "qcoll/base/error.h"
#include "qcoll/transport/control_plane.h"
#include "qcoll/transport/handshake.h"
#include "qcoll/transport/socket.h"

using namespace qcoll;
using namespace qcoll::transport;
using namespace std::chrono_literals;

namespace {

std::string hex(ConstBytes bytes) {
  std::string text;
  for (const std::byte b : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<int>(b) >> 4];
    text += kDigits[static_cast<int>(b) & 15];
  }
  return text;
}

// One rank's end of a group on this process's plane.
struct Listening {
  explicit Listening(bool encrypt = false) {
    for (std::size_t i = 0; i < secret.size(); ++i) secret[i] = static_cast<std::byte>(i);
    links = std::make_shared<GroupLinks>(0, 2, 42, secret, std::make_shared<OperationLog>(),
                                         std::make_shared<const Bell>(Bell::create()), encrypt);
    plane->add(links);
  }
  ~Listening() {
    links->leave();
    plane->remove(*links);
  }
  Fd dial() {
    return transport::dial({parse_address("127.0.0.1")}, plane->port(), Deadline(5s), abort);
  }
  // Whether the listener ends the connection within a moment.
  bool shown_out(int fd) {
    std::byte b;
    for (int i = 0; i < 100; ++i) {
      const ssize_t got = ::recv(fd, &b, 1, MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno == ECONNRESET)) return true;
      std::this_thread::sleep_for(10ms);
    }
    return false;
  }
  std::vector<Connection> wait_for_stream() {
    for (int i = 0; i < 200; ++i) {
      auto accepted = links->take_accepted();
      if (!accepted.empty()) return accepted;
      std::this_thread::sleep_for(10ms);
    }
    return {};
  }

  AbortFlag abort;
  wire::Secret secret;
  std::shared_ptr<ControlPlane> plane = ControlPlane::shared();
  std::shared_ptr<GroupLinks> links;
};

Hello hello_to(Rank to, std::uint64_t group = 42) {
  return {.purpose = Purpose::kData, .group = group, .from = 1, .to = to};
}

}  // namespace

TEST_CASE("a hello is written as documented and read back") {
  Hello hello{.purpose = Purpose::kData, .group = 0x1122334455667788, .from = 3, .to = 258};
  for (std::size_t i = 0; i < hello.nonce.size(); ++i)
    hello.nonce[i] = static_cast<std::byte>(0xa0 + i);
  CHECK_EQ(hex(serialize(hello)),
           "51434853"
           "01"
           "02"
           "0000"
           "8877665544332211"
           "03000000"
           "02010000"
           "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"
           "0000000000000000");
  const auto read = parse_hello(serialize(hello));
  REQUIRE(read.has_value());
  CHECK_EQ(read->group, hello.group);
  CHECK_EQ(read->from, 3);
  CHECK_EQ(read->to, 258);
  CHECK(read->nonce == hello.nonce);
  for (const std::size_t at : {0, 4, 5}) {
    auto raw = serialize(hello);
    raw[at] = std::byte{9};
    CHECK_FALSE(parse_hello(raw).has_value());
  }
}

TEST_CASE("HMAC-SHA256 gives RFC 4231's first test vector") {
  // Its key of 20 bytes, padded with zeros to the length of a secret, is the same HMAC key.
  wire::Secret key{};
  std::fill_n(key.begin(), 20, std::byte{0x0b});
  const std::string text = "Hi There";
  CHECK_EQ(hex(wire::hmac_sha256(key, std::as_bytes(std::span(text)))),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
}

TEST_CASE("a rank that knows the secret gets its stream through") {
  Listening listening;
  Fd fd = listening.dial();
  shake_hands_as_dialler(fd.get(), hello_to(0), listening.secret, Deadline(5s), listening.abort);
  const auto accepted = listening.wait_for_stream();
  REQUIRE_EQ(accepted.size(), 1);
  CHECK_EQ(accepted[0].peer(), 1);
}

TEST_CASE("strangers are dropped and harm nobody") {
  Listening listening;
  SUBCASE("a wrong secret: the dialler notices that the listener is not its own") {
    Fd fd = listening.dial();
    wire::Secret wrong = listening.secret;
    wrong[0] ^= std::byte{1};
    CHECK_THROWS_AS(
        shake_hands_as_dialler(fd.get(), hello_to(0), wrong, Deadline(5s), listening.abort),
        TransportError);
  }
  SUBCASE("a wrong proof") {
    Fd fd = listening.dial();
    send_all(fd.get(), serialize(hello_to(0)), Deadline(5s), listening.abort);
    std::array<std::byte, kChallengeBytes> challenge;
    receive_all(fd.get(), challenge, Deadline(5s), listening.abort);
    send_all(fd.get(), std::array<std::byte, kProofBytes>{}, Deadline(5s), listening.abort);
    CHECK(listening.shown_out(fd.get()));
  }
  SUBCASE("a recorded proof does not work again, for the nonce is another") {
    Fd first = listening.dial();
    const auto hello = serialize(hello_to(0));
    send_all(first.get(), hello, Deadline(5s), listening.abort);
    std::array<std::byte, kChallengeBytes> challenge;
    receive_all(first.get(), challenge, Deadline(5s), listening.abort);
    wire::Nonce nonce;
    std::copy_n(challenge.begin(), nonce.size(), nonce.begin());
    const auto proof = dialler_mac(listening.secret, hello, nonce);
    Fd second = listening.dial();
    send_all(second.get(), hello, Deadline(5s), listening.abort);
    receive_all(second.get(), challenge, Deadline(5s), listening.abort);
    send_all(second.get(), proof, Deadline(5s), listening.abort);
    CHECK(listening.shown_out(second.get()));
  }
  SUBCASE("an unknown group, an unknown rank, and no hello at all") {
    for (const auto& hello : {hello_to(0, 43), hello_to(1)}) {
      Fd fd = listening.dial();
      send_all(fd.get(), serialize(hello), Deadline(5s), listening.abort);
      CHECK(listening.shown_out(fd.get()));
    }
    Fd fd = listening.dial();
    const std::string http = "GET / HTTP/1.1\r\nHost: example\r\nAccept: */*\r\n\r\n....";
    send_all(fd.get(), std::as_bytes(std::span(http)), Deadline(5s), listening.abort);
    CHECK(listening.shown_out(fd.get()));
  }
  SUBCASE("hundreds of silent connections") {
    std::vector<Fd> silent;
    for (int i = 0; i < 400; ++i) silent.push_back(listening.dial());
  }
  CHECK(listening.links->take_accepted().empty());
  // The group still works.
  Fd fd = listening.dial();
  shake_hands_as_dialler(fd.get(), hello_to(0), listening.secret, Deadline(5s), listening.abort);
  CHECK_EQ(listening.wait_for_stream().size(), 1);
  CHECK_FALSE(listening.links->abort_flag().raised());
}

TEST_CASE("what follows a TLS handshake at once is read, though poll may not tell of it") {
  for (int i = 0; i < 200; ++i) {
    Listening listening(true);
    Fd fd = listening.dial();
    Hello hello = hello_to(0);
    hello.purpose = Purpose::kControl;
    const wire::Secret key =
        shake_hands_as_dialler(fd.get(), hello, listening.secret, Deadline(5s), listening.abort);
    Tls tls(Tls::Role::kDialler, fd.get(), key);
    tls.shake(Deadline(5s), listening.abort);
    const std::array<std::byte, 5> goodbye{{{}, {}, {}, {}, std::byte{1}}};
    REQUIRE_EQ(tls.send(goodbye, 0), goodbye.size());
    const Deadline soon(2s);
    while (!listening.links->departed(1) && !soon.passed()) std::this_thread::sleep_for(100us);
    REQUIRE(listening.links->departed(1));
  }
}

TEST_CASE("addresses are parsed, listed and refused") {
  CHECK_EQ(parse_address("10.1.2.3").text(), "10.1.2.3");
  CHECK_EQ(parse_address("fd00::1").text(), "fd00::1");
  CHECK(parse_address("127.8.0.1").loopback());
  CHECK(parse_address("::1").loopback());
  CHECK_FALSE(parse_address("10.1.2.3").loopback());
  CHECK_THROWS_AS(parse_address("host"), UsageError);
  CHECK_FALSE(local_addresses("lo").empty());
  CHECK(local_addresses("lo").front().loopback());
  try {
    local_addresses("nosuch0");
    FAIL("an interface that does not exist was accepted");
  } catch (const UsageError& error) {
    CHECK_NE(std::string(error.what()).find("nosuch0"), std::string::npos);
    CHECK_NE(std::string(error.what()).find("lo"), std::string::npos);
  }
}
