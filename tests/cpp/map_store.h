// A rendezvous store within one process.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "qcoll/base/error.h"
#include "qcoll/transport/rendezvous.h"

namespace qcoll::test {

class MapStore final : public transport::Rendezvous {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  bool has(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return values_.contains(key);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline.at(), [&] { return values_.contains(key); }))
      throw TransportError("nobody set " + key);
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace qcoll::test
