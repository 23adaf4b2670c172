// qcoll.Options: torch's backend options with qcoll's settings in them.
#pragma once

#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "qcoll/comm/options.h"

namespace qcoll::torch_binding {

struct BackendOptions final : c10d::Backend::Options {
  BackendOptions() : c10d::Backend::Options("qcoll") {}

  // Throws UsageError.
  void set(const std::string& key, const std::string& value) {
    settings.set(key, value);
    given[key] = value;
  }

  comm::Settings settings;
  std::map<std::string, std::string> given;  // as the user spelled it, for repr
};

}  // namespace qcoll::torch_binding
