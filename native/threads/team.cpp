// Barriers, worksharing loops, single and critical: what happens inside a parallel region.
#include "threads/team.h"

#include <algorithm>
#include <limits>

namespace untorch::threads {
namespace {

// Blocks until is_over() or until the team has failed, which is no return.
template <class IsOver>
void wait_for_slot(Frame& self, const IsOver& is_over) noexcept {
  for (unsigned i = 0; !is_over(); ++i) {
    if (i == 0) start_reserved(*self.team);
    if (self.team->aborted()) abort_team(self);
    if (i < 1000 && may_spin()) {
      cpu_relax();
    } else {
      sched_yield();  // rare: another thread is kLoops constructs behind
    }
  }
}

// Where a worksharing construct outside of any region keeps its loop.
Frame& alone_frame() noexcept {
  static thread_local Frame outside;
  return frame() != nullptr ? *frame() : outside;
}

}  // namespace

void barrier() noexcept {
  Frame* self = frame();
  if (self == nullptr || self->team == nullptr) return;
  Team& team = *self->team;
  const std::uint32_t number = team.barrier.load(std::memory_order_acquire);
  if ((number & Team::kAborted) != 0) abort_team(*self);
  if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(team.size)) {
    team.arrived.store(0, std::memory_order_relaxed);
    team.barrier.fetch_add(1, std::memory_order_seq_cst);
    if (team.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(team.barrier, INT_MAX);
  } else {
    start_reserved(team);
    const auto is_over = [&] { return team.barrier.load(std::memory_order_acquire) != number; };
    if (!spin_until(is_over)) {
      team.sleepers.fetch_add(1, std::memory_order_seq_cst);
      while (!is_over()) futex_wait(team.barrier, number);
      team.sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  if (team.aborted()) abort_team(*self);
}

void begin_loop(const LoopBounds& bounds) noexcept {
  Frame* self = frame();
  if (self == nullptr || self->team == nullptr) {
    Frame& alone = alone_frame();
    alone.alone = bounds;
    alone.alone_next = 0;
    return;
  }
  Team& team = *self->team;
  const std::uint64_t number = self->constructs++;
  Loop& loop = team.loops[number % Team::kLoops];
  self->loop = &loop;
  bool mine = false;
  wait_for_slot(*self, [&] {
    std::uint64_t holder = loop.holder.load(std::memory_order_acquire);
    if (holder == 2 * number + 2) return true;
    if (holder == 2 * number + 1) return false;
    if (holder != 0 && loop.left.load(std::memory_order_acquire) != team.size) return false;
    mine = loop.holder.compare_exchange_strong(holder, 2 * number + 1, std::memory_order_acq_rel);
    return mine;
  });
  if (!mine) return;
  loop.bounds = bounds;
  loop.next.store(0, std::memory_order_relaxed);
  loop.left.store(0, std::memory_order_relaxed);
  loop.holder.store(2 * number + 2, std::memory_order_release);
}

const LoopBounds& alone_bounds() noexcept { return alone_frame().alone; }

bool next_chunk(std::uint64_t* first, std::uint64_t* last) noexcept {
  Frame* self = frame();
  if (self == nullptr || self->team == nullptr) {
    Frame& alone = alone_frame();
    const LoopBounds& bounds = alone.alone;
    if (alone.alone_next >= bounds.total) return false;
    *first = bounds.start + alone.alone_next * bounds.increment;
    *last = bounds.end;
    alone.alone_next = bounds.schedule == Schedule::kSections ? alone.alone_next + 1 : bounds.total;
    return true;
  }
  if (self->team->aborted()) abort_team(*self);
  Loop& loop = *self->loop;
  const LoopBounds& bounds = loop.bounds;
  std::uint64_t begin = loop.next.load(std::memory_order_relaxed), count = 0;
  do {
    if (begin >= bounds.total) return false;
    const std::uint64_t left = bounds.total - begin;
    count = bounds.chunk;
    if (bounds.schedule == Schedule::kGuided) {
      count = std::max(count, left / static_cast<std::uint64_t>(self->team->size));
    }
    count = std::min(count, left);
  } while (!loop.next.compare_exchange_weak(begin, begin + count, std::memory_order_relaxed));
  *first = bounds.start + begin * bounds.increment;
  *last = begin + count == bounds.total ? bounds.end : bounds.start + (begin + count) * bounds.increment;
  return true;
}

void end_loop() noexcept {
  Frame* self = frame();
  if (self == nullptr || self->team == nullptr) return;
  self->loop->left.fetch_add(1, std::memory_order_release);
  self->loop = nullptr;
}

bool begin_single() noexcept {
  Frame* self = frame();
  if (self == nullptr || self->team == nullptr) return true;
  std::uint64_t number = self->single++;
  return self->team->singles.compare_exchange_strong(number, number + 1, std::memory_order_relaxed);
}

void enter_critical(Word& word) noexcept {
  lock(word);
  if (Frame* self = frame(); self != nullptr && self->num_held < std::size(self->held)) {
    self->held[self->num_held++] = &word;
  }
}

void leave_critical(Word& word) noexcept {
  if (Frame* self = frame(); self != nullptr && self->num_held != 0 && self->held[self->num_held - 1] == &word) {
    --self->num_held;
  }
  unlock(word);
}

}  // namespace untorch::threads
