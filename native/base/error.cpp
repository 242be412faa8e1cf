// The last error of a thread.
#include "base/error.h"

#include <cerrno>

namespace untorch {
namespace {

struct LastError {
  ErrorKind kind = ErrorKind::kInternal;
  std::string message;
  int system_error = 0;
};
thread_local LastError last;

}  // namespace

const std::string& last_error() noexcept { return last.message; }
ErrorKind last_error_kind() noexcept { return last.kind; }
int last_system_error() noexcept { return last.system_error; }
void set_last_error(ErrorKind kind, std::string message, int system_error) noexcept {
  last.kind = kind;
  last.message = std::move(message);
  last.system_error = system_error;
}
ErrorKind kind_of_errno(int number, ErrorKind otherwise) noexcept {
  switch (number) {
    case ENOMEM:
      return ErrorKind::kOutOfMemory;
    case EMFILE:
    case ENFILE:
    case EAGAIN:
      return ErrorKind::kSystem;
    default:
      return otherwise;
  }
}

void clear_last_error() noexcept { last.message.clear(); }

}  // namespace untorch
