// The key-value store through which the ranks of a group find each other. Everything else trusts
// it: it carries the group's secret.
#pragma once

#include <string>

#include "qcoll/base/deadline.h"

namespace qcoll::transport {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual bool has(const std::string& key) = 0;
  // Waits until the key is set. Throws TransportError that names the key.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
};

}  // namespace qcoll::transport
