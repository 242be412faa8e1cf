// Waiting for a 32-bit word to change: spinning for a bounded time, then a futex.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace untorch::threads {

using Word = std::atomic<std::uint32_t>;

inline void futex_wait(Word& word, std::uint32_t while_it_is) noexcept {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, while_it_is, nullptr, nullptr, 0);
}
inline void futex_wake(Word& word, int threads) noexcept {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

inline void cpu_relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // yield is a no-op on most cores
#endif
}

inline long now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000L + now.tv_nsec;
}

// Threads that run bodies of parallel regions now. Above the number of CPUs nobody spins, and regions start no more
// workers than there are CPUs left.
extern std::atomic<int> busy_threads __attribute__((visibility("hidden")));
bool may_spin() noexcept;
long spin_ns() noexcept;

// Spins until done() or until the time is over; the last done(). It never yields: beside a busy process that gives away
// the CPU for milliseconds, a whole slice of the scheduler's, for a wait of microseconds.
template <class Done>
bool spin_until(const Done& done) noexcept {
  if (done()) return true;
  if (!may_spin()) return false;
  const long limit = spin_ns();
  if (limit == 0) return false;
  // The first look at the clock comes late: most waits are over by then.
  for (int i = 0; i < 64; ++i) {
    cpu_relax();
    if (done()) return true;
  }
  const long begin = now_ns();
  while (now_ns() - begin < limit) {
    for (int i = 0; i < 16; ++i) {
      cpu_relax();
      if (done()) return true;
    }
    if (!may_spin()) return false;
  }
  return false;
}

// A mutex of one word. A lock that was held when the process was forked is free in the child: words carry the number
// of forks.
extern std::uint32_t fork_epoch __attribute__((visibility("hidden")));

inline void lock(Word& word, bool spins = true) noexcept {
  const std::uint32_t taken = fork_epoch << 2 | 1, contended = fork_epoch << 2 | 2;
  std::uint32_t seen = word.load(std::memory_order_relaxed);
  std::uint32_t wanted = taken;
  for (;;) {
    if ((seen & 3) == 0 || seen >> 2 != taken >> 2) {
      if (word.compare_exchange_weak(seen, wanted, std::memory_order_acquire, std::memory_order_relaxed)) return;
      continue;
    }
    if (wanted == taken) {
      const auto is_free = [&] { return ((seen = word.load(std::memory_order_relaxed)) & 3) == 0; };
      if (spins ? spin_until(is_free) : is_free()) continue;
      wanted = contended;  // others may sleep already
    }
    if (seen != contended && !word.compare_exchange_weak(seen, contended, std::memory_order_relaxed)) continue;
    futex_wait(word, contended);
    seen = word.load(std::memory_order_relaxed);
  }
}
inline bool try_lock(Word& word) noexcept {
  std::uint32_t seen = word.load(std::memory_order_relaxed);
  if ((seen & 3) != 0 && seen >> 2 == (fork_epoch & 0x3fffffff)) return false;
  return word.compare_exchange_strong(seen, fork_epoch << 2 | 1, std::memory_order_acquire, std::memory_order_relaxed);
}
inline void unlock(Word& word) noexcept {
  if ((word.exchange(0, std::memory_order_release) & 3) == 2) futex_wake(word, 1);
}

}  // namespace untorch::threads
