// What the fuzz targets share. A target is one function of the bytes that a stranger, a peer, the
// store or the user chose. With libFuzzer (cmake -DQCOLL_FUZZ=ON) each is a program of its own;
// otherwise all of them are in qcoll_replay, which runs the stored inputs and variations of them.
//
// A target returns, whatever the bytes are. Errors that the documentation names are caught by the
// target where they are allowed; everything else ends the program.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <string_view>

#include "qcoll/base/types.h"

namespace qcoll::attacks {

// Reads an input from its front; zeros follow its end.
class Source {
 public:
  explicit Source(ConstBytes bytes) : bytes_(bytes) {}

  bool empty() const { return bytes_.empty(); }
  std::uint8_t u8() { return number<std::uint8_t>(); }
  std::uint16_t u16() { return number<std::uint16_t>(); }
  std::uint32_t u32() { return number<std::uint32_t>(); }
  std::uint64_t u64() { return number<std::uint64_t>(); }
  ConstBytes bytes(std::size_t wanted) {
    const ConstBytes taken = bytes_.first(wanted < bytes_.size() ? wanted : bytes_.size());
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }
  ConstBytes rest() { return bytes(bytes_.size()); }
  std::string text() {
    const ConstBytes all = rest();
    return {reinterpret_cast<const char*>(all.data()), all.size()};
  }
  // Up to the separator, which is dropped.
  std::string text_until(char separator) {
    std::string text;
    while (!empty()) {
      const char c = static_cast<char>(u8());
      if (c == separator) break;
      text += c;
    }
    return text;
  }

 private:
  template <class T>
  T number() {
    std::uint64_t value = 0;
    const ConstBytes raw = bytes(sizeof(T));
    for (std::size_t i = 0; i < raw.size(); ++i)
      value |= static_cast<std::uint64_t>(raw[i]) << (8 * i);
    return static_cast<T>(value);
  }

  ConstBytes bytes_;
};

inline void ensure(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz target: expected that %s\n", what);
  std::abort();
}

// Exactly `size` bytes on the heap, so that AddressSanitizer sees every byte beyond them.
struct ExactBuffer {
  static constexpr std::align_val_t kAlignment{16};

  explicit ExactBuffer(std::size_t bytes)
      : size(bytes), data(static_cast<std::byte*>(::operator new(bytes, kAlignment))) {}
  ~ExactBuffer() { ::operator delete(data, kAlignment); }
  ExactBuffer(const ExactBuffer&) = delete;
  ExactBuffer& operator=(const ExactBuffer&) = delete;

  // Fills it with `pattern` again and again, or with zeros.
  void fill(ConstBytes pattern) {
    if (pattern.empty()) std::memset(data, 0, size);
    for (std::size_t i = 0; i < size && !pattern.empty(); i += pattern.size())
      std::memcpy(data + i, pattern.data(), std::min(pattern.size(), size - i));
  }

  const std::size_t size;
  std::byte* const data;
};

using Target = void (*)(Source& in);
inline std::map<std::string, Target>& targets() {
  static std::map<std::string, Target> all;
  return all;
}
struct Registration {
  Registration(const char* name, Target target) { targets()[name] = target; }
};

}  // namespace qcoll::attacks

#if defined(QCOLL_FUZZ_ENGINE)
#define QCOLL_FUZZ_TARGET(name)                                                       \
  static void name##_target(qcoll::attacks::Source&);                                 \
  extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) { \
    qcoll::attacks::Source in({reinterpret_cast<const std::byte*>(data), size});      \
    name##_target(in);                                                                \
    return 0;                                                                         \
  }                                                                                   \
  static void name##_target([[maybe_unused]] qcoll::attacks::Source& in)
#else
#define QCOLL_FUZZ_TARGET(name)                                                        \
  static void name##_target(qcoll::attacks::Source&);                                  \
  static const qcoll::attacks::Registration name##_registration(#name, name##_target); \
  static void name##_target([[maybe_unused]] qcoll::attacks::Source& in)
#endif
