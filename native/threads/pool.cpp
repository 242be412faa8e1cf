// The workers of the process, and parallel regions on them.
//
//   worker.word   kIdle ──claim──► kClaimed ──► kGo ──start──► kClaimed (runs) ──► kIdle
//                   │                 │          └──take back──► kIdle
//                   └► kAsleep ─claim─┘─► kReserved ──► kGo, or kAsleep again
//
// A thread that opens a region claims idle workers with one compare-and-swap each, first those that it had last. It
// starts as many as there are CPUs without a thread of ours, and reserves the others. A thread that is done with its
// part of the region takes one that nobody has; its opener also takes back what a worker was given and has not started,
// since on a busy machine a worker may wait for a CPU longer than the region takes. Where one part waits for the others
// (a barrier), all reserved workers are started. A worker spins for a bounded time after its work, then sleeps. There
// is no lock on the way.
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "threads/settings.h"
#include "threads/team.h"

namespace untorch::threads {

__thread ThisThread this_thread = {nullptr, nullptr, 0, -1};
std::atomic<int> busy_threads{0};
std::uint32_t fork_epoch = 0;

long spin_ns() noexcept {
  const int own = this_thread.spin_us;
  return own >= 0 ? 1000L * own : settings().spin_ns;
}
bool may_spin() noexcept { return busy_threads.load(std::memory_order_relaxed) <= settings().cpus; }

namespace {

// kGo carries the number of the assignment in the bits above, so that only its opener takes it back.
enum : std::uint32_t { kIdle, kGo, kAsleep, kClaimed, kReserved, kStates = 8 };

struct State;

struct alignas(64) Worker {
  Word word{kClaimed};                 // by the thread that makes it
  std::atomic<State*> owner{nullptr};  // the thread that had it last
  Team* team = nullptr;
  int id = 0;
  bool wake = false;             // it slept when it was claimed
  std::uint32_t assignment = 0;  // times kStates
  std::atomic<int> avoided{-1};  // the CPU of the thread that opened the region
  // Of the program that had it last, also if the worker was taken back before it started.
  std::atomic<int> spin_us{this_thread.spin_us};
};

// What a thread keeps that has opened a region of several threads. Never freed: a worker may still wake somebody at
// its address.
struct State {
  Team team;
  int num_workers = 0;  // that it had last
  Worker* workers[kMaxThreads];
  std::uint32_t go[kMaxThreads];  // what their words were set to
  State* next_free = nullptr;
};

// Trivially destructible: workers outlive the process's static objects.
Worker* all_workers[kMaxThreads];
std::atomic<int> num_workers{0};
Word creation_lock{0}, states_lock{0};
State* free_states = nullptr;
std::atomic<long> next_attempt{0};  // at a new thread, after one could not be made
std::atomic<bool> creation_failed{false}, failure_taken{false};
constexpr long kRetry = 1'000'000'000, kMoveAfter = 2'000'000;  // ns
pthread_key_t state_key;

void release_state(void* pointer) noexcept {
  auto* state = static_cast<State*>(pointer);
  for (int i = 0; i < state->num_workers; ++i) {
    State* mine = state;
    state->workers[i]->owner.compare_exchange_strong(mine, nullptr, std::memory_order_relaxed);
  }
  state->num_workers = 0;
  lock(states_lock);
  state->next_free = free_states;
  free_states = state;
  unlock(states_lock);
}

// The other threads do not exist in a forked child. Workers are made anew; teams of threads that are gone stay as they
// were, unused.
void child_of_fork() noexcept {
  ++fork_epoch;
  num_workers.store(0, std::memory_order_relaxed);
  busy_threads.store(0, std::memory_order_relaxed);
  next_attempt.store(0, std::memory_order_relaxed);
  free_states = nullptr;
  if (auto* state = static_cast<State*>(pthread_getspecific(state_key)); state != nullptr) {
    state->num_workers = 0;
    state->team.running.store(0, std::memory_order_relaxed);
  }
}

const bool prepared = [] {
  pthread_key_create(&state_key, release_state);
  pthread_atfork(nullptr, nullptr, child_of_fork);
  return true;
}();

State* this_state() noexcept {
  auto* state = static_cast<State*>(pthread_getspecific(state_key));
  if (state != nullptr) return state;
  lock(states_lock);
  if ((state = free_states) != nullptr) free_states = state->next_free;
  unlock(states_lock);
  if (state == nullptr) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignof(State), sizeof(State)) != 0) return nullptr;
    state = new (memory) State;
  }
  if (pthread_setspecific(state_key, state) != 0) {
    release_state(state);
    return nullptr;
  }
  return state;
}

