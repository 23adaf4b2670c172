// A rendezvous store of processes: a folder with one file for each key.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "qcoll/base/error.h"
#include "qcoll/transport/rendezvous.h"

namespace qcoll::test {

class FileStore final : public transport::Rendezvous {
 public:
  // The folder exists, or another process makes it at the same moment.
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
  }

  // By rename: a reader sees the whole value or none.
  void set(const std::string& key, const std::string& value) override {
    const auto draft = folder_ / ("draft-" + std::to_string(::getpid()) + "-" +
                                  std::to_string(drafts_.fetch_add(1)));
    std::ofstream(draft, std::ios::binary) << value;
    std::filesystem::rename(draft, file_of(key));
  }
  bool has(const std::string& key) override { return std::filesystem::exists(file_of(key)); }
  std::string get(const std::string& key, const Deadline& deadline) override {
    while (!has(key)) {
      if (deadline.passed()) throw TransportError("nobody set " + key);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ifstream file(file_of(key), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path file_of(std::string key) const {
    for (char& c : key)
      if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
    return folder_ / ("key-" + key);
  }

  static inline std::atomic<int> drafts_{0};
  const std::filesystem::path folder_;
};

}  // namespace qcoll::test
