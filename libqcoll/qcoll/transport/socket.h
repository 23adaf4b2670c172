// Thin wrappers over TCP sockets: addresses, listening, dialling with a deadline.
#pragma once

#include <netinet/in.h>

#include <cstdint>
#include <string>
#include <vector>

#include "qcoll/base/abort_flag.h"
#include "qcoll/base/deadline.h"
#include "qcoll/base/error.h"
#include "qcoll/base/fd.h"
#include "qcoll/base/types.h"

namespace qcoll::transport {

// An IPv4 or IPv6 address without a port.
struct Address {
  sockaddr_storage storage{};

  std::string text() const;  // "10.0.0.1", "fd00::1"
  bool loopback() const;
  friend bool operator==(const Address& a, const Address& b) { return a.text() == b.text(); }
};
Address parse_address(const std::string& text);  // throws UsageError

// Addresses of this host's interfaces that are up; loopback ones last, IPv4 before IPv6. With
// `interfaces` ("eth0,eth1") only theirs. Throws UsageError that lists what exists if none match.
std::vector<Address> local_addresses(const std::string& interfaces);

struct Listener {
  Fd fd;
  std::uint16_t port = 0;
};
// Port 0: the kernel picks a free one. `only`: bind to this address instead of all.
Listener listen_on(const Address* only);

// This process has no descriptor, port or memory left for a connection; no peer is to blame.
class LocalShortage : public TransportError {
 public:
  using TransportError::TransportError;
};

// Tries the addresses in turn. Non-blocking socket with TCP_NODELAY, or TransportError that lists
// what was tried. LocalShortage when it is this process that cannot. Ends early when `abort` is
// raised.
Fd dial(const std::vector<Address>& addresses, std::uint16_t port, const Deadline& deadline,
        const AbortFlag& abort);

void set_low_latency(int fd);

// Waits for `events` of poll; false at the deadline.
bool wait_ready(int fd, short events, const Deadline& deadline, const AbortFlag& abort);

// Whole buffers over a non-blocking socket, for handshakes.
void send_all(int fd, ConstBytes bytes, const Deadline& deadline, const AbortFlag& abort);
void receive_all(int fd, Bytes bytes, const Deadline& deadline, const AbortFlag& abort);

}  // namespace qcoll::transport
