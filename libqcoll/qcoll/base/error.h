// The two kinds of errors (docs/errors.md): the caller's and the world's.
#pragma once

#include <stdexcept>
#include <string>

#include "qcoll/base/types.h"

namespace qcoll {

// The caller's: a value that cannot be honoured. The text names the value, what was expected and
// the fix. The group stays usable. Python sees ValueError.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The world's: a dead peer, a timeout, an abort, ranks that disagree. The group is unusable
// afterwards and keeps the first cause. Python sees qcoll.TransportError.
class TransportError : public std::runtime_error {
 public:
  explicit TransportError(const std::string& what, Rank peer = -1)
      : std::runtime_error(what), peer_(peer) {}
  Rank peer() const { return peer_; }  // -1: no single rank is to blame

 private:
  Rank peer_;
};

// A stream broke. The peer's death, when that is the cause, is reported by its control link too.
class ConnectionLost : public TransportError {
 public:
  using TransportError::TransportError;
};

// "call: strerror(errno) (errno)", for a failed system call.
std::string system_error_text(const std::string& call, int error_number);

}  // namespace qcoll
