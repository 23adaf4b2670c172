#include "qcoll/transport/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <sstream>

#include "qcoll/base/error.h"

namespace qcoll::transport {
namespace {

constexpr auto kDialOneAddress = std::chrono::seconds(5);
constexpr int kBacklog = 1024;

socklen_t length_of(const sockaddr_storage& storage) {
  return storage.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

sockaddr_storage with_port(const Address& address, std::uint16_t port) {
  sockaddr_storage storage = address.storage;
  if (storage.ss_family == AF_INET6)
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
  else
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  return storage;
}

bool link_local(const sockaddr_storage& storage) {
  return storage.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
}

// What this host lacks, not the other.
bool lacks_resources(int error_number) {
  return error_number == EMFILE || error_number == ENFILE || error_number == ENOBUFS ||
         error_number == ENOMEM || error_number == EADDRNOTAVAIL;
}

// Returns an empty Fd and sets `why` when this address does not answer. Throws LocalShortage.
Fd dial_one(const Address& address, std::uint16_t port, const Deadline& deadline,
            const AbortFlag& abort, std::string& why) {
  const sockaddr_storage storage = with_port(address, port);
  Fd fd(::socket(storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) {
    why = system_error_text("socket", errno);
    if (lacks_resources(errno)) throw LocalShortage(why);
    return {};
  }
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&storage), length_of(storage)) != 0) {
    if (errno != EINPROGRESS) {
      why = system_error_text("connect", errno);
      if (lacks_resources(errno)) throw LocalShortage(why);
      return {};
    }
    const Deadline one(std::min<Clock::duration>(kDialOneAddress, deadline.at() - Clock::now()));
    if (!wait_ready(fd.get(), POLLOUT, one, abort)) {
      why = "no answer";
      return {};
    }
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      why = system_error_text("connect", error);
      return {};
    }
  }
  set_low_latency(fd.get());
  return fd;
}

}  // namespace

std::string Address::text() const {
  char buffer[INET6_ADDRSTRLEN] = {};
  const void* raw =
      storage.ss_family == AF_INET6
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr)
          : &reinterpret_cast<const sockaddr_in&>(storage).sin_addr;
  ::inet_ntop(storage.ss_family, raw, buffer, sizeof(buffer));
  return buffer;
}

bool Address::loopback() const {
  if (storage.ss_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
  return (ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr) >> 24) == 127;
}

Address parse_address(const std::string& text) {
  Address address;
  auto& v4 = reinterpret_cast<sockaddr_in&>(address.storage);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address.storage);
  if (::inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1)
    address.storage.ss_family = AF_INET;
  else if (::inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr) == 1)
    address.storage.ss_family = AF_INET6;
  else
    throw UsageError("\"" + text + "\" is not an IPv4 or IPv6 address");
  return address;
}

std::vector<Address> local_addresses(const std::string& interfaces) {
  std::set<std::string> wanted;
  std::stringstream list(interfaces);
  for (std::string name; std::getline(list, name, ',');) wanted.insert(name);

  ifaddrs* head = nullptr;
  if (::getifaddrs(&head) != 0) throw TransportError(system_error_text("getifaddrs", errno));
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(head, &::freeifaddrs);
  std::vector<Address> found;
  std::set<std::string> names;
  for (const ifaddrs* entry = head; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    names.insert(entry->ifa_name);
    if (!wanted.empty() && !wanted.contains(entry->ifa_name)) continue;
    Address address;
    std::memcpy(&address.storage, entry->ifa_addr,
                family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (!link_local(address.storage)) found.push_back(address);
  }
  if (found.empty()) {
    std::string text;
    for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
    throw UsageError("QCOLL_SOCKET_IFNAME=\"" + interfaces +
                     "\" names no interface that is up and has an address; this host has: " + text);
  }
  std::stable_sort(found.begin(), found.end(), [](const Address& a, const Address& b) {
    const auto order = [](const Address& x) {
      return (x.loopback() ? 2 : 0) + (x.storage.ss_family == AF_INET6 ? 1 : 0);
    };
    return order(a) < order(b);
  });
  return found;
}

Listener listen_on(const Address* only) {
  // All addresses: one IPv6 socket takes IPv4 too; without IPv6 in the kernel, IPv4 alone.
  std::vector<Address> candidates;
  if (only != nullptr)
    candidates = {*only};
  else
    candidates = {parse_address("::"), parse_address("0.0.0.0")};
  std::string why;
  for (const Address& address : candidates) {
    Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int off = 0;
    if (fd && only == nullptr && address.storage.ss_family == AF_INET6)
      ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    sockaddr_storage storage = with_port(address, 0);
    socklen_t length = length_of(storage);
    if (!fd || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&storage), length) != 0 ||
        ::listen(fd.get(), kBacklog) != 0 ||
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
      why = system_error_text("listening on " + address.text(), errno);
      continue;
    }
    const std::uint16_t port = ntohs(address.storage.ss_family == AF_INET6
                                         ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                                         : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
    return {std::move(fd), port};
  }
  throw TransportError(why);
}

Fd dial(const std::vector<Address>& addresses, std::uint16_t port, const Deadline& deadline,
        const AbortFlag& abort) {
  if (addresses.empty())
    throw TransportError(
        "the peer offers no address but loopback ones, which lead nowhere from this "
        "host; check its QCOLL_SOCKET_IFNAME");
  std::string tried;
  for (const Address& address : addresses) {
    std::string why;
    Fd fd = dial_one(address, port, deadline, abort, why);
    if (fd) return fd;
    tried +=
        (tried.empty() ? "" : "; ") + address.text() + " port " + std::to_string(port) + ": " + why;
    if (deadline.passed()) break;
  }
  throw TransportError("no connection (" + tried +
                       "); check the network between the hosts, firewalls, and "
                       "QCOLL_SOCKET_IFNAME");
}

void set_low_latency(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

bool wait_ready(int fd, short events, const Deadline& deadline, const AbortFlag& abort) {
  for (;;) {
    abort.throw_if_raised();
    pollfd fds[2] = {{fd, events, 0}, {abort.fd(), POLLIN, 0}};
    const int ready = ::poll(fds, 2, deadline.poll_milliseconds(std::chrono::seconds(1)));
    if (ready > 0 && fds[0].revents != 0) return true;
    if (deadline.passed()) return false;
  }
}

void send_all(int fd, ConstBytes bytes, const Deadline& deadline, const AbortFlag& abort) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0)
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_ready(fd, POLLOUT, deadline, abort)) throw TransportError("handshake timed out");
    } else if (errno != EINTR) {
      throw ConnectionLost(system_error_text("send", errno));
    }
  }
}

void receive_all(int fd, Bytes bytes, const Deadline& deadline, const AbortFlag& abort) {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), 0);
    if (got > 0)
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    else if (got == 0)
      throw ConnectionLost("the peer closed the connection during the handshake");
    else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_ready(fd, POLLIN, deadline, abort)) throw TransportError("handshake timed out");
    } else if (errno != EINTR) {
      throw ConnectionLost(system_error_text("recv", errno));
    }
  }
}

}  // namespace qcoll::transport
