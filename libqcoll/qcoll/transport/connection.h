// A TCP connection between two ranks of a group, once both have proven themselves. Non-blocking.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "qcoll/base/fd.h"
#include "qcoll/base/types.h"
#include "qcoll/transport/tls.h"

namespace qcoll::transport {

class Connection {
 public:
  Connection() = default;
  // With `tls`, whose handshake is complete, everything is encrypted.
  Connection(Fd fd, Rank peer, std::unique_ptr<Tls> tls = nullptr)
      : fd_(std::move(fd)), peer_(peer), tls_(std::move(tls)) {}

  explicit operator bool() const { return static_cast<bool>(fd_); }
  int fd() const { return fd_.get(); }
  Rank peer() const { return peer_; }
  bool encrypted() const { return tls_ != nullptr; }

  // Bytes taken now; 0: none can be. A call that took none, or not all, is repeated with the same
  // bytes when poll says POLLOUT. Throws ConnectionLost.
  std::size_t send(ConstBytes bytes);
  // Bytes that came; 0: none now; nothing: the peer closed. After 0 poll tells when more come, not
  // before: some may wait decrypted. Throws ConnectionLost.
  std::optional<std::size_t> receive(Bytes into);

 private:
  Fd fd_;
  Rank peer_ = -1;
  std::unique_ptr<Tls> tls_;
};

}  // namespace qcoll::transport
