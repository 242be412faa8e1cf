// The last error of a thread.
#include "base/error.h"

namespace untorch {
namespace {

struct LastError {
  ErrorKind kind = ErrorKind::kInternal;
  std::string message;
};
thread_local LastError last;

}  // namespace

const std::string& last_error() noexcept { return last.message; }
ErrorKind last_error_kind() noexcept { return last.kind; }
void set_last_error(ErrorKind kind, std::string message) noexcept {
  last.kind = kind;
  last.message = std::move(message);
}
void clear_last_error() noexcept { last.message.clear(); }

}  // namespace untorch
