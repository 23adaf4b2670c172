// torch's Store as a rendezvous.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "qcoll/base/error.h"
#include "qcoll/transport/rendezvous.h"

namespace qcoll::torch_binding {

class TorchStore final : public transport::Rendezvous {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
  }

  bool has(const std::string& key) override { return store_->check({key}); }

  std::string get(const std::string& key, const Deadline& deadline) override {
    const auto left = std::chrono::milliseconds(deadline.poll_milliseconds(std::chrono::hours(24)));
    try {
      // A timeout of 0 means "forever" to some stores.
      store_->wait({key}, std::max(left, std::chrono::milliseconds(1)));
    } catch (const c10::Error& error) {
      throw TransportError("the store has no \"" + key + "\": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      throw TransportError("the store has no \"" + key + "\": " + error.what());
    }
    const std::vector<std::uint8_t> value = store_->get(key);
    return {value.begin(), value.end()};
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace qcoll::torch_binding
