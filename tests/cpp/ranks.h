// Ranks as threads: runs a function for every rank and rethrows the first failure.
#pragma once

#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace qcoll::test {

template <class Function>
void run_ranks(int size, Function function) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr first;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        function(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

// "0,0,1" -> node labels and numbers of three ranks on two nodes.
inline std::vector<int> nodes_of(const std::string& text) {
  std::vector<int> nodes;
  for (const char c : text)
    if (c >= '0' && c <= '9') nodes.push_back(c - '0');
  return nodes;
}

inline std::vector<std::string> labels_of(const std::vector<int>& nodes) {
  std::vector<std::string> labels;
  for (const int node : nodes) labels.push_back("node" + std::to_string(node));
  return labels;
}

}  // namespace qcoll::test