// The body, and the place that leave_region jumps to.
[[gnu::noinline]] void run_body(Frame& frame, bool generated, void (*body)(void*), void* data) noexcept {
  if (!generated) {
    body(data);
    return;
  }
  std::jmp_buf exit;
  frame.exit = &exit;
  if (_setjmp(exit) == 0) body(data);
}

void run_member(Team& team, int id) noexcept {
  ThisThread& self = this_thread;
  Frame frame;
  frame.outer = self.frame;
  frame.team = &team;
  frame.id = id;
  frame.size = team.size;
  frame.active = true;
  frame.level = frame.outer != nullptr ? frame.outer->level + 1 : 1;
  if (team.begins_with_loop) {
    frame.loop = &team.loops[0];
    frame.constructs = 1;
  }
  self.frame = &frame;
  run_body(frame, team.generated, team.body, team.data);
  self.frame = frame.outer;
}

// Parts that nobody has.
void run_unstarted(Team& team) noexcept {
  while (team.next.load(std::memory_order_relaxed) < team.size) {
    const int id = team.next.fetch_add(1, std::memory_order_relaxed);
    if (id >= team.size) return;
    if (!team.aborted()) run_member(team, id);
  }
}

// Gives a claimed worker its part.
void start(State& state, int index, int id) noexcept {
  Worker& worker = *state.workers[index];
  worker.team = &state.team;
  worker.id = id;
  worker.avoided.store(state.team.cpu, std::memory_order_relaxed);
  worker.spin_us.store(state.team.spin_us, std::memory_order_relaxed);
  const bool wake = worker.wake;
  state.go[index] = (worker.assignment += kStates) + kGo;
  worker.word.store(state.go[index], std::memory_order_release);
  if (wake) futex_wake(worker.word, 1);
}

// The kernel likes to wake a thread on the CPU of the one that wakes it, and leaves both there while other processes
// use the other CPUs: the team then runs one thread after the other. A worker that finds itself there moves, now and
// then.
void leave_cpu(int cpu, long& last_move) noexcept {
  if (settings().cpus < 2 || sched_getcpu() != cpu || cpu >= CPU_SETSIZE) return;
  const long now = now_ns();
  if (now - last_move < kMoveAfter) return;
  last_move = now;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t others = allowed;
  CPU_CLR(static_cast<unsigned>(cpu), &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
}

void* work(void* pointer) noexcept {
  long last_move = 0;
  Worker& self = *static_cast<Worker*>(pointer);
  for (;;) {
    this_thread.spin_us = self.spin_us.load(std::memory_order_relaxed);
    std::uint32_t seen = kIdle;
    const auto has_work = [&] { return (seen = self.word.load(std::memory_order_relaxed)) % kStates == kGo; };
    if (!spin_until(has_work)) {
      seen = kIdle;
      self.word.compare_exchange_strong(seen, kAsleep, std::memory_order_relaxed);
      while ((seen = self.word.load(std::memory_order_relaxed)) == kAsleep || seen == kReserved) {
        futex_wait(self.word, seen);
      }
      if (seen == kClaimed) sched_yield();  // work comes at once, and without a wake
    }
    if (seen % kStates != kGo) continue;
    leave_cpu(self.avoided.load(std::memory_order_relaxed), last_move);
    if (!self.word.compare_exchange_strong(seen, kClaimed, std::memory_order_acquire)) continue;  // taken back
    Team& team = *self.team;
    this_thread.call = team.call;
    this_thread.num_threads = team.num_threads;
    this_thread.spin_us = team.spin_us;
    run_member(team, self.id);
    run_unstarted(team);
    this_thread.call = nullptr;
    // Idle before it says so: the team's next region wants it. `team` may be gone right after.
    self.word.store(kIdle, std::memory_order_release);
    if (team.running.fetch_sub(1, std::memory_order_acq_rel) == (Team::kWaiting | 1)) futex_wake(team.running, 1);
  }
  return nullptr;
}

bool claim(Worker& worker) noexcept {
  std::uint32_t seen = worker.word.load(std::memory_order_relaxed);
  while (seen == kIdle || seen == kAsleep) {
    if (worker.word.compare_exchange_weak(seen, kClaimed, std::memory_order_acquire, std::memory_order_relaxed)) {
      worker.wake = seen == kAsleep;
      return true;
    }
  }
  return false;
}

// A new worker, claimed; null when there are enough or the system has no thread left.
Worker* make_worker(int limit) noexcept {
  if (num_workers.load(std::memory_order_relaxed) >= limit) return nullptr;
  if (next_attempt.load(std::memory_order_relaxed) > now_ns()) return nullptr;
  lock(creation_lock);
  const int index = num_workers.load(std::memory_order_relaxed);
  Worker* worker = nullptr;
  void* memory = nullptr;
  if (index < limit && posix_memalign(&memory, alignof(Worker), sizeof(Worker)) == 0) {
    worker = new (memory) Worker;
    // Signals of the application are for its own threads; faults must reach the thread that caused them.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const int error = pthread_create(&thread, &attributes, work, worker);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error == 0) {
      pthread_setname_np(thread, "untorch");
      all_workers[index] = worker;
      num_workers.store(index + 1, std::memory_order_release);
    } else {
      std::free(memory);
      worker = nullptr;
      creation_failed.store(true, std::memory_order_relaxed);
      next_attempt.store(now_ns() + kRetry, std::memory_order_relaxed);
    }
  }
  unlock(creation_lock);
  return worker;
}

