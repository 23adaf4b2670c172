#include "qcoll/transport/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

#include "qcoll/base/error.h"

namespace qcoll::transport {

std::shared_ptr<Memory> Memory::create(std::size_t bytes) {
  Fd fd(::memfd_create("qcoll", MFD_CLOEXEC));
  if (!fd) throw TransportError(system_error_text("memfd_create", errno));
  if (::fchmod(fd.get(), 0600) != 0 || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    throw TransportError(
        system_error_text("ftruncate of " + std::to_string(bytes) + " bytes", errno));
  return std::shared_ptr<Memory>(new Memory(std::move(fd), bytes));
}

std::shared_ptr<Memory> Memory::attach(int pid, int fd, std::size_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  Fd opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!opened) throw TransportError(system_error_text("open of " + path, errno));
  struct stat status{};
  if (::fstat(opened.get(), &status) != 0)
    throw TransportError(system_error_text("fstat of " + path, errno));
  if (static_cast<std::size_t>(status.st_size) != bytes)
    throw TransportError(path + " has " + std::to_string(status.st_size) + " bytes, expected " +
                         std::to_string(bytes));
  auto memory = std::shared_ptr<Memory>(new Memory(std::move(opened), bytes));
  memory->seal();
  return memory;
}

Memory::Memory(Fd fd, std::size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED)
    throw TransportError(system_error_text("mmap of " + std::to_string(bytes) + " bytes", errno));
  data_ = static_cast<std::byte*>(mapped);
}

Memory::~Memory() { ::munmap(data_, bytes_); }

}  // namespace qcoll::transport
