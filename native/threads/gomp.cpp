// GCC's OpenMP entry points, on our pool.
//
// Our own code is compiled with -fopenmp and finds GOMP_* and omp_* here, hidden. A model library finds them under
// names that nobody else has, of the same length: its undefined GOMP_*, omp_* and __kmpc_* are renamed when it is
// opened (model/elf_openmp.h). So neither needs libgomp, and a libgomp in the process serves neither. An entry point
// that is missing here (tasks, cancellation, doacross, offloading) makes a library that wants it unsupported.
#include <algorithm>
#include <cstdint>
#include <ctime>

#include "base/export.h"
#include "threads/settings.h"
#include "threads/team.h"

using namespace untorch::threads;

// A function under both names: hidden for us, exported for model libraries.
#define UNTORCH_ALIAS(type, ours, theirs, parameters) \
  type ours parameters;                               \
  UNTORCH_EXPORT type theirs parameters __attribute__((alias(#ours)));

#define UNTORCH_GOMP(type, name, parameters)                \
  UNTORCH_ALIAS(type, GOMP_##name, UTMP_##name, parameters) \
  type GOMP_##name parameters

#define UNTORCH_OMP(type, name, parameters)               \
  UNTORCH_ALIAS(type, omp_##name, utp_##name, parameters) \
  type omp_##name parameters

namespace {

using Body = void (*)(void*);
using Ull = unsigned long long;

// Iterations start, start + increment … before end, for increments of either sign.
LoopBounds bounds_of(bool up, std::uint64_t start, std::uint64_t end, std::uint64_t increment, std::uint64_t chunk,
                     bool any, Schedule schedule) noexcept {
  const std::uint64_t step = up ? increment : 0 - increment;
  const std::uint64_t span = up ? end - start : start - end;
  const std::uint64_t total = any && step != 0 ? (span - 1) / step + 1 : 0;
  return {start, end, increment, total, std::max<std::uint64_t>(chunk, 1), schedule};
}
LoopBounds bounds_of(long start, long end, long increment, long chunk, Schedule schedule) noexcept {
  const bool up = increment > 0;
  return bounds_of(up, static_cast<std::uint64_t>(start), static_cast<std::uint64_t>(end),
                   static_cast<std::uint64_t>(increment), static_cast<std::uint64_t>(std::max(chunk, 1L)),
                   up ? start < end : start > end, schedule);
}
LoopBounds bounds_of(bool up, Ull start, Ull end, Ull increment, Ull chunk, Schedule schedule) noexcept {
  return bounds_of(up, start, end, increment, chunk, up ? start < end : start > end, schedule);
}

template <class T>
bool next(T* first, T* last) noexcept {
  std::uint64_t begin = 0, end = 0;
  if (!next_chunk(&begin, &end)) return false;
  *first = static_cast<T>(begin);
  *last = static_cast<T>(end);
  return true;
}
template <class T>
bool start(const LoopBounds& bounds, T* first, T* last) noexcept {
  begin_loop(bounds);
  return next(first, last);
}

void run(Body body, void* data, unsigned threads, bool generated, const LoopBounds* loop = nullptr) noexcept {
  run_region({body, data, threads, generated, loop});
}

LoopBounds sections(unsigned count) noexcept {
  return bounds_of(1, static_cast<long>(count) + 1, 1, 1, Schedule::kSections);
}
unsigned next_section() noexcept {
  long first = 0, last = 0;
  if (!next(&first, &last)) return 0;
  return static_cast<unsigned>(first);
}

Word unnamed_critical{0}, atomic_section{0};
Word& word_of(void** name) noexcept { return *reinterpret_cast<Word*>(name); }

}  // namespace

extern "C" {

// Regions. Ours catch what their bodies throw; generated code leaves them by leave_region.
void GOMP_parallel(Body body, void* data, unsigned threads, unsigned) { run(body, data, threads, false); }
UNTORCH_EXPORT void UTMP_parallel(Body body, void* data, unsigned threads, unsigned) { run(body, data, threads, true); }

#define UNTORCH_PARALLEL_LOOP(name, schedule)                                                                          \
  void GOMP_parallel_loop_##name(Body body, void* data, unsigned threads, long first, long end, long step, long chunk, \
                                 unsigned) {                                                                           \
    const LoopBounds loop = bounds_of(first, end, step, chunk, schedule);                                              \
    run(body, data, threads, false, &loop);                                                                            \
  }                                                                                                                    \
  UNTORCH_EXPORT void UTMP_parallel_loop_##name(Body body, void* data, unsigned threads, long first, long end,         \
                                                long step, long chunk, unsigned) {                                     \
    const LoopBounds loop = bounds_of(first, end, step, chunk, schedule);                                              \
    run(body, data, threads, true, &loop);                                                                             \
  }
UNTORCH_PARALLEL_LOOP(dynamic, Schedule::kDynamic)
UNTORCH_PARALLEL_LOOP(nonmonotonic_dynamic, Schedule::kDynamic)
UNTORCH_PARALLEL_LOOP(guided, Schedule::kGuided)
UNTORCH_PARALLEL_LOOP(nonmonotonic_guided, Schedule::kGuided)
// schedule(runtime) and (auto): dynamic, as libgomp does without OMP_SCHEDULE. They come without a chunk.
#define UNTORCH_PARALLEL_LOOP_RUNTIME(name)                                                                            \
  void GOMP_parallel_loop_##name(Body body, void* data, unsigned threads, long first, long end, long step, unsigned) { \
    const LoopBounds loop = bounds_of(first, end, step, 1, Schedule::kDynamic);                                        \
    run(body, data, threads, false, &loop);                                                                            \
  }                                                                                                                    \
  UNTORCH_EXPORT void UTMP_parallel_loop_##name(Body body, void* data, unsigned threads, long first, long end,         \
                                                long step, unsigned) {                                                 \
    const LoopBounds loop = bounds_of(first, end, step, 1, Schedule::kDynamic);                                        \
    run(body, data, threads, true, &loop);                                                                             \
  }
UNTORCH_PARALLEL_LOOP_RUNTIME(runtime)
UNTORCH_PARALLEL_LOOP_RUNTIME(nonmonotonic_runtime)
UNTORCH_PARALLEL_LOOP_RUNTIME(maybe_nonmonotonic_runtime)

void GOMP_parallel_sections(Body body, void* data, unsigned threads, unsigned count, unsigned) {
  const LoopBounds loop = sections(count);
  run(body, data, threads, false, &loop);
}
UNTORCH_EXPORT void UTMP_parallel_sections(Body body, void* data, unsigned threads, unsigned count, unsigned) {
  const LoopBounds loop = sections(count);
  run(body, data, threads, true, &loop);
}

// Loops. schedule(static) is computed by the generated code itself.
#define UNTORCH_LOOP(name, schedule)                                                                             \
  UNTORCH_GOMP(bool, loop_##name##_start, (long first, long end, long step, long chunk, long* from, long* to)) { \
    return start(bounds_of(first, end, step, chunk, schedule), from, to);                                        \
  }                                                                                                              \
  UNTORCH_GOMP(bool, loop_##name##_next, (long* from, long* to)) { return next(from, to); }                      \
  UNTORCH_GOMP(bool, loop_ull_##name##_start,                                                                    \
               (bool up, Ull first, Ull end, Ull step, Ull chunk, Ull* from, Ull* to)) {                         \
    return start(bounds_of(up, first, end, step, chunk, schedule), from, to);                                    \
  }                                                                                                              \
  UNTORCH_GOMP(bool, loop_ull_##name##_next, (Ull * from, Ull * to)) { return next(from, to); }
UNTORCH_LOOP(dynamic, Schedule::kDynamic)
UNTORCH_LOOP(nonmonotonic_dynamic, Schedule::kDynamic)
UNTORCH_LOOP(guided, Schedule::kGuided)
UNTORCH_LOOP(nonmonotonic_guided, Schedule::kGuided)
#define UNTORCH_LOOP_RUNTIME(name)                                                                           \
  UNTORCH_GOMP(bool, loop_##name##_start, (long first, long end, long step, long* from, long* to)) {         \
    return start(bounds_of(first, end, step, 1, Schedule::kDynamic), from, to);                              \
  }                                                                                                          \
  UNTORCH_GOMP(bool, loop_##name##_next, (long* from, long* to)) { return next(from, to); }                  \
  UNTORCH_GOMP(bool, loop_ull_##name##_start, (bool up, Ull first, Ull end, Ull step, Ull* from, Ull* to)) { \
    return start(bounds_of(up, first, end, step, 1, Schedule::kDynamic), from, to);                          \
  }                                                                                                          \
  UNTORCH_GOMP(bool, loop_ull_##name##_next, (Ull * from, Ull * to)) { return next(from, to); }
UNTORCH_LOOP_RUNTIME(runtime)
UNTORCH_LOOP_RUNTIME(nonmonotonic_runtime)
UNTORCH_LOOP_RUNTIME(maybe_nonmonotonic_runtime)
UNTORCH_GOMP(void, loop_end_nowait, ()) { end_loop(); }
UNTORCH_GOMP(void, loop_end, ()) {
  end_loop();
  barrier();
}

UNTORCH_GOMP(unsigned, sections_start, (unsigned count)) {
  begin_loop(sections(count));
  return next_section();
}
UNTORCH_GOMP(unsigned, sections_next, ()) { return next_section(); }
UNTORCH_GOMP(void, sections_end_nowait, ()) { end_loop(); }
UNTORCH_GOMP(void, sections_end, ()) {
  end_loop();
  barrier();
}

UNTORCH_GOMP(void, barrier, ()) { barrier(); }
UNTORCH_GOMP(bool, single_start, ()) { return begin_single(); }
// single copyprivate: null for the thread that has it; the others get what that one hands over.
UNTORCH_GOMP(void*, single_copy_start, ()) {
  if (begin_single()) return nullptr;
  barrier();
  return frame()->team->copied.load(std::memory_order_relaxed);
}
UNTORCH_GOMP(void, single_copy_end, (void* data)) {
  if (frame() == nullptr || frame()->team == nullptr) return;
  frame()->team->copied.store(data, std::memory_order_relaxed);
  barrier();
}

UNTORCH_GOMP(void, critical_start, ()) { enter_critical(unnamed_critical); }
UNTORCH_GOMP(void, critical_end, ()) { leave_critical(unnamed_critical); }
UNTORCH_GOMP(void, critical_name_start, (void** name)) { enter_critical(word_of(name)); }
UNTORCH_GOMP(void, critical_name_end, (void** name)) { leave_critical(word_of(name)); }
UNTORCH_GOMP(void, atomic_start, ()) { enter_critical(atomic_section); }
UNTORCH_GOMP(void, atomic_end, ()) { leave_critical(atomic_section); }

UNTORCH_OMP(int, get_num_threads, ()) { return frame() != nullptr ? frame()->size : 1; }
UNTORCH_OMP(int, get_thread_num, ()) { return frame() != nullptr ? frame()->id : 0; }
UNTORCH_OMP(int, get_max_threads, ()) { return max_threads(); }
UNTORCH_OMP(void, set_num_threads, (int n)) { set_num_threads(n); }
UNTORCH_OMP(int, in_parallel, ()) { return frame() != nullptr && frame()->active; }
UNTORCH_OMP(int, get_num_procs, ()) { return settings().cpus; }
UNTORCH_OMP(int, get_thread_limit, ()) { return kMaxThreads; }
UNTORCH_OMP(int, get_level, ()) { return frame() != nullptr ? frame()->level : 0; }
UNTORCH_OMP(int, get_active_level, ()) { return frame() != nullptr && frame()->active; }
UNTORCH_OMP(int, get_max_active_levels, ()) { return 1; }
UNTORCH_OMP(void, set_max_active_levels, (int)) {}
UNTORCH_OMP(int, get_dynamic, ()) { return 0; }
UNTORCH_OMP(void, set_dynamic, (int)) {}
UNTORCH_OMP(int, get_nested, ()) { return 0; }
UNTORCH_OMP(void, set_nested, (int)) {}
UNTORCH_OMP(double, get_wtime, ()) { return 1e-9 * static_cast<double>(now_ns()); }
UNTORCH_OMP(double, get_wtick, ()) { return 1e-9; }

// omp_lock_t has room for one word.
UNTORCH_OMP(void, init_lock, (void* word)) { static_cast<Word*>(word)->store(0, std::memory_order_relaxed); }
UNTORCH_OMP(void, destroy_lock, (void*)) {}
UNTORCH_OMP(void, set_lock, (void* word)) { lock(*static_cast<Word*>(word)); }
UNTORCH_OMP(void, unset_lock, (void* word)) { unlock(*static_cast<Word*>(word)); }
UNTORCH_OMP(int, test_lock, (void* word)) { return try_lock(*static_cast<Word*>(word)); }

}  // extern "C"
