// What happens to threads that are inside a call when the interpreter ends.
#pragma once

namespace qcoll::torch_binding {

// From now on threads other than the caller's do not return to Python.
void begin_interpreter_exit();
// From now on no other thread may drop a tensor: Python is being taken apart.
void end_interpreter_exit();
// Never returns after end_interpreter_exit: the thread sleeps until the process is gone, with
// whatever it holds.
void stay_if_interpreter_ended();

// Stands at the top of every call that may block. A daemon thread that wakes while the interpreter
// is being finalised would ask for its lock and be ended there by force, through frames that do
// not allow it, and the whole process with it. Such a thread sleeps until the process is gone.
class StayAtExit {
 public:
  StayAtExit() = default;
  ~StayAtExit();
  StayAtExit(const StayAtExit&) = delete;
  StayAtExit& operator=(const StayAtExit&) = delete;
};

}  // namespace qcoll::torch_binding
