// Runs every fuzz target over its stored inputs and over seeded variations of them, for compilers
// without libFuzzer.
//
//   qcoll_replay CORPUS_FOLDER [VARIATIONS_PER_INPUT [TARGET...]]
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <vector>

#include "fuzz.h"

namespace fs = std::filesystem;
using qcoll::attacks::Source;
using qcoll::attacks::targets;
using Input = std::vector<char>;

namespace {

char current[512];  // what is running, for the message of a crash

void say_what_ran(int signal) {
  [[maybe_unused]] auto written = ::write(2, "crashed in ", 11);
  written = ::write(2, current, std::strlen(current));
  written = ::write(2, "\n", 1);
  std::signal(signal, SIG_DFL);
  ::raise(signal);
}

Input vary(Input input, std::mt19937& random) {
  const auto below = [&](std::size_t n) { return random() % n; };
  for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
    const std::size_t at = below(input.size() + 1);
    switch (below(5)) {
      case 0:  // drop
        input.resize(at);
        break;
      case 1:
        input.insert(input.begin() + at, static_cast<char>(random()));
        break;
      case 2: {  // repeat a stretch
        const Input part(input.begin() + at, input.begin() + at + below(input.size() - at + 1));
        input.insert(input.begin() + at, part.begin(), part.end());
        break;
      }
      case 3:
        if (at < input.size()) input[at] = static_cast<char>(random());
        break;
      default:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
    }
  }
  if (input.size() > 4096) input.resize(4096);
  return input;
}

void run(const char* name, qcoll::attacks::Target target, const Input& input) {
  // A copy of the exact size, so that a sanitizer sees reads beyond it.
  qcoll::attacks::ExactBuffer exact(input.size());
  std::memcpy(exact.data, input.data(), input.size());
  Source in({exact.data, exact.size});
  static_cast<void>(name);
  target(in);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CORPUS_FOLDER [VARIATIONS_PER_INPUT [TARGET...]]\n", argv[0]);
    return 2;
  }
  for (const int signal : {SIGSEGV, SIGABRT, SIGFPE, SIGBUS, SIGILL})
    std::signal(signal, say_what_ran);
  const unsigned long variations = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 0;
  const std::set<std::string> only(argv + std::min(argc, 3), argv + argc);
  for (const auto& [name, target] : targets()) {
    if (!only.empty() && !only.contains(name)) continue;
    const fs::path folder = fs::path(argv[1]) / name;
    std::set<fs::path> files;
    if (fs::is_directory(folder))
      for (const auto& entry : fs::directory_iterator(folder)) files.insert(entry.path());
    if (files.empty()) {
      std::fprintf(stderr, "%s has no inputs\n", folder.c_str());
      return 1;
    }
    unsigned long runs = 0;
    for (const fs::path& file : files) {
      std::ifstream stream(file, std::ios::binary);
      const Input input{std::istreambuf_iterator<char>(stream), {}};
      std::mt19937 random(1);
      for (unsigned long i = 0; i <= variations; ++i, ++runs) {
        std::snprintf(current, sizeof(current), "%s, %s, variation %lu", name.c_str(),
                      file.filename().c_str(), i);
        run(name.c_str(), target, i == 0 ? input : vary(input, random));
      }
    }
    std::printf("%s: %zu inputs, %lu runs\n", name.c_str(), files.size(), runs);
  }
  return 0;
}
