// Interrupts of a long call: Python's Ctrl-C between two operators, and while a call waits for another.
#pragma once

#include <chrono>

namespace untorch {

// Returns not 0 when the call is to end. Called on the process's main thread, about every 50 ms of a call.
using InterruptCheck = int (*)();
// The embedder's; null: calls are not interrupted.
void set_interrupt_check(InterruptCheck check) noexcept;

constexpr std::chrono::milliseconds kInterruptInterval{50};

namespace detail {
extern thread_local constinit bool interruptible;
void check_interrupt();
}  // namespace detail

// Whether this thread is in a call that can be interrupted: a wait is to be done in slices.
inline bool is_interruptible() noexcept { return detail::interruptible; }

// Throws kModel when the embedder asks for the end of the call. For what takes time of its own: operators, allocations.
inline void check_interrupt() {
  if (detail::interruptible) detail::check_interrupt();
}
// The same, without regard to the time since the last.
void check_interrupt_now();

// A call. Only on the main thread, and if the embedder checks, is anything done.
class InterruptScope {
 public:
  InterruptScope() noexcept;
  ~InterruptScope() { detail::interruptible = before_; }
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  bool before_;
};

}  // namespace untorch