// Claims up to `wanted` workers into state.workers; how many.
int claim_workers(State& state, int wanted) noexcept {
  int got = 0;
  for (int i = 0; i < state.num_workers && got < wanted; ++i) {
    if (Worker* worker = state.workers[i]; claim(*worker)) {
      state.workers[i] = state.workers[got];
      state.workers[got++] = worker;
    }
  }
  if (got == wanted) return got;  // the others of state.workers stay for a larger region
  const auto is_free = [&](const State* owner) { return owner == nullptr || owner == &state; };
  const auto take = [&](Worker* worker) {
    worker->owner.store(&state, std::memory_order_relaxed);
    state.workers[got++] = worker;
  };
  // Those without an owner, then new ones up to the CPUs' number, then what others do not use, then more new ones.
  const int enough = std::min(settings().max_workers, std::max(settings().cpus, wanted));
  const int limit = std::min(kMaxThreads, std::max(settings().max_workers, wanted));
  for (const bool foreign : {false, true}) {
    const int count = num_workers.load(std::memory_order_acquire);
    for (int i = 0; i < count && got < wanted; ++i) {
      Worker* worker = all_workers[i];
      if ((foreign || is_free(worker->owner.load(std::memory_order_relaxed))) && claim(*worker)) take(worker);
    }
    while (got < wanted) {
      Worker* worker = make_worker(foreign ? limit : enough);
      if (worker == nullptr) break;
      take(worker);
    }
  }
  state.num_workers = got;
  return got;
}

void run_alone(const Region& region) noexcept {
  ThisThread& self = this_thread;
  Frame frame;
  frame.outer = self.frame;
  if (frame.outer != nullptr) {
    frame.active = frame.outer->active;
    frame.level = frame.outer->level + 1;
  }
  if (region.loop != nullptr) frame.alone = *region.loop;
  self.frame = &frame;
  run_body(frame, region.generated, region.body, region.data);
  self.frame = frame.outer;
}

