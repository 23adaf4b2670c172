#include "qcoll/transport/stream.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "qcoll/base/error.h"

namespace qcoll::transport {

wire::Header parse_header_of(Rank peer, const std::byte* raw) {
  try {
    return wire::parse_header(raw);
  } catch (const TransportError& error) {
    throw TransportError("rank " + std::to_string(peer) + " sent a " + error.what(), peer);
  }
}

void SendStream::enqueue(ConstBytes message, std::uint32_t* outstanding) {
  ++*outstanding;
  queue_.push_back({message, message, outstanding, Clock::now()});
}

bool SendStream::push(Trace* trace) {
  bool progress = false;
  while (!queue_.empty()) {
    Item& item = queue_.front();
    const ssize_t sent = ::send(fd_.get(), item.rest.data(), item.rest.size(), MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      throw ConnectionLost(system_error_text("sending to rank " + std::to_string(peer_), errno),
                           peer_);
    }
    progress = true;
    item.rest = item.rest.subspan(static_cast<std::size_t>(sent));
    if (!item.rest.empty()) break;  // a short write: the kernel's buffer is full
    if (trace != nullptr) {
      const wire::Header header = wire::parse_header(item.message.data());
      trace->record(
          {TraceEvent::Kind::kSend, peer_, header.tag, header.chunk, item.enqueued, Clock::now()});
    }
    --*item.outstanding;
    queue_.pop_front();
  }
  return progress;
}

std::size_t ReceiveStream::read_some(std::byte* into, std::size_t bytes) {
  for (;;) {
    const ssize_t got = ::recv(fd_.get(), into, bytes, 0);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (got == 0 && raw_bytes_ == 0) {
      ended_ = true;
      return 0;
    }
    throw ConnectionLost(
        got == 0
            ? "rank " + std::to_string(peer_) + " closed the connection in the middle of a message"
            : system_error_text("receiving from rank " + std::to_string(peer_), errno),
        peer_);
  }
}

const wire::Header* ReceiveStream::header() {
  while (raw_bytes_ < raw_.size()) {
    const std::size_t got = read_some(raw_.data() + raw_bytes_, raw_.size() - raw_bytes_);
    if (got == 0) return nullptr;
    raw_bytes_ += got;
  }
  if (!header_) header_ = parse_header_of(peer_, raw_.data());
  return &*header_;
}

void ReceiveStream::accept(std::byte* message) {
  std::memcpy(message, raw_.data(), raw_.size());
  filled_to_ = message + raw_.size();
  missing_ = header_->payload_bytes;
}

bool ReceiveStream::fill() {
  while (missing_ > 0) {
    const std::size_t got = read_some(filled_to_, missing_);
    if (got == 0) return false;
    filled_to_ += got;
    missing_ -= got;
  }
  filled_to_ = nullptr;
  header_.reset();
  raw_bytes_ = 0;
  return true;
}

}  // namespace qcoll::transport
