// The time is that of a coarse clock, which costs about as much as a function call.
#include "base/interrupt.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/error.h"
#include "base/fork.h"

namespace untorch {

thread_local constinit bool detail::interruptible = false;

namespace {

constinit std::atomic<InterruptCheck> installed{nullptr};

enum class Main : std::uint8_t { kUnknown, kYes, kNo };
thread_local constinit Main is_main = Main::kUnknown;
thread_local constinit std::int64_t next_check = 0;  // in ns

[[maybe_unused]] const bool registered = [] {
  fork::at_child([]() noexcept { is_main = Main::kUnknown; });  // the forking thread is the child's main thread
  return true;
}();

std::int64_t now() noexcept {
  timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

void set_interrupt_check(InterruptCheck check) noexcept { installed.store(check, std::memory_order_relaxed); }

InterruptScope::InterruptScope() noexcept : before_(detail::interruptible) {
  if (installed.load(std::memory_order_relaxed) == nullptr) return;
  if (is_main == Main::kUnknown) is_main = syscall(SYS_gettid) == getpid() ? Main::kYes : Main::kNo;
  detail::interruptible = is_main == Main::kYes;
}

void detail::check_interrupt() {
  const std::int64_t time = now();
  if (time < next_check) return;
  check_interrupt_now();
}

void check_interrupt_now() {
  if (!detail::interruptible) return;
  next_check = now() + std::chrono::nanoseconds(kInterruptInterval).count();
  const InterruptCheck check = installed.load(std::memory_order_relaxed);
  if (check == nullptr || check() == 0) return;
  detail::interruptible = false;  // what ends the call is not interrupted
  throw_error(ErrorKind::kModel, "interrupted");
}

}  // namespace untorch
