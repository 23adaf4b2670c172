// Memory that the ranks of one host share: a memfd, which has no name and therefore leaves nothing
// behind, whatever happens to its processes.
#pragma once

#include <cstddef>
#include <memory>

#include "qcoll/base/fd.h"
#include "qcoll/base/types.h"

namespace qcoll::transport {

class Memory {
 public:
  // Zero-filled; pages are taken when first written. Throws TransportError.
  static std::shared_ptr<Memory> create(std::size_t bytes);
  // Maps another process's memory through /proc/<pid>/fd/<fd>, which the kernel allows to the
  // same user in the same PID namespace only. Throws TransportError.
  static std::shared_ptr<Memory> attach(int pid, int fd, std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  // After this nobody else can attach; existing mappings stay.
  void seal() { fd_.reset(); }

 private:
  Memory(Fd fd, std::size_t bytes);

  Fd fd_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace qcoll::transport
