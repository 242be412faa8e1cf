// The threads of one parallel region: frames, barrier and worksharing loops.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>

#include "threads/call.h"
#include "threads/futex.h"

namespace untorch::threads {

enum class Schedule { kDynamic, kGuided, kSections };

// The iterations of a loop, numbered from 0; threads take chunks.
struct LoopBounds {
  std::uint64_t start, end, increment;  // of the variable, modulo 2^64
  std::uint64_t total;                  // iterations
  std::uint64_t chunk;
  Schedule schedule;
};

struct alignas(64) Loop {
  LoopBounds bounds;
  std::atomic<std::uint64_t> next;
  // 2k + 1 while the k-th worksharing construct of a region is being written here, 2k + 2 when it is; 0: none yet.
  std::atomic<std::uint64_t> holder;
  std::atomic<int> left;  // threads that are done with it
};

struct Team {
  static constexpr unsigned kLoops = 8;                // constructs in flight, where nowait lets threads run ahead
  static constexpr std::uint32_t kAborted = 1u << 31;  // in `barrier`
  static constexpr std::uint32_t kWaiting = 1u << 31;  // in `running`

  int size = 0;
  bool generated = false, begins_with_loop = false;
  int num_threads = 0;  // omp_get_max_threads in the region
  int spin_us = -1;
  void (*body)(void*) = nullptr;
  void* data = nullptr;
  Call* call = nullptr;
  int cpu = -1;  // of the thread that opened the region

  alignas(64) Word running{0};  // workers that have not left
  std::atomic<int> next{0};     // the first part that no thread has
  std::atomic<int> started{0};  // workers
  alignas(64) Word barrier{0};  // its number, and kAborted
  Word arrived{0}, sleepers{0};
  std::atomic<std::uint64_t> singles{0};  // single constructs that were given to a thread
  std::atomic<void*> copied{nullptr};     // of single copyprivate
  Loop loops[kLoops] = {};

  bool aborted() const noexcept { return (barrier.load(std::memory_order_acquire) & kAborted) != 0; }
};

// A thread's place in a region. A team of one has no Team.
struct Frame {
  Frame* outer = nullptr;
  Team* team = nullptr;
  int id = 0, size = 1;
  bool active = false;  // this region, or one around it, has several threads
  int level = 1;
  std::jmp_buf* exit = nullptr;  // of a region of generated code; null: its body does not let exceptions out
  std::uint64_t constructs = 0;  // worksharing loops that this thread has come to
  std::uint64_t single = 0;
  Loop* loop = nullptr;  // of the team
  LoopBounds alone{};    // of a team of one: the loop, and the iterations that were given out
  std::uint64_t alone_next = 0;
  Word* held[4] = {};  // critical sections, for a failure inside
  unsigned num_held = 0;
};

inline Frame* frame() noexcept { return this_thread.frame; }

// One parallel region: body(data) on up to num_threads threads (0: the thread's setting). `loop` is a loop that begins
// with the region.
struct Region {
  void (*body)(void*);
  void* data;
  unsigned num_threads;
  bool generated;  // by AOTInductor: failures leave it by leave_region. Ours catch what they throw.
  const LoopBounds* loop = nullptr;
};
void run_region(const Region& region) noexcept;

// Gives each part of the region that no thread has to a worker of its own: some part waits for all others.
void start_reserved(Team& team) noexcept;
// All threads of the team come here before any goes on. In a team that has failed it does not return.
void barrier() noexcept;
// Enters the next worksharing loop, then takes chunks [*first, *last) of the variable; false: none is left.
void begin_loop(const LoopBounds& bounds) noexcept;
bool next_chunk(std::uint64_t* first, std::uint64_t* last) noexcept;
void end_loop() noexcept;                   // without a barrier
const LoopBounds& alone_bounds() noexcept;  // of the loop that a team of one is in
bool begin_single() noexcept;
void enter_critical(Word& word) noexcept;
void leave_critical(Word& word) noexcept;

// Threads of a team that omp_get_max_threads promises, and omp_set_num_threads.
int max_threads() noexcept;
void set_num_threads(int n) noexcept;

// Whether a thread could not be made since the process started, once: true for the first who asks after it happened.
bool take_creation_failure() noexcept;

// The failed thread's way out. `frame.exit` is not null.
[[noreturn]] void abort_team(Frame& frame) noexcept;

}  // namespace untorch::threads
