#include "thread_policy.h"

#include <ATen/ThreadLocalPythonObjects.h>

#include <memory>
#include <string>

namespace qcoll::torch_binding {
namespace {

using at::impl::ThreadLocalPythonObjects;

const std::string& key() {
  static const std::string kKey = "qcoll.policy";
  return kKey;
}

// torch keeps shared pointers by key and copies them to threads that inherit its state. Nothing of
// Python is in this one, so that reading it takes no interpreter lock.
struct PolicyHolder final : c10::SafePyObject {
  explicit PolicyHolder(comm::ThreadPolicy held)
      : SafePyObject(nullptr, nullptr), policy(std::move(held)) {}
  const comm::ThreadPolicy policy;
};

}  // namespace

comm::ThreadPolicy thread_policy() {
  if (!ThreadLocalPythonObjects::contains(key())) return {};
  return static_cast<const PolicyHolder&>(*ThreadLocalPythonObjects::get(key())).policy;
}

void set_thread_policy(const comm::ThreadPolicy& policy) {
  ThreadLocalPythonObjects::set(key(), std::make_shared<PolicyHolder>(policy));
}

}  // namespace qcoll::torch_binding
