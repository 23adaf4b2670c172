// TLS 1.3 by OpenSSL over one socket, with a key that both ends hold already (RFC 8446, section
// 4.2.11): no certificates. The key comes from the connection's own handshake (handshake.h), and
// an X25519 exchange is mixed in, so that a secret that leaks later opens no recording.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "qcoll/base/abort_flag.h"
#include "qcoll/base/deadline.h"
#include "qcoll/base/types.h"
#include "qcoll/wire/mac.h"

struct ssl_st;

namespace qcoll::transport {

class Tls {
 public:
  enum class Role : std::uint8_t { kDialler, kListener };
  // A record holds at most 16 KiB. AES-GCM keys serve 2^24.5 records (RFC 8446, section 5.5).
  static constexpr std::uint64_t kRecordsPerKey = 1 << 23;

  // Over `fd`, non-blocking, which must outlive this.
  Tls(Role role, int fd, const wire::Secret& key, std::uint64_t records_per_key = kRecordsPerKey);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // One step of the handshake: the poll events to wait for, or 0 when it is complete. Throws
  // ConnectionLost when the other end does not hold the key.
  short shake();
  // All steps.
  void shake(const Deadline& deadline, const AbortFlag& abort);

  // As those of Connection. Not from two threads at once.
  std::size_t send(ConstBytes bytes, Rank peer);
  std::optional<std::size_t> receive(Bytes into, Rank peer);

 private:
  struct Callbacks;
  struct Free {
    void operator()(ssl_st* ssl) const;
  };
  bool flush();
  [[noreturn]] void fail(const std::string& action, int result, Rank peer) const;

  const int fd_;
  wire::Secret key_;
  int socket_error_ = 0;
  std::vector<std::byte> sealed_;  // for the kernel
  std::size_t flushed_ = 0;        // of it
  std::size_t carried_ = 0;        // bytes of the caller in it, not reported as taken yet
  std::uint64_t records_ = 0;      // since the key was new
  const std::uint64_t records_per_key_;
  std::unique_ptr<ssl_st, Free> ssl_;
};

}  // namespace qcoll::transport
