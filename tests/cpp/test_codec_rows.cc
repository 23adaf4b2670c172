// Every row of the kernel table returns the bits of the scalar reference.
#include <doctest/doctest.h>
#include <immintrin.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "qcoll/codec/codec.h"
#include "qcoll/wire/layout.h"
#include "test_codec_data.h"

using namespace qcoll;
using codec_test::Elements;
using codec_test::Guarded;
using wire::CodecSpec;

namespace {

CodecSpec int_codec(int bits, std::size_t block) {
  return {.kind = CodecSpec::Kind::kInt,
          .bits = static_cast<std::uint8_t>(bits),
          .block = static_cast<std::uint16_t>(block)};
}

std::vector<const codec::Kernels*> fast_rows() {
  const auto rows = codec::rows();
  return {rows.begin() + 1, rows.end()};
}

std::string name(const codec::Kernels& row, CodecSpec spec, DType t, std::size_t n) {
  return std::string(row.isa) + " " + to_string(spec) + " " + std::string(name_of(t)) + " x " +
         std::to_string(n);
}

// Everything that encoding x and decoding the chunk again produces, as bytes.
struct Result {
  std::size_t non_finite;
  std::vector<std::uint8_t> chunk, decoded, sums;
  bool operator==(const Result&) const = default;
};

// All memory ends at an inaccessible page, so that the elements of most lengths lie unaligned.
Result run(const codec::Kernels& row, CodecSpec spec, DType t, const Elements& x) {
  const std::size_t n = x.size(), size = element_bytes(t);
  const Guarded in(n * size), out(n * size), sums(n * 4);
  const Guarded chunk(wire::chunk_layout(spec, t, n).bytes);
  codec_test::put(t, x, in.data());
  std::fill_n(chunk.data(), chunk.size(), std::byte{0xab});
  for (std::size_t i = 0; i < n; ++i) {  // sums that are -0, NaN, Inf or plain
    const std::uint32_t kinds[5] = {0x80000000, 0x7fc12345, 0xff800000, 0x3f800000, 0x00000001};
    std::memcpy(sums.data() + 4 * i, &kinds[i % 5], 4);
  }
  Result r;
  r.non_finite = codec::encode(spec, t, in.data(), n, Bytes(chunk.data(), chunk.size()), row);
  codec::decode(spec, t, ConstBytes(chunk.data(), chunk.size()), n, out.data(), row);
  codec::decode_add(spec, t, ConstBytes(chunk.data(), chunk.size()), n,
                    reinterpret_cast<float*>(sums.data()), row);
  r.chunk = chunk.bytes();
  r.decoded = out.bytes();
  r.sums = sums.bytes();
  return r;
}

void check_all_rows(CodecSpec spec, DType t, const Elements& x) {
  const Result expected = run(codec::reference(), spec, t, x);
  for (const codec::Kernels* row : fast_rows()) {
    const Result got = run(*row, spec, t, x);
    if (got == expected) continue;  // a macro for each would dominate the run time
    INFO(name(*row, spec, t, x.size()));
    CHECK(got.non_finite == expected.non_finite);
    CHECK(got.chunk == expected.chunk);
    CHECK(got.decoded == expected.decoded);
    CHECK(got.sums == expected.sums);
  }
}

template <class Body>
void for_each_type_and_width(const Body& body) {
  for (const DType t : codec_test::kTypes)
    for (const int bits : {8, 4}) body(t, bits);
}

}  // namespace

TEST_CASE("codec rows: this machine runs at least one vector row") {
  CHECK(std::string(codec::rows().front()->isa) == "reference");
  CHECK(codec::rows().size() >= 2);
}

TEST_CASE("codec rows: every length from 0 to two blocks and one") {
  codec_test::Random random(1);
  for_each_type_and_width([&](DType t, int bits) {
    for (const std::size_t block : {32, 64, 96, 128, 256})
      for (std::size_t n = 0; n <= 2 * block + 1; ++n)
        check_all_rows(int_codec(bits, block), t, codec_test::mixture(t, bits, block, n, random));
  });
}

TEST_CASE("codec rows: blocks of every kind, alone and whole") {
  codec_test::Random random(2);
  for_each_type_and_width([&](DType t, int bits) {
    for (const std::size_t block : {32, 128, 256, 4096})
      for (int kind = 0; kind < codec_test::kKinds; ++kind)
        for (int round = 0; round < 4; ++round)
          check_all_rows(
              int_codec(bits, block), t,
              codec_test::block_of(static_cast<codec_test::Kind>(kind), t, bits, block, random));
  });
}

