#include "qcoll/transport/tls.h"

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "qcoll/base/error.h"
#include "qcoll/transport/socket.h"

namespace qcoll::transport {
namespace {

constexpr unsigned char kIdentity[] = "qcoll";  // there is one key for each connection
constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
// A system call takes several records. They stay in the cache that they were sealed in.
constexpr std::size_t kBatch = 128 * 1024;
constexpr std::size_t kReadAhead = 128 * 1024;

std::string queued_errors() {
  std::string text;
  char line[256];
  for (unsigned long code; (code = ERR_get_error()) != 0;) {
    ERR_error_string_n(code, line, sizeof(line));
    text += (text.empty() ? "" : "; ") + std::string(line);
  }
  return text;
}

void require(bool well, const char* what) {
  if (!well) throw TransportError("OpenSSL: " + std::string(what) + " failed: " + queued_errors());
}

// What OpenSSL keeps for each SSL object to find ours.
Tls* tls_of(const SSL* ssl) { return static_cast<Tls*>(SSL_get_app_data(ssl)); }

}  // namespace

struct Tls::Callbacks {
  static SSL_SESSION* session(SSL* ssl) {
    SSL_SESSION* session = SSL_SESSION_new();
    const wire::Secret& key = tls_of(ssl)->key_;
    if (session == nullptr ||
        SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key.data()),
                                    key.size()) != 1 ||
        SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, kAes128GcmSha256)) != 1 ||
        SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) != 1) {
      SSL_SESSION_free(session);
      return nullptr;
    }
    return session;
  }

  static int offer(SSL* ssl, const EVP_MD*, const unsigned char** identity, std::size_t* bytes,
                   SSL_SESSION** out) {
    *out = session(ssl);
    *identity = kIdentity;
    *bytes = sizeof(kIdentity) - 1;
    return *out != nullptr ? 1 : 0;
  }

  static int find(SSL* ssl, const unsigned char* identity, std::size_t bytes, SSL_SESSION** out) {
    const bool ours =
        std::equal(identity, identity + bytes, kIdentity, kIdentity + sizeof(kIdentity) - 1);
    *out = ours ? session(ssl) : nullptr;  // none: the handshake fails, there is no certificate
    return 1;
  }

  static int write(BIO* bio, const char* data, int bytes) {
    std::vector<std::byte>& sealed = static_cast<Tls*>(BIO_get_data(bio))->sealed_;
    const auto* begin = reinterpret_cast<const std::byte*>(data);
    sealed.insert(sealed.end(), begin, begin + bytes);
    return bytes;
  }

  static int read(BIO* bio, char* data, int bytes) {
    Tls& tls = *static_cast<Tls*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    ssize_t got;
    do got = ::recv(tls.fd_, data, static_cast<std::size_t>(bytes), MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
      BIO_set_retry_read(bio);
    else if (got < 0)
      tls.socket_error_ = errno;
    else if (got == 0)
      BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
    return static_cast<int>(got);
  }

  static long control(BIO* bio, int command, long, void*) {
    if (command == BIO_CTRL_FLUSH) return 1;
    return command == BIO_CTRL_EOF ? BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0 : 0;
  }

  static const BIO_METHOD* socket_bio() {
    static const BIO_METHOD* const method = [] {
      BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "qcoll socket");
      require(made != nullptr, "BIO_meth_new");
      BIO_meth_set_write(made, write);
      BIO_meth_set_read(made, read);
      BIO_meth_set_ctrl(made, control);
      return made;
    }();
    return method;
  }

  static SSL_CTX* context(Role role) {
    const auto make = [](Role of) {
      const bool dialler = of == Role::kDialler;
      SSL_CTX* made = SSL_CTX_new(dialler ? TLS_client_method() : TLS_server_method());
      require(made != nullptr, "SSL_CTX_new");
      require(SSL_CTX_set_min_proto_version(made, TLS1_3_VERSION) == 1, "TLS 1.3");
      require(SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256") == 1, "AES-128-GCM");
      require(SSL_CTX_set1_groups_list(made, "X25519") == 1, "X25519");
      // The farewell on the control link tells an orderly end, as without encryption.
      SSL_CTX_set_options(made, SSL_OP_IGNORE_UNEXPECTED_EOF);
      SSL_CTX_set_mode(made, SSL_MODE_ENABLE_PARTIAL_WRITE);
      SSL_CTX_set_num_tickets(made, 0);  // a dialler of a data stream never reads
      SSL_CTX_set_session_cache_mode(made, SSL_SESS_CACHE_OFF);
      SSL_CTX_set_read_ahead(made, 1);
      SSL_CTX_set_default_read_buffer_len(made, kReadAhead);
      // Nobody is trusted for a certificate: a listener that answers with one is refused.
      SSL_CTX_set_verify(made, dialler ? SSL_VERIFY_PEER : SSL_VERIFY_NONE, nullptr);
      if (dialler)
        SSL_CTX_set_psk_use_session_callback(made, offer);
      else
        SSL_CTX_set_psk_find_session_callback(made, find);
      return made;
    };
    static SSL_CTX* const dialler = make(Role::kDialler);
    static SSL_CTX* const listener = make(Role::kListener);
    return role == Role::kDialler ? dialler : listener;
  }
};

