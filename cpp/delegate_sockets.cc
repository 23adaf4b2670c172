#include "delegate_sockets.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <functional>
#include <string>

namespace qcoll::torch_binding {
namespace {

// 0 when `fd` is not a TCP socket with an address.
std::uint16_t local_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  int type = 0;
  socklen_t type_length = sizeof(type);
  if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_length) != 0 || type != SOCK_STREAM ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    return 0;
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<sockaddr_in6&>(address).sin6_port);
  return 0;
}

bool listens(int fd) {
  int listening = 0;
  socklen_t length = sizeof(listening);
  return ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) == 0 && listening != 0;
}

void for_each_descriptor(const std::function<void(int)>& visit) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const std::string name = entry.path().filename();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    if (fd >= 0) visit(fd);
  }
}

}  // namespace

std::vector<std::uint16_t> listening_ports() {
  std::vector<std::uint16_t> ports;
  for_each_descriptor([&](int fd) {
    if (const std::uint16_t port = local_port(fd); port != 0 && listens(fd)) ports.push_back(port);
  });
  std::sort(ports.begin(), ports.end());
  return ports;
}

void end_connections_accepted_on(const std::vector<std::uint16_t>& ports) noexcept {
  try {
    for_each_descriptor([&](int fd) {
      const std::uint16_t port = local_port(fd);
      if (std::find(ports.begin(), ports.end(), port) != ports.end() && !listens(fd))
        ::shutdown(fd, SHUT_RDWR);
    });
  } catch (...) {  // without /proc or descriptors: the calls end by their own timeouts
  }
}

}  // namespace qcoll::torch_binding
