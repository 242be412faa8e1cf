// aoti_torch_check and its variants, the last error, and the autograd mode, which is always off.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <utility>

#include "shims/shim.h"
#include "threads/call.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

thread_local bool grad_enabled = false;

std::string check_text(const char* func, const char* file, std::uint32_t line, const char* msg) {
  const std::string text = msg != nullptr && *msg != '\0' ? msg : "check failed";
  return text + " (" + (func != nullptr ? func : "?") + ", " + (file != nullptr ? file : "?") + ":" +
         std::to_string(line) + ")";
}

}  // namespace

void untorch::shims::record_failure(const char* op, ErrorKind kind, const char* message) noexcept {
  try {
    std::string text = message;
    if (text.rfind(op, 0) != 0) text = std::string(op) + ": " + text;
    threads::fail_call(kind, text);
    set_last_error(kind, std::move(text));
  } catch (const std::bad_alloc&) {
    threads::fail_call(ErrorKind::kOutOfMemory, {});
    set_last_error(ErrorKind::kOutOfMemory, {});
  }
}

extern "C" {

// Must not return: the generated code relies on it. It throws, and the model library catches that at its C border and
// keeps only where it happened, so the message itself is kept here for the loader to join. A parallel region of
// generated code lets no exception out; the pool has a way of its own.
UNTORCH_EXPORT void aoti_torch_check(bool condition, const char* func, const char* file, std::uint32_t line,
                                     const char* msg) {
  if (condition) [[likely]]
    return;
  if (threads::in_generated_region()) {
    threads::fail_call(ErrorKind::kModel, check_text(func, file, line, msg));
    threads::leave_region();
  }
  const std::string text = check_text(func, file, line, msg);
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
