// A model call on the calling thread, and the first failure that generated code could not report by itself.
//
// A parallel region of generated code is a function that no exception may leave, and GCC takes GOMP_parallel for
// nothrow. A failure inside is therefore kept here, as the call's: regions are skipped and shims fail from then on, and
// Container::run makes it the error of the call.
#pragma once

#include <atomic>
#include <string>

#include "base/error.h"

namespace untorch::threads {

class Call {
 public:
  // The call of this thread from now on; calls nest, as a Python kernel may call another model.
  Call() noexcept;
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // From any thread of the call's teams. The first failure stays.
  void fail(ErrorKind kind, std::string message) noexcept;
  // The same for an integer division by zero, in a signal handler.
  void note_division_by_zero() noexcept;

  bool failed() const noexcept {
    return claimed_.load(std::memory_order_relaxed) || divided_by_zero_.load(std::memory_order_relaxed);
  }
  // Makes the failure the thread's last error; false when there is none. Not while a region of the call runs.
  bool report() noexcept;

 private:
  // Set before the failure is kept: the others of the team must not take the call for one that goes on. What follows is
  // read when the team is done.
  std::atomic<bool> claimed_{false}, divided_by_zero_{false};
  ErrorKind kind_ = ErrorKind::kModel;
  std::string message_;
  Call* outer_;
};

struct Frame;

// What every thread knows.
struct ThisThread {
  Call* call;       // the call that this thread works for; its faults are the call's
  Frame* frame;     // its place in the innermost parallel region; null outside
  int num_threads;  // omp_set_num_threads; 0: the process's default
  int spin_us;      // that it spins before it sleeps, of the program that it worked for last; -1: the process's default
};
// __thread: with thread_local every access would ask whether it is initialised.
extern __thread ThisThread this_thread __attribute__((visibility("hidden")));

// Calls that have failed and are not over; mostly 0, and quicker to ask than a thread_local.
extern std::atomic<int> failed_calls __attribute__((visibility("hidden")));

// True when the call of this thread has failed already: what generated code asks for next fails, too.
inline bool call_failed() noexcept {
  return failed_calls.load(std::memory_order_relaxed) != 0 && this_thread.call != nullptr && this_thread.call->failed();
}

// True in a region of generated code. aoti_torch_check must then call leave_region in place of throwing.
bool in_generated_region() noexcept;
// Makes a failure the call's, if it is the first.
void fail_call(ErrorKind kind, std::string message) noexcept;
// Ends the region for this thread after fail_call: it jumps back to the pool, and the other threads do the same at
// their next barrier or loop. Nothing is unwound: generated loops own nothing but, rarely, the buffer of a reduction,
// which is lost. No object with a destructor may be alive in the caller.
[[noreturn]] void leave_region() noexcept;

// Failures of generated code that are no calls of aoti_torch_check become errors of the call, too: SIGFPE of a division
// (x86-64) and std::terminate of an exception in a parallel region. Installs both handlers, once; what was there
// before is called for everything else.
void install_fault_handlers() noexcept;
// The code in which a SIGFPE is a model's: [begin, end) of an opened library.
void add_code(const void* begin, const void* end) noexcept;
void remove_code(const void* begin) noexcept;

}  // namespace untorch::threads
