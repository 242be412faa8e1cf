// A free slot costs two atomic operations; the mutex is for those who wait.
#include "model/call_slots.h"

#include <new>

#include "base/interrupt.h"

namespace untorch {

thread_local constinit CallSlots::Hold* CallSlots::innermost_ = nullptr;

const bool CallSlots::registered_ = [] {
  fork::at_child(&CallSlots::in_child);
  return true;
}();

CallSlots::CallSlots(std::size_t count) noexcept : count_(static_cast<int>(count)), free_(count_) {}

bool CallSlots::is_held_here() const noexcept {
  for (const Hold* hold = innermost_; hold != nullptr; hold = hold->outer_) {
    if (hold->slots_ == this) return true;
  }
  return false;
}

bool CallSlots::torn() {
  if (generation_.load(std::memory_order_acquire) != fork::generation()) [[unlikely]] {
    const std::lock_guard lock(fork::renewal());
    if (generation_.load(std::memory_order_relaxed) != fork::generation()) renew();
  }
  return torn_.load(std::memory_order_relaxed);
}

// All slots become free; those that the forking thread holds are taken off afterwards.
void CallSlots::renew() noexcept {
  new (&mutex_) std::mutex;
  new (&freed_) std::condition_variable;
  waiting_ = 0;
  if (free_ < count_) torn_ = true;
  free_ = count_;
  generation_.store(fork::generation(), std::memory_order_release);
}

void CallSlots::in_child() noexcept {
  // The calls of the forking thread, from whose Python kernel fork() was called, go on in the child.
  for (Hold* hold = innermost_; hold != nullptr; hold = hold->outer_) {
    CallSlots& slots = *hold->slots_;
    if (slots.generation_ != fork::generation()) {
      int own = 0;
      for (Hold* each = hold; each != nullptr; each = each->outer_) own += each->slots_ == &slots ? 1 : 0;
      const bool was_torn = slots.torn_, others = slots.count_ - slots.free_ > own;
      slots.renew();
      slots.torn_ = was_torn || others;
      slots.free_ = slots.count_ - own;
    }
  }
}

bool CallSlots::try_acquire() noexcept {
  int free = free_.load();
  while (free > 0) {
    if (free_.compare_exchange_weak(free, free - 1)) return true;
  }
  return false;
}

void CallSlots::acquire() {
  (void)torn();
  if (!try_acquire()) wait();
}

void CallSlots::wait() {
  struct Waiting {
    std::atomic<int>& count;
    explicit Waiting(std::atomic<int>& waiting) : count(waiting) { count.fetch_add(1); }
    ~Waiting() { count.fetch_sub(1); }
  };
  std::unique_lock lock(mutex_);
  const Waiting waiting(waiting_);
  while (!try_acquire()) {
    if (!is_interruptible()) {
      freed_.wait(lock);
      continue;
    }
    (void)freed_.wait_for(lock, kInterruptInterval);
    if (try_acquire()) return;  // a notification is not to be lost with an interrupt
    lock.unlock();
    check_interrupt_now();
    lock.lock();
  }
}

void CallSlots::release() noexcept {
  free_.fetch_add(1);
  if (waiting_.load() == 0) return;
  const std::lock_guard lock(mutex_);
  freed_.notify_one();
}

CallSlots::Hold::Hold(CallSlots* slots) : slots_(slots) {
  if (slots_ == nullptr) return;
  slots_->acquire();
  outer_ = innermost_;
  innermost_ = this;
}

CallSlots::Hold::~Hold() {
  if (slots_ == nullptr) return;
  innermost_ = outer_;
  slots_->release();
}

}  // namespace untorch
