// What qcoll's context managers say on the calling thread. It lives in torch's thread-local state,
// so that autograd's backward threads inherit it.
#pragma once

#include "qcoll/comm/policy.h"

namespace qcoll::torch_binding {

comm::ThreadPolicy thread_policy();
void set_thread_policy(const comm::ThreadPolicy& policy);

}  // namespace qcoll::torch_binding
