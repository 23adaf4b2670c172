// Wakes a data path that sleeps in poll(2): a pipe, whose write end the ranks of the same host
// open through /proc. One wait can then cover shared memory, sockets and aborts together, which
// a futex cannot.
#pragma once

#include "qcoll/base/fd.h"

namespace qcoll::transport {

class Bell {
 public:
  static Bell create();
  static Bell attach(int pid, int write_fd);  // can ring, not listen

  void ring() const;   // never blocks; a full pipe already wakes
  void quiet() const;  // takes all rings that are pending
  int listen_fd() const { return read_.get(); }
  int ring_fd() const { return write_.get(); }

 private:
  Fd read_;
  Fd write_;
};

}  // namespace qcoll::transport
