#include "qcoll/transport/stream.h"

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
    const std::size_t sent = connection_.send(item.rest);
    if (sent == 0) break;
    progress = true;
    item.rest = item.rest.subspan(sent);
    if (!item.rest.empty()) break;  // a short write: the kernel's buffer is full
    if (trace != nullptr) {
      const wire::Header header = wire::parse_header(item.message.data());
      trace->record(
          {TraceEvent::Kind::kSend, peer(), header.tag, header.chunk, item.enqueued, Clock::now()});
    }
    --*item.outstanding;
    queue_.pop_front();
  }
  return progress;
}

std::size_t ReceiveStream::read_some(std::byte* into, std::size_t bytes) {
  const auto got = connection_.receive({into, bytes});
  if (got) return *got;
  if (raw_bytes_ > 0)
    throw ConnectionLost(
        "rank " + std::to_string(peer()) + " closed the connection in the middle of a message",
        peer());
  ended_ = true;
  return 0;
}

const wire::Header* ReceiveStream::header() {
  while (raw_bytes_ < raw_.size()) {
    const std::size_t got = read_some(raw_.data() + raw_bytes_, raw_.size() - raw_bytes_);
    if (got == 0) return nullptr;
    raw_bytes_ += got;
  }
  if (!header_) header_ = parse_header_of(peer(), raw_.data());
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
