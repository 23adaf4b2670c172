// How the codec scales over the threads of a rank: chunks of 256 KiB encoded into a ring that stays
// in the caches, and decoded from it into a large tensor. Teams take turns in each round; time is
// that of the clock. Prints "verb codec threads median-GB/s ratio-to-one-thread least most".
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "qcoll/base/deadline.h"
#include "qcoll/codec/codec.h"
#include "qcoll/host/team.h"
#include "qcoll/wire/layout.h"

using namespace qcoll;

namespace {

constexpr std::size_t kChunk = 64 * 1024;  // float32 elements
constexpr std::size_t kChunks = 256;       // 64 MiB
constexpr std::size_t kRing = 4;
constexpr int kRounds = 31;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : 2;
  std::vector<float> tensor(kChunk * kChunks, 1.5F);
  for (std::size_t i = 0; i < tensor.size(); ++i) tensor[i] = static_cast<float>(i % 1021) - 510;
  std::vector<float> output(tensor.size());
  std::vector<std::unique_ptr<host::Team>> teams;
  for (int threads = 1; threads <= most; threads *= 2)
    teams.push_back(std::make_unique<host::Team>(threads));
  for (const std::string name : {"int8:256", "int4:128"}) {
    const wire::CodecSpec spec = wire::parse_codec(name);
    const std::size_t bytes = wire::chunk_layout(spec, DType::kF32, kChunk).bytes;
    const std::size_t unit = codec::part_unit(spec);
    std::vector<std::byte> memory(kRing * bytes + 64);
    std::byte* const ring = memory.data() + (-reinterpret_cast<std::uintptr_t>(memory.data()) & 63);
    std::map<std::string, std::map<int, std::vector<double>>> seconds;
    for (int round = 0; round < kRounds; ++round)
      for (auto& team : teams) {
        auto begin = Clock::now();
        for (std::size_t c = 0; c < kChunks; ++c)
          team->split(kChunk, unit, [&](std::size_t at, std::size_t n) {
            codec::encode_part(spec, DType::kF32, tensor.data() + c * kChunk + at, kChunk,
                               {ring + c % kRing * bytes, bytes}, {at, n}, codec::best());
          });
        auto end = Clock::now();
        seconds["encode"][team->threads()].push_back(
            std::chrono::duration<double>(end - begin).count());
        begin = Clock::now();
        for (std::size_t c = 0; c < kChunks; ++c)
          team->split(kChunk, unit, [&](std::size_t at, std::size_t n) {
            codec::decode_part(spec, DType::kF32, {ring + c % kRing * bytes, bytes}, kChunk,
                               {at, n}, output.data() + c * kChunk + at, codec::best(),
                               codec::Store::kStreaming);
          });
        end = Clock::now();
        seconds["decode"][team->threads()].push_back(
            std::chrono::duration<double>(end - begin).count());
      }
    for (const auto& [verb, by_threads] : seconds)
      for (const auto& [threads, times] : by_threads) {
        std::vector<double> ratios;
        for (int r = 0; r < kRounds; ++r) ratios.push_back(by_threads.at(1)[r] / times[r]);
        std::sort(ratios.begin(), ratios.end());
        std::printf("%s %s %d %.1f %.2f %.2f %.2f\n", verb.c_str(), name.c_str(), threads,
                    static_cast<double>(tensor.size() * 4) / median(times) / 1e9, median(ratios),
                    ratios[kRounds / 10], ratios[kRounds * 9 / 10]);
      }
  }
}