void run_with_workers(State& state, int workers, const Region& region) noexcept {
  Team& team = state.team;
  ThisThread& self = this_thread;
  team.size = workers + 1;
  team.generated = region.generated;
  team.num_threads = self.num_threads;
  team.spin_us = self.spin_us;
  team.body = region.body;
  team.data = region.data;
  team.call = self.call;
  team.cpu = sched_getcpu();
  team.begins_with_loop = region.loop != nullptr;
  if (region.loop != nullptr) {
    Loop& loop = team.loops[0];
    loop.bounds = *region.loop;
    loop.next.store(0, std::memory_order_relaxed);
    loop.left.store(0, std::memory_order_relaxed);
    loop.holder.store(2, std::memory_order_relaxed);
  }
  const int unused = settings().cpus - busy_threads.load(std::memory_order_relaxed) - 1;
  const int started = std::clamp(unused, 0, workers);
  busy_threads.fetch_add(started + 1, std::memory_order_relaxed);
  team.running.store(static_cast<std::uint32_t>(started), std::memory_order_relaxed);
  team.started.store(started, std::memory_order_relaxed);
  team.next.store(started + 1, std::memory_order_relaxed);
  for (int i = started; i < workers; ++i) {
    state.workers[i]->wake = true;
    state.workers[i]->word.store(kReserved, std::memory_order_relaxed);
  }
  for (int i = 0; i < started; ++i) start(state, i, i + 1);
  run_member(team, 0);
  run_unstarted(team);
  for (int i = started - 1; i >= 0 && team.running.load(std::memory_order_relaxed) != 0; --i) {
    Word& word = state.workers[i]->word;
    std::uint32_t seen = state.go[i];
    if (word.load(std::memory_order_relaxed) != seen) continue;
    if (!word.compare_exchange_strong(seen, kIdle, std::memory_order_release, std::memory_order_relaxed)) continue;
    if (!team.aborted()) run_member(team, i + 1);
    team.running.fetch_sub(1, std::memory_order_relaxed);
  }
  const auto all_left = [&] { return team.running.load(std::memory_order_acquire) == 0; };
  if (!spin_until(all_left)) {
    std::uint32_t seen = team.running.fetch_or(Team::kWaiting, std::memory_order_acq_rel) | Team::kWaiting;
    while ((seen & ~Team::kWaiting) != 0) {
      futex_wait(team.running, seen);
      seen = team.running.load(std::memory_order_acquire);
    }
  }
  const int used = team.started.load(std::memory_order_relaxed);
  busy_threads.fetch_sub(used + 1, std::memory_order_relaxed);
  for (int i = used; i < workers; ++i) state.workers[i]->word.store(kAsleep, std::memory_order_release);
  // As the next region expects it.
  team.barrier.store(0, std::memory_order_relaxed);
  team.arrived.store(0, std::memory_order_relaxed);
  team.sleepers.store(0, std::memory_order_relaxed);
  team.singles.store(0, std::memory_order_relaxed);
  for (Loop& loop : team.loops) {
    if (loop.holder.load(std::memory_order_relaxed) == 0) break;  // they are used in order
    loop.holder.store(0, std::memory_order_relaxed);
  }
}

// Generated code that nobody called through Container::run: its failure is the thread's last error.
void run_without_call(const Region& region) noexcept {
  Call call;
  run_region(region);
  call.report();
}

}  // namespace

void start_reserved(Team& team) noexcept {
  if (team.next.load(std::memory_order_relaxed) >= team.size) return;
  const int first = team.next.exchange(team.size, std::memory_order_relaxed);
  if (first >= team.size) return;
  auto& state = *reinterpret_cast<State*>(&team);
  const int count = team.size - first, begin = team.started.load(std::memory_order_relaxed);
  busy_threads.fetch_add(count, std::memory_order_relaxed);
  team.running.fetch_add(static_cast<std::uint32_t>(count), std::memory_order_relaxed);
  team.started.store(begin + count, std::memory_order_relaxed);
  for (int i = 0; i < count; ++i) start(state, begin + i, first + i);
}

int max_threads() noexcept { return this_thread.num_threads != 0 ? this_thread.num_threads : settings().num_threads; }
void set_num_threads(int n) noexcept {
  if (n >= 1) this_thread.num_threads = std::min(n, kMaxThreads);
}

bool take_creation_failure() noexcept {
  return creation_failed.load(std::memory_order_relaxed) && !failure_taken.exchange(true, std::memory_order_relaxed);
}

void run_region(const Region& region) noexcept {
  const ThisThread& self = this_thread;
  if (region.generated) {
    if (self.call == nullptr) {
      run_without_call(region);
      return;
    }
    if (self.call->failed()) {
      if (in_generated_region()) abort_team(*self.frame);
      return;
    }
  }
  const bool nested = self.frame != nullptr && self.frame->active;
  const int wanted =
      nested ? 1
             : std::min(kMaxThreads, region.num_threads != 0 ? static_cast<int>(region.num_threads) : max_threads());
  State* state = wanted > 1 ? this_state() : nullptr;
  const int workers = state != nullptr ? claim_workers(*state, wanted - 1) : 0;
  if (workers != 0) {
    run_with_workers(*state, workers, region);
  } else {
    run_alone(region);
  }
  // What surrounds a region that failed has no use for going on.
  if (region.generated && self.frame != nullptr && self.call->failed() && in_generated_region()) {
    abort_team(*self.frame);
  }
}

}  // namespace untorch::threads
