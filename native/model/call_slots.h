// CallSlots: how many calls may run at the same time, and which of them run on this thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>

#include "base/fork.h"

namespace untorch {

// Counts down without a lock while slots are free. A wait on the main thread can be interrupted. In a forked child the
// slots of the parent's other threads are free again, and torn() tells that their calls never end.
class CallSlots {
 public:
  explicit CallSlots(std::size_t count) noexcept;
  CallSlots(const CallSlots&) = delete;
  CallSlots& operator=(const CallSlots&) = delete;

  // Whether a call on this thread holds one: another on the same thread could wait for ever.
  bool is_held_here() const noexcept;
  // Whether a fork left calls of other threads in the middle.
  bool torn();
  void mend() noexcept { torn_ = false; }

  // One slot.
  class Hold {
   public:
    // Waits for it. Null: nothing to hold. Throws kModel when the wait is interrupted.
    explicit Hold(CallSlots* slots);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    friend class CallSlots;
    CallSlots* const slots_;
    Hold* outer_ = nullptr;  // the one before on this thread
  };

 private:
  void acquire();
  bool try_acquire() noexcept;
  void wait();
  void release() noexcept;
  void renew() noexcept;
  static void in_child() noexcept;
  static const bool registered_;
  static thread_local constinit Hold* innermost_;

  const int count_;
  std::atomic<int> free_, waiting_{0};
  std::atomic<bool> torn_{false};
  std::atomic<unsigned> generation_{fork::generation()};
  std::mutex mutex_;
  std::condition_variable freed_;
};

}  // namespace untorch
