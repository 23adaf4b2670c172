#include "qcoll/transport/guest.h"

#include <sys/socket.h>

#include <cerrno>

#include "qcoll/base/error.h"

namespace qcoll::transport {

bool Guest::hear(const Find& find) { return tls_ ? shake(find) : listen(find); }

bool Guest::listen(const Find& find) {
  for (;;) {
    const std::size_t wanted = hello_ ? Hello::kBytes + kProofBytes : Hello::kBytes;
    std::byte buffer[Hello::kBytes + kProofBytes];
    const ssize_t got = ::recv(fd_.get(), buffer, wanted - received_.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (got <= 0) return false;
    received_.insert(received_.end(), buffer, buffer + got);
    if (received_.size() < wanted) continue;
    if (hello_) return check_proof(find);
    if (!challenge(find)) return false;
  }
}

bool Guest::challenge(const Find& find) {
  hello_ = parse_hello(received_);
  if (!hello_) return false;
  const auto group = find(*hello_);
  if (!group) return false;
  wire::fill_random(nonce_);
  const wire::Mac mac = listener_mac(group->secret(), received_, nonce_);
  std::vector<std::byte> message(nonce_.begin(), nonce_.end());
  message.insert(message.end(), mac.begin(), mac.end());
  // A fresh connection takes 48 bytes at once, or it is not worth keeping.
  return ::send(fd_.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(message.size());
}

bool Guest::check_proof(const Find& find) {
  const auto group = find(*hello_);
  if (!group) return false;
  const ConstBytes received(received_);
  const ConstBytes hello = received.first(Hello::kBytes);
  const wire::Mac expected = dialler_mac(group->secret(), hello, nonce_);
  if (!wire::equal_in_constant_time(received.subspan(Hello::kBytes), expected)) return false;
  if (!group->encrypts()) return admit(*group);
  tls_ = std::make_unique<Tls>(Tls::Role::kListener, fd_.get(),
                               connection_key(group->secret(), hello, nonce_));
  return shake(find);
}

bool Guest::shake(const Find& find) {
  try {
    if (tls_->shake() != 0) return true;
  } catch (const ConnectionLost&) {
    return false;  // who knows the secret and fails here has died, or its packets were changed
  }
  const auto group = find(*hello_);
  return group && admit(*group);
}

bool Guest::admit(GroupLinks& group) {
  const bool encrypted = tls_ != nullptr;
  const bool adopted =
      group.adopt(hello_->purpose, Connection(std::move(fd_), hello_->from, std::move(tls_)));
  // What followed the handshake at once may have been read with it: poll will not tell of that.
  if (adopted && encrypted && hello_->purpose == Purpose::kControl) group.read_link(hello_->from);
  return false;
}

}  // namespace qcoll::transport
