#include "qcoll/transport/connection.h"

#include <sys/socket.h>

#include <cerrno>
#include <string>

#include "qcoll/base/error.h"

namespace qcoll::transport {

std::size_t Connection::send(ConstBytes bytes) {
  if (tls_) return tls_->send(bytes, peer_);
  for (;;) {
    const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return static_cast<std::size_t>(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR)
      throw ConnectionLost(system_error_text("sending to rank " + std::to_string(peer_), errno),
                           peer_);
  }
}

std::optional<std::size_t> Connection::receive(Bytes into) {
  if (tls_) return tls_->receive(into, peer_);
  for (;;) {
    const ssize_t got = ::recv(fd_.get(), into.data(), into.size(), MSG_DONTWAIT);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got == 0) return std::nullopt;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR)
      throw ConnectionLost(system_error_text("receiving from rank " + std::to_string(peer_), errno),
                           peer_);
  }
}

}  // namespace qcoll::transport
