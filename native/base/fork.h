// fork(): locks that a child finds free, and work that a fork does not cut in half.
#pragma once

#include <atomic>
#include <mutex>
#include <new>

namespace untorch::fork {

namespace detail {
extern std::atomic<unsigned> generation;
}

// Changes in a forked child. What remembers another one was last used by the parent.
inline unsigned generation() noexcept { return detail::generation.load(std::memory_order_relaxed); }

// Runs in every forked child, on its only thread. For static initialisers; at most eight.
void at_child(void (*handler)() noexcept) noexcept;

// Held while a library is opened or closed, and by whatever else no child could complete: a fork waits for its end. No
// user code runs meanwhile, and nobody waits for the interpreter lock, which a forking thread holds.
class Uncut {
 public:
  Uncut();
  ~Uncut();
  Uncut(const Uncut&) = delete;
  Uncut& operator=(const Uncut&) = delete;
};

// Serialises the first uses of one object in a child, where it is renewed.
std::mutex& renewal() noexcept;

// A mutex that a forked child finds unlocked. For short sections whose data is valid at each step, and which never run
// user code: the forking thread must not hold it.
class Mutex {
 public:
  void lock() {
    if (generation_.load(std::memory_order_acquire) != fork::generation()) [[unlikely]]
      renew();
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }

 private:
  void renew() {
    const std::lock_guard lock(renewal());
    if (generation_.load(std::memory_order_relaxed) == fork::generation()) return;
    new (&mutex_) std::mutex;  // its owner does not exist here
    generation_.store(fork::generation(), std::memory_order_release);
  }
  std::mutex mutex_;
  std::atomic<unsigned> generation_{fork::generation()};
};

}  // namespace untorch::fork
