// Messages over byte streams: one direction, in order, non-blocking. Nothing but messages travels
// on these connections, so control traffic never waits behind bulk data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "qcoll/base/trace.h"
#include "qcoll/base/types.h"
#include "qcoll/transport/connection.h"
#include "qcoll/wire/header.h"

namespace qcoll::transport {

// Header::kBytes bytes that `peer` wrote. Throws TransportError that names the peer and the field.
wire::Header parse_header_of(Rank peer, const std::byte* raw);

class SendStream {
 public:
  explicit SendStream(Connection connection) : connection_(std::move(connection)) {}

  // The message must stay in place until `outstanding` is decremented, which happens when the
  // kernel has taken its last byte.
  void enqueue(ConstBytes message, std::uint32_t* outstanding);
  // Hands over what the kernel takes now. Throws ConnectionLost.
  bool push(Trace* trace = nullptr);

  bool idle() const { return queue_.empty(); }
  int fd() const { return connection_.fd(); }
  Rank peer() const { return connection_.peer(); }

 private:
  struct Item {
    ConstBytes message;
    ConstBytes rest;
    std::uint32_t* outstanding;
    Clock::time_point enqueued;
  };
  Connection connection_;
  std::deque<Item> queue_;
};

class ReceiveStream {
 public:
  explicit ReceiveStream(Connection connection) : connection_(std::move(connection)) {}

  // Reads until the next message's header is complete; returns it, or null when more bytes must
  // come first. Stays at this message until accept() and fill().
  const wire::Header* header();
  // Gives the message its place: kBytes + payload_bytes from `message` on.
  void accept(std::byte* message);
  bool accepted() const { return filled_to_ != nullptr; }
  // Reads the payload; true once the message is complete.
  bool fill();

  // The header that header() returned last, while its message has no place yet.
  const wire::Header* peek() const { return header_ ? &*header_ : nullptr; }
  // False while a complete header waits for its place, and after the end: poll would not sleep.
  bool wants_bytes() const { return !ended_ && (accepted() || !header_); }
  bool ended() const { return ended_; }  // the peer closed, between messages
  int fd() const { return connection_.fd(); }
  Rank peer() const { return connection_.peer(); }

 private:
  std::size_t read_some(std::byte* into, std::size_t bytes);

  Connection connection_;
  std::array<std::byte, wire::Header::kBytes> raw_{};
  std::size_t raw_bytes_ = 0;
  std::optional<wire::Header> header_;
  std::byte* filled_to_ = nullptr;
  std::size_t missing_ = 0;
  bool ended_ = false;
};

}  // namespace qcoll::transport
