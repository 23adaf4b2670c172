#include "qcoll/wire/mac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "qcoll/base/error.h"

namespace qcoll::wire {

Mac hmac_sha256(const Secret& secret, ConstBytes message) {
  Mac mac;
  unsigned length = 0;
  const auto* result = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                            reinterpret_cast<const unsigned char*>(message.data()), message.size(),
                            reinterpret_cast<unsigned char*>(mac.data()), &length);
  if (result == nullptr || length != mac.size()) throw TransportError("OpenSSL: HMAC failed");
  return mac;
}

bool equal_in_constant_time(ConstBytes a, ConstBytes b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

void fill_random(Bytes out) {
  if (RAND_bytes(reinterpret_cast<unsigned char*>(out.data()), static_cast<int>(out.size())) != 1)
    throw TransportError("OpenSSL: RAND_bytes failed");
}

}  // namespace qcoll::wire
