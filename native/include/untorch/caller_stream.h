/* The CUDA stream that a thread's calls are enqueued on: set by the caller, read by the library. C99 and later; C++17
 * also has a guard:
 *
 *   untorch::CallerStreamGuard guard(stream);   // stream: cudaStream_t or CUstream
 *   untorch_method_run(method, ...);            // all its work is enqueued on that stream; nothing waits
 *
 * No other header is needed, of CUDA or of untorch. The setting is thread-local and lives in libuntorch_stream.so, a
 * small library of its own: all that link it share the setting, also those that do not link libuntorch.so. */
#ifndef UNTORCH_CALLER_STREAM_H_
#define UNTORCH_CALLER_STREAM_H_

#include <stddef.h>
#include <stdint.h>

#ifndef UNTORCH_API
#if defined(__GNUC__)
#define UNTORCH_API __attribute__((visibility("default")))
#else
#define UNTORCH_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* CUDA's own: cudaStream_t and CUstream are pointers to it */

/* The calling thread's setting. is_set 0: the library uses a stream of its own for the thread. The legacy default
 * stream (stream NULL, is_set 1) is a setting, too. */
typedef struct untorch_caller_stream {
  struct CUstream_st* stream;
  int32_t is_set;
} untorch_caller_stream;

/* The current setting. Creates no stream. */
UNTORCH_API untorch_caller_stream untorch_caller_stream_peek(void);
/* Returns the previous setting, to be restored after the calls. The stream must outlive the work enqueued on it. */
UNTORCH_API untorch_caller_stream untorch_caller_stream_exchange(untorch_caller_stream setting);
UNTORCH_API void untorch_caller_stream_clear(void);

#ifdef __cplusplus
}

#include <optional>

namespace untorch {

// Empty: the caller has set no stream, and the library uses one of its own.
inline std::optional<CUstream_st*> getCallerStream() noexcept {
  const untorch_caller_stream setting = untorch_caller_stream_peek();
  if (setting.is_set == 0) return std::nullopt;
  return setting.stream;
}

// Sets the thread's stream for a scope. Guards nest. nullptr is the legacy default stream, which is not the same as no
// guard. The stream must outlive the guard and the work enqueued on it.
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

#endif  // __cplusplus

#endif /* UNTORCH_CALLER_STREAM_H_ */