void Tls::Free::operator()(ssl_st* ssl) const { SSL_free(ssl); }

Tls::Tls(Role role, int fd, const wire::Secret& key, std::uint64_t records_per_key)
    : fd_(fd),
      key_(key),
      records_per_key_(records_per_key),
      ssl_(SSL_new(Callbacks::context(role))) {
  require(ssl_ != nullptr, "SSL_new");
  BIO* bio = BIO_new(Callbacks::socket_bio());
  require(bio != nullptr, "BIO_new");
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_.get(), bio, bio);
  SSL_set_app_data(ssl_.get(), this);
  if (role == Role::kDialler)
    SSL_set_connect_state(ssl_.get());
  else
    SSL_set_accept_state(ssl_.get());
}

Tls::~Tls() { OPENSSL_cleanse(key_.data(), key_.size()); }

short Tls::shake() {
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  const bool flushed = flush();
  if (socket_error_ != 0) fail("the TLS handshake", result, -1);
  if (!flushed) return POLLOUT;
  if (result == 1) {
    OPENSSL_cleanse(key_.data(), key_.size());
    // Who could do without the key is not a member, whatever else it has shown.
    if (SSL_session_reused(ssl_.get()) != 1)
      throw ConnectionLost("the other end did not use the key of this connection for TLS");
    return 0;
  }
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return POLLIN;
    default:
      fail("the TLS handshake", result, -1);
  }
}

void Tls::shake(const Deadline& deadline, const AbortFlag& abort) {
  while (const short events = shake())
    if (!wait_ready(fd_, events, deadline, abort)) throw TransportError("TLS handshake timed out");
}

// False: the kernel takes no more now.
bool Tls::flush() {
  while (flushed_ < sealed_.size()) {
    const ssize_t sent = ::send(fd_, sealed_.data() + flushed_, sealed_.size() - flushed_,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (sent < 0) {
      socket_error_ = errno;
      return false;
    }
    flushed_ += static_cast<std::size_t>(sent);
  }
  sealed_.clear();
  flushed_ = 0;
  return true;
}

// Several records go to the kernel at once. Bytes count as taken when the kernel has all of them,
// so that nothing waits here that nobody polls for.
std::size_t Tls::send(ConstBytes bytes, Rank peer) {
  const std::string action = "sending to rank " + std::to_string(peer);
  std::size_t taken = 0;
  for (;;) {
    if (!flush()) {
      if (socket_error_ != 0) throw ConnectionLost(system_error_text(action, socket_error_), peer);
      return taken;
    }
    taken += std::exchange(carried_, 0);
    if (taken == bytes.size()) return taken;
    ERR_clear_error();
    const ConstBytes batch = bytes.subspan(taken, std::min(bytes.size() - taken, kBatch));
    while (carried_ < batch.size()) {
      if (records_ == records_per_key_) {
        // Takes effect with the next record; this end's key alone changes.
        require(SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) == 1, "SSL_key_update");
        records_ = 0;
      }
      std::size_t sealed = 0;
      const int result =
          SSL_write_ex(ssl_.get(), batch.data() + carried_, batch.size() - carried_, &sealed);
      if (result != 1) fail(action, result, peer);
      carried_ += sealed;
      ++records_;
    }
  }
}

std::optional<std::size_t> Tls::receive(Bytes into, Rank peer) {
  ERR_clear_error();
  std::size_t got = 0;
  const int result = SSL_read_ex(ssl_.get(), into.data(), into.size(), &got);
  if (result == 1) return got;
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return 0;
    case SSL_ERROR_ZERO_RETURN:
      return std::nullopt;
    default:
      fail("receiving from rank " + std::to_string(peer), result, peer);
  }
}

void Tls::fail(const std::string& action, int result, Rank peer) const {
  const int error = SSL_get_error(ssl_.get(), result);
  const std::string queued = queued_errors();
  if (socket_error_ != 0) throw ConnectionLost(system_error_text(action, socket_error_), peer);
  if (error == SSL_ERROR_ZERO_RETURN || queued.empty())
    throw ConnectionLost(action + ": the other end closed the connection", peer);
  throw ConnectionLost(action + ": TLS failed (" + queued + ")", peer);
}

}  // namespace qcoll::transport
