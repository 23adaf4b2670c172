// Stores past the caches, for outputs that leave them before they are read: an ordinary store first
// reads the line that it is about to overwrite, a third of the traffic of a copy.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "qcoll/codec/tiles.inl"

namespace qcoll::codec {
namespace {

constexpr std::size_t kLine = 64;    // bytes
constexpr std::size_t kPage = 4096;  // bytes, the smallest

inline std::size_t past_line(const void* y) { return reinterpret_cast<std::uintptr_t>(y) % kLine; }

// One aligned line. Lines that are streamed in parts would be written in parts, and slowly.
inline void stream_line(const void* x, void* y) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(y), _mm512_loadu_si512(x));
#elif defined(__AVX2__)
  const auto* from = static_cast<const __m256i*>(x);
  auto* to = static_cast<__m256i*>(y);
  for (int i = 0; i < 2; ++i) _mm256_stream_si256(to + i, _mm256_loadu_si256(from + i));
#else
  const auto* from = static_cast<const __m128i*>(x);
  auto* to = static_cast<__m128i*>(y);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
#endif
}

// Copies n elements, at most a page: whole lines of y past the caches, the others as usual.
template <class T>
inline void stream_part(const T* x, std::size_t n, T* y) {
  constexpr std::size_t kStep = kLine / sizeof(T);
  std::size_t i = 0;
  for (; i < n && past_line(y + i) != 0; ++i) y[i] = x[i];
  for (; i + kStep <= n; i += kStep) stream_line(x + i, y + i);
  for (; i < n; ++i) y[i] = x[i];
  // Where a page lies takes as long to find out as half of it to write, and unlike for ordinary
  // stores nothing asks ahead.
  const auto page_of = [](const T* at) { return reinterpret_cast<std::uintptr_t>(at) / kPage; };
  if (page_of(y + n) != page_of(y))
    __builtin_prefetch(reinterpret_cast<const std::byte*>(y + n) + kPage);
}

// Streamed bytes become visible in no order; after this they lie before all that follows.
inline void end_stream() { _mm_sfence(); }

// Elements on their way to y. They are staged a few lines at a time: while these wait for the
// memory, the next ones are computed.
template <class T>
class Stream {
 public:
  static constexpr std::size_t kRoom = 256;

  explicit Stream(T* y) : y_(y) {}

  T* room() { return stage_ + staged_; }  // for kRoom elements
  void add(std::size_t n) {               // which were written there
    staged_ += n;
    if (staged_ >= kEnough) send_lines();
  }
  void finish() {
    stream_part(stage_, staged_, y_);
    end_stream();
  }

 private:
  // What does not fill a line stays for the next time.
  void send_lines() {
    const std::size_t rest = past_line(y_ + staged_) / sizeof(T);
    const std::size_t n = staged_ - rest;
    stream_part(stage_, n, y_);
    y_ += n;
    for (std::size_t i = 0; i < rest; ++i) stage_[i] = stage_[n + i];
    staged_ = rest;
  }

  static constexpr std::size_t kEnough = 1024 / sizeof(T);
  alignas(kLine) T stage_[kEnough + kRoom];
  std::size_t staged_ = 0;
  T* y_;
};

// memcpy past the caches.
inline void stream_copy(const void* x, std::size_t bytes, void* y) {
  constexpr std::size_t kPart = 1024;
  const auto* from = static_cast<const std::byte*>(x);
  auto* to = static_cast<std::byte*>(y);
  // From the second part on, lines are whole.
  for (std::size_t n; bytes != 0; from += n, to += n, bytes -= n) {
    n = least(kPart - past_line(to), bytes);
    stream_part(from, n, to);
  }
  end_stream();
}

}  // namespace
}  // namespace qcoll::codec
