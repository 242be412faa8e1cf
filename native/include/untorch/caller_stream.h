// The stream that the caller wants a program's GPU work on: set by the caller, for its thread; read by the library.
//
//   untorch::CallerStreamGuard guard(stream);   // stream: cudaStream_t or CUstream
//   untorch_method_run(method, …);              // everything it does is enqueued on that stream; nothing waits
//
// No CUDA header is needed. The setting is thread-local and there is one of it in the process: it lives in
// libuntorch.so, which every user of this header shares.
#ifndef UNTORCH_CALLER_STREAM_H_
#define UNTORCH_CALLER_STREAM_H_

#include <optional>

#include "untorch/untorch.h"

struct CUstream_st;

extern "C" {

/* The calling thread's setting. `is_set` 0: no caller stream; the null stream (stream NULL, is_set 1) is one. */
typedef struct untorch_caller_stream {
  struct CUstream_st* stream;
  int32_t is_set;
} untorch_caller_stream;

UNTORCH_API untorch_caller_stream untorch_caller_stream_peek(void);
/* Returns the setting that was there before. */
UNTORCH_API untorch_caller_stream untorch_caller_stream_exchange(untorch_caller_stream setting);
UNTORCH_API void untorch_caller_stream_clear(void);
}

namespace untorch {

// Trivially copyable; empty: the caller has set none, and the library uses a stream of its own. Creates no stream.
inline std::optional<CUstream_st*> getCallerStream() noexcept {
  const untorch_caller_stream setting = untorch_caller_stream_peek();
  if (setting.is_set == 0) return std::nullopt;
  return setting.stream;
}

// Sets the thread's caller stream for a scope; guards nest. nullptr is the legacy default stream, which is a setting
// of its own and not the same as no guard. The stream must outlive the guard and the work given to it.
class CallerStreamGuard {
 public:
  explicit CallerStreamGuard(CUstream_st* stream) noexcept : before_(untorch_caller_stream_exchange({stream, 1})) {}
  ~CallerStreamGuard() { untorch_caller_stream_exchange(before_); }
  CallerStreamGuard(const CallerStreamGuard&) = delete;
  CallerStreamGuard& operator=(const CallerStreamGuard&) = delete;

 private:
  untorch_caller_stream before_;
};

}  // namespace untorch

#endif  // UNTORCH_CALLER_STREAM_H_
