// The caller's stream of each thread: one thread-local in the process, for libuntorch and for other engines. This file
// is libuntorch_stream.so: no CUDA, no C++ runtime.
#include "untorch/caller_stream.h"

namespace {

thread_local untorch_caller_stream caller{nullptr, 0};

}  // namespace

extern "C" {

untorch_caller_stream untorch_caller_stream_peek(void) { return caller; }

untorch_caller_stream untorch_caller_stream_exchange(untorch_caller_stream setting) {
  const untorch_caller_stream before = caller;
  caller = setting;
  return before;
}

void untorch_caller_stream_clear(void) { caller = {nullptr, 0}; }
}
