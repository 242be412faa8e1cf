// The one exception type of the library, and the last error message of a thread.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace untorch {

// What a caller can do about it; mirrored by the exception classes of the Python package.
enum class ErrorKind : int {
  kInternal = 1,     // a bug of ours
  kInvalidArgument,  // the caller's input does not fit
  kInvalidFile,      // the archive, the manifest or a library in it is damaged or inconsistent
  kUnsupported,      // well-formed, but this build or machine does not serve it
  kClosed,           // the program was closed
  kOutOfMemory,
  kModel,       // the compiled model reported a failure
  kDeviceLost,  // a kernel destroyed the context of a GPU
  kSystem,      // the operating system refused something for now: descriptors, threads
  kUntrusted,   // a trust policy does not accept the file
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int system_error = 0)
      : std::runtime_error(message), kind_(kind), system_error_(system_error) {}
  ErrorKind kind() const noexcept { return kind_; }
  // The errno of a kSystem error, and of a file that the operating system does not open; 0 for every other error.
  int system_error() const noexcept { return system_error_; }

 private:
  ErrorKind kind_;
  int system_error_;
};

namespace detail {
template <class... Parts>
std::string concat(Parts&&... parts) {
  std::ostringstream out;
  (out << ... << std::forward<Parts>(parts));
  return std::move(out).str();
}
}  // namespace detail

// throw_error(ErrorKind::kInvalidArgument, "mm: expected 2-D, got ", n, "-D")
template <class... Parts>
[[noreturn]] void throw_error(ErrorKind kind, Parts&&... parts) {
  throw Error(kind, detail::concat(std::forward<Parts>(parts)...));
}

// For an errno that tells of the system and not of a file: kOutOfMemory for ENOMEM, kSystem for too many open files.
// `otherwise` for all others.
ErrorKind kind_of_errno(int number, ErrorKind otherwise) noexcept;

// check(cond, parts...): an invalid-argument error whose text is the parts joined.
template <class... Parts>
void check(bool condition, Parts&&... parts) {
  if (!condition) [[unlikely]] {
    throw Error(ErrorKind::kInvalidArgument, detail::concat(std::forward<Parts>(parts)...));
  }
}

// The message that the failing shim of this thread left; empty when none failed since it was cleared.
const std::string& last_error() noexcept;
ErrorKind last_error_kind() noexcept;
int last_system_error() noexcept;
void set_last_error(ErrorKind kind, std::string message, int system_error = 0) noexcept;
void clear_last_error() noexcept;

}  // namespace untorch
