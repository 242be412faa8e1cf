// aoti_torch_check and its variants, the last error, and the autograd mode, which is always off.
#include <cstdio>
#include <cstdlib>

#include "shims/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {
thread_local bool grad_enabled = false;
}

extern "C" {

// Must throw: the generated code relies on not returning. The model library catches it at its C border and keeps only
// where it happened, so the message itself is kept here for the loader to join.
UNTORCH_EXPORT void aoti_torch_check(bool condition, const char* func, const char* file, std::uint32_t line,
                                     const char* msg) {
  if (condition) [[likely]]
    return;
  std::string text = msg != nullptr && *msg != '\0' ? msg : "check failed";
  text += " (" + std::string(func != nullptr ? func : "?") + ", " + (file != nullptr ? file : "?") + ":" +
          std::to_string(line) + ")";
  set_last_error(ErrorKind::kModel, text);
  throw Error(ErrorKind::kModel, text);
}

UNTORCH_EXPORT void aoti_torch_warn(const char* func, const char* file, std::uint32_t line, const char* msg) {
  std::fprintf(stderr, "untorch: warning from the model: %s (%s, %s:%u)\n", msg != nullptr ? msg : "",
               func != nullptr ? func : "?", file != nullptr ? file : "?", line);
}

UNTORCH_EXPORT bool aoti_torch_grad_mode_is_enabled() { return grad_enabled; }
UNTORCH_EXPORT void aoti_torch_grad_mode_set_enabled(bool enabled) { grad_enabled = enabled; }

// The message of the thread's last failure, "" when there was none; borrowed until the next failure in this thread.
UNTORCH_EXPORT const char* torch_exception_get_what() { return last_error().c_str(); }
UNTORCH_EXPORT const char* torch_exception_get_what_without_backtrace() { return last_error().c_str(); }

}  // extern "C"