TEST_CASE("codec rows: lengths around tiles of large blocks, and a large tensor") {
  codec_test::Random random(3);
  for_each_type_and_width([&](DType t, int bits) {
    for (const auto& [block, n] : {std::tuple{512, 4095},
                                   {1024, 2049},
                                   {1056, 4000},
                                   {2048, 6143},
                                   {2080, 4161},
                                   {4064, 8191},
                                   {4096, 4097},
                                   {4096, 12288},
                                   {32, 2079},
                                   {32, 4129},
                                   {256, 300'007}})
      check_all_rows(int_codec(bits, static_cast<std::size_t>(block)), t,
                     codec_test::mixture(t, bits, static_cast<std::size_t>(block),
                                         static_cast<std::size_t>(n), random));
  });
}

TEST_CASE("codec rows: flush-to-zero modes change no encoded byte and no decoded value") {
  constexpr unsigned kFlush = 0x8040;  // FTZ and DAZ
  codec_test::Random random(6);
  for_each_type_and_width([&](DType t, int bits) {
    for (int round = 0; round < 60; ++round) {
      const CodecSpec spec = int_codec(bits, 64);
      const Elements x = codec_test::mixture(t, bits, 64, 1000, random);
      const Result expected = run(codec::reference(), spec, t, x);
      for (const codec::Kernels* row : codec::rows()) {
        const unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | kFlush);
        const Result got = run(*row, spec, t, x);
        _mm_setcsr(mode);
        INFO(name(*row, spec, t, x.size()));
        CHECK(got.chunk == expected.chunk);
        CHECK(got.decoded == expected.decoded);
      }
    }
  });
}

TEST_CASE("codec rows: any chunk decodes alike, also one that no encoder writes") {
  codec_test::Random random(4);
  for_each_type_and_width([&](DType t, int bits) {
    for (int round = 0; round < 200; ++round) {
      const std::size_t n = 1 + random() % 700;
      const CodecSpec spec = int_codec(bits, 32 * (1 + random() % 8));
      const Guarded chunk(wire::chunk_layout(spec, t, n).bytes);
      for (std::size_t i = 0; i < chunk.size(); ++i)
        chunk.data()[i] = static_cast<std::byte>(random());
      std::vector<std::vector<std::uint8_t>> decoded, sums;
      for (const codec::Kernels* row : codec::rows()) {
        const Guarded y(n * element_bytes(t)), sum(4 * n);
        const ConstBytes encoded(chunk.data(), chunk.size());
        codec::decode(spec, t, encoded, n, y.data(), *row);
        codec::decode_add(spec, t, encoded, n, reinterpret_cast<float*>(sum.data()), *row);
        decoded.push_back(y.bytes());
        sums.push_back(sum.bytes());
      }
      for (std::size_t i = 1; i < decoded.size(); ++i) {
        INFO(name(*codec::rows()[i], spec, t, n));
        CHECK(decoded[i] == decoded[0]);
        CHECK(sums[i] == sums[0]);
      }
    }
  });
}

TEST_CASE("codec rows: streamed outputs hold the same bits, and nothing beside them changes") {
  constexpr std::size_t kMargin = 64;  // a line
  codec_test::Random random(7);
  for (const DType t : codec_test::kTypes) {
    const std::size_t size = element_bytes(t);
    for (const char* codec : {"int8:32", "int8:256", "int8:4096", "int4:32", "int4:128",
                              "int4:4096", "bf16", "exact"}) {
      const CodecSpec spec = wire::parse_codec(codec);
      for (const std::size_t n : {0,   1,   2,   15,  16,  17,  31,   32,   33,   63,    65,
                                  127, 255, 256, 257, 511, 513, 1000, 4095, 4129, 20'011}) {
        const Elements x = codec_test::mixture(t, spec.bits == 4 ? 4 : 8, 128, n, random);
        const Guarded in(n * size), chunk(wire::chunk_layout(spec, t, n).bytes);
        const Bytes encoded(chunk.data(), chunk.size());
        codec_test::put(t, x, in.data());
        codec::encode(spec, t, in.data(), n, encoded, codec::reference());
        std::vector<std::byte> expected(n * size);
        codec::decode(spec, t, encoded, n, expected.data(), codec::reference());
        for (const codec::Kernels* row : codec::rows())
          for (std::size_t offset = 0; offset < kMargin; offset += n < 300 ? size : 7 * size) {
            std::vector<std::byte> memory(n * size + 3 * kMargin, std::byte{0xab});
            const std::size_t past = reinterpret_cast<std::uintptr_t>(memory.data()) % kMargin;
            std::byte* const y = memory.data() + kMargin - past + offset;
            codec::decode(spec, t, encoded, n, y, *row, codec::Store::kStreaming);
            const auto untouched = [](std::byte b) { return b == std::byte{0xab}; };
            const bool same = std::equal(expected.begin(), expected.end(), y) &&
                              std::all_of(memory.data(), y, untouched) &&
                              std::all_of(y + n * size, memory.data() + memory.size(), untouched);
            INFO(name(*row, spec, t, n) << " at " << offset);
            if (!same) CHECK(same);
          }
      }
    }
  }
}

TEST_CASE("codec rows: streamed outputs may end where memory does") {
  codec_test::Random random(8);
  for_each_type_and_width([&](DType t, int bits) {
    for (const std::size_t n : {1, 33, 4095, 8193}) {
      const CodecSpec spec = int_codec(bits, 128);
      const Elements x = codec_test::mixture(t, bits, 128, n, random);
      const Guarded in(n * element_bytes(t)), cached(in.size()), streamed(in.size());
      const Guarded chunk(wire::chunk_layout(spec, t, n).bytes);
      const Bytes encoded(chunk.data(), chunk.size());
      codec_test::put(t, x, in.data());
      codec::encode(spec, t, in.data(), n, encoded);
      codec::decode(spec, t, encoded, n, cached.data(), codec::reference());
      for (const codec::Kernels* row : codec::rows()) {
        codec::decode(spec, t, encoded, n, streamed.data(), *row, codec::Store::kStreaming);
        INFO(name(*row, spec, t, n));
        CHECK(streamed.bytes() == cached.bytes());
      }
    }
  });
}

TEST_CASE("codec rows: only large tensors are streamed") {
  CHECK(codec::store_for(0) == codec::Store::kCached);
  CHECK(codec::store_for(codec::kStreamAbove) == codec::Store::kCached);
  CHECK(codec::store_for(codec::kStreamAbove + 1) == codec::Store::kStreaming);
}

TEST_CASE("codec rows: casts, sums and stores of any bits and any length") {
  codec_test::Random random(5);
  for (const DType t : codec_test::kTypes) {
    const auto k = static_cast<std::size_t>(t);
    for (const std::size_t n : {0, 1, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 1000, 20'011}) {
      const Guarded x(n * element_bytes(t)), halves(2 * n), floats(4 * n);
      for (const Guarded* g : {&x, &halves, &floats})
        for (std::size_t i = 0; i < g->size(); ++i) g->data()[i] = static_cast<std::byte>(random());
      const auto* as_bf16 = reinterpret_cast<const std::uint16_t*>(halves.data());
      const auto* as_f32 = reinterpret_cast<const float*>(floats.data());
      const auto outputs = [&](const codec::Kernels& row) {
        std::vector<std::vector<std::uint8_t>> all;
        const Guarded h(2 * n), y(n * element_bytes(t)), sum(4 * n);
        const auto keep = [&](const Guarded& g) { all.push_back(g.bytes()); };
        row.to_bf16[k](x.data(), n, reinterpret_cast<std::uint16_t*>(h.data())), keep(h);
        row.from_bf16[k](as_bf16, n, y.data(), codec::Store::kCached), keep(y);
        row.widen[k](x.data(), n, reinterpret_cast<float*>(sum.data())), keep(sum);
        if (n != 0) std::memcpy(sum.data(), as_f32, 4 * n);
        row.widen_add[k](x.data(), n, reinterpret_cast<float*>(sum.data())), keep(sum);
        row.store_sum[k](as_f32, n, y.data()), keep(y);
        for (const float divisor : {1.0f, 2.0f, 3.0f, 7.0f, 4096.0f})
          row.store_mean[k](as_f32, n, divisor, y.data()), keep(y);
        for (const float factor : {0.5f, -3.0f, 1e-30f, 1e30f})
          row.store_scaled[k](as_f32, n, factor, y.data()), keep(y);
        return all;
      };
      const auto expected = outputs(codec::reference());
      for (const codec::Kernels* row : fast_rows()) {
        INFO(row->isa << " " << name_of(t) << " x " << n);
        CHECK(outputs(*row) == expected);
      }
    }
  }
}
