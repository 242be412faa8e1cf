// Failures inside parallel regions: kept with the call, and the way out of the region.
#include "threads/call.h"

#include <utility>

#include "threads/team.h"

namespace untorch::threads {

std::atomic<int> failed_calls{0};

Call::Call() noexcept : outer_(this_thread.call) { this_thread.call = this; }
Call::~Call() {
  this_thread.call = outer_;
  if (!failed()) return;
  failed_calls.fetch_sub(claimed_.load(std::memory_order_relaxed) + divided_by_zero_.load(std::memory_order_relaxed),
                         std::memory_order_relaxed);
}

void Call::note_division_by_zero() noexcept {
  if (!divided_by_zero_.exchange(true, std::memory_order_relaxed)) failed_calls.fetch_add(1, std::memory_order_relaxed);
}

void Call::fail(ErrorKind kind, std::string message) noexcept {
  if (claimed_.exchange(true, std::memory_order_relaxed)) return;
  kind_ = kind;
  message_ = std::move(message);
  failed_calls.fetch_add(1, std::memory_order_relaxed);
}

bool Call::report() noexcept {
  if (claimed_.load(std::memory_order_relaxed)) {
    set_last_error(kind_, message_);
    return true;
  }
  if (!divided_by_zero_.load(std::memory_order_relaxed)) return false;
  set_last_error(ErrorKind::kModel, "integer division by zero");
  return true;
}

bool in_generated_region() noexcept { return this_thread.frame != nullptr && this_thread.frame->exit != nullptr; }

void abort_team(Frame& self) noexcept {
  while (self.num_held != 0) unlock(*self.held[--self.num_held]);
  if (self.team != nullptr) {
    self.team->barrier.fetch_or(Team::kAborted, std::memory_order_seq_cst);
    if (self.team->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(self.team->barrier, INT_MAX);
  }
  std::longjmp(*self.exit, 1);
}

void fail_call(ErrorKind kind, std::string message) noexcept {
  if (this_thread.call != nullptr) this_thread.call->fail(kind, std::move(message));
}

void leave_region() noexcept { abort_team(*this_thread.frame); }

}  // namespace untorch::threads
