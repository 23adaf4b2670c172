#include "interpreter_exit.h"

#include <unistd.h>

#include <atomic>
#include <thread>

#include "callbacks.h"

namespace qcoll::torch_binding {
namespace {

std::atomic<bool> exiting{false};
std::atomic<bool> ended{false};
std::thread::id exiting_thread;  // set before the flag

}  // namespace

void begin_interpreter_exit() {
  exiting_thread = std::this_thread::get_id();
  exiting.store(true, std::memory_order_release);
}

void end_interpreter_exit() { ended.store(true, std::memory_order_release); }

void stay_if_interpreter_ended() {
  while (ended.load(std::memory_order_acquire)) ::pause();
}

StayAtExit::~StayAtExit() {
  // Callbacks are waited for while the interpreter still lives, and so must come back.
  if (!exiting.load(std::memory_order_acquire) || exiting_thread == std::this_thread::get_id() ||
      Callbacks::on_this_thread())
    return;
  for (;;) ::pause();
}

}  // namespace qcoll::torch_binding
