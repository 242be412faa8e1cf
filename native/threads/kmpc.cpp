// LLVM's OpenMP entry points, for model libraries that clang compiled: __kmpc_* under the name utkmpc_*, on the same
// pool. Bounds are inclusive here. What is missing (serialized regions of an if clause, tasks) makes a library that
// wants it unsupported.
#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/export.h"
#include "threads/team.h"

using namespace untorch::threads;

namespace {

constexpr int kMaxArguments = 64;
using Microtask = void (*)(std::int32_t* thread, std::int32_t* bound, ...);

struct Fork {
  Microtask task;
  int count;
  void* arguments[kMaxArguments];
};

// A callee ignores arguments beyond its own, on x86-64 and on aarch64.
void run_task(void* data) {
  Fork& f = *static_cast<Fork*>(data);
  void** const a = f.arguments;
  std::int32_t thread = frame() != nullptr ? frame()->id : 0, bound = thread;
  if (f.count <= 8) {
    f.task(&thread, &bound, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    return;
  }
#define UNTORCH_EIGHT(i) a[i], a[i + 1], a[i + 2], a[i + 3], a[i + 4], a[i + 5], a[i + 6], a[i + 7]
  f.task(&thread, &bound, UNTORCH_EIGHT(0), UNTORCH_EIGHT(8), UNTORCH_EIGHT(16), UNTORCH_EIGHT(24), UNTORCH_EIGHT(32),
         UNTORCH_EIGHT(40), UNTORCH_EIGHT(48), UNTORCH_EIGHT(56));
}

thread_local unsigned pushed_threads = 0;

// schedule(static), with and without a chunk, in kmp.h's numbers.
enum : std::int32_t { kStaticChunked = 33, kStatic = 34, kDynamicChunked = 35, kGuidedChunked = 36 };

template <class T>
void static_bounds(std::int32_t schedule, std::int32_t* last, T* lower, T* upper, std::make_signed_t<T>* stride,
                   std::make_signed_t<T> increment, std::make_signed_t<T> chunk) noexcept {
  using U = std::make_unsigned_t<T>;
  const auto size = static_cast<U>(frame() != nullptr ? frame()->size : 1);
  const auto id = static_cast<U>(frame() != nullptr ? frame()->id : 0);
  const bool any = increment > 0 ? *lower <= *upper : *lower >= *upper;
  if (last != nullptr) *last = 0;
  if (!any) return;
  const U step = static_cast<U>(increment);
  const U total = increment > 0 ? (static_cast<U>(*upper) - static_cast<U>(*lower)) / step + 1
                                : (static_cast<U>(*lower) - static_cast<U>(*upper)) / (U{0} - step) + 1;
  U first = 0, count = 0;
  if ((schedule & 0xffff) == kStaticChunked) {
    count = static_cast<U>(std::max<std::make_signed_t<T>>(chunk, 1));
    first = id * count;
    *stride = static_cast<std::make_signed_t<T>>(count * size * step);
    if (last != nullptr) *last = (total - 1) / count % size == id;
    *lower = static_cast<T>(static_cast<U>(*lower) + first * step);
    *upper = static_cast<T>(static_cast<U>(*lower) + (count - 1) * step);  // the code clips it
    return;
  }
  const U each = total / size, more = total % size;
  first = id * each + std::min(id, more);
  count = each + (id < more ? 1 : 0);
  *stride = static_cast<std::make_signed_t<T>>(total * step);
  if (last != nullptr) *last = count != 0 && first + count == total;
  const U begin = static_cast<U>(*lower) + first * step;
  if (count == 0) {  // empty, in the way that the code tests
    *lower = static_cast<T>(static_cast<U>(*upper) + step);
    return;
  }
  *lower = static_cast<T>(begin);
  *upper = static_cast<T>(begin + (count - 1) * step);
}

template <class T>
void begin_dispatch(std::int32_t schedule, T lower, T upper, std::make_signed_t<T> increment,
                    std::make_signed_t<T> chunk) noexcept {
  using U = std::make_unsigned_t<T>;
  const bool up = increment > 0, any = up ? lower <= upper : lower >= upper;
  const U step = static_cast<U>(increment);
  std::uint64_t total = 0;
  if (any) {
    total = std::uint64_t{up ? static_cast<U>(static_cast<U>(upper) - static_cast<U>(lower)) / step
                             : static_cast<U>(static_cast<U>(lower) - static_cast<U>(upper)) /
                                   static_cast<U>(U{0} - step)} +
            1;
  }
  const auto wide = [](T value) { return static_cast<std::uint64_t>(static_cast<std::int64_t>(value)); };
  const auto wide_step = static_cast<std::uint64_t>(static_cast<std::int64_t>(increment));
  // The low bits of the 64-bit sums are right for narrower types, too.
  begin_loop({wide(lower), wide(lower) + total * wide_step, wide_step, total,
              static_cast<std::uint64_t>(std::max<std::make_signed_t<T>>(chunk, 1)),
              (schedule & 0xff) == kGuidedChunked ? Schedule::kGuided : Schedule::kDynamic});
}
template <class T>
std::int32_t next_dispatch(std::int32_t* last, T* lower, T* upper, std::make_signed_t<T>* stride) noexcept {
  std::uint64_t first = 0, end = 0;
  const Frame* self = frame();
  const LoopBounds* bounds = self == nullptr || self->team == nullptr ? nullptr : &self->loop->bounds;
  const std::uint64_t increment = bounds != nullptr ? bounds->increment : alone_bounds().increment;
  const std::uint64_t loop_end = bounds != nullptr ? bounds->end : alone_bounds().end;
  if (!next_chunk(&first, &end)) {
    end_loop();
    return 0;
  }
  *lower = static_cast<T>(first);
  *upper = static_cast<T>(end - increment);
  if (stride != nullptr) *stride = static_cast<std::make_signed_t<T>>(increment);
  if (last != nullptr) *last = end == loop_end;
  return 1;
}

Word& word_of(void* name) noexcept { return *static_cast<Word*>(name); }

}  // namespace

extern "C" {

#define UNTORCH_KMPC(type, name) UNTORCH_EXPORT type utkmpc_##name

UNTORCH_KMPC(void, fork_call)(void*, std::int32_t count, Microtask task, ...) {
  Fork call{task, count, {}};
  if (count > kMaxArguments) {
    fail_call(untorch::ErrorKind::kUnsupported, "a parallel region shares more variables than untorch hands on");
    return;
  }
  std::va_list list;
  va_start(list, task);
  for (int i = 0; i < count; ++i) call.arguments[i] = va_arg(list, void*);
  va_end(list);
  const unsigned threads = pushed_threads;
  pushed_threads = 0;
  run_region({run_task, &call, threads, true});
}
UNTORCH_KMPC(void, push_num_threads)(void*, std::int32_t, std::int32_t threads) {
  pushed_threads = threads > 0 ? static_cast<unsigned>(threads) : 0;
}
UNTORCH_KMPC(std::int32_t, global_thread_num)(void*) { return frame() != nullptr ? frame()->id : 0; }
UNTORCH_KMPC(std::int32_t, global_num_threads)(void*) { return frame() != nullptr ? frame()->size : 1; }
UNTORCH_KMPC(std::int32_t, bound_thread_num)(void*) { return frame() != nullptr ? frame()->id : 0; }
UNTORCH_KMPC(void, flush)(void*) {
  static std::atomic<int> fence{0};  // a plain fence is what ThreadSanitizer does not know
  fence.exchange(0, std::memory_order_seq_cst);
}
UNTORCH_KMPC(void, barrier)(void*, std::int32_t) { barrier(); }

#define UNTORCH_KMPC_LOOPS(suffix, T)                                                                                 \
  UNTORCH_KMPC(void, for_static_init_##suffix)                                                                        \
  (void*, std::int32_t, std::int32_t schedule, std::int32_t* last, T* lower, T* upper, std::make_signed_t<T>* stride, \
   std::make_signed_t<T> increment, std::make_signed_t<T> chunk) {                                                    \
    static_bounds<T>(schedule, last, lower, upper, stride, increment, chunk);                                         \
  }                                                                                                                   \
  UNTORCH_KMPC(void, dispatch_init_##suffix)                                                                          \
  (void*, std::int32_t, std::int32_t schedule, T lower, T upper, std::make_signed_t<T> increment,                     \
   std::make_signed_t<T> chunk) {                                                                                     \
    begin_dispatch<T>(schedule, lower, upper, increment, chunk);                                                      \
  }                                                                                                                   \
  UNTORCH_KMPC(std::int32_t, dispatch_next_##suffix)                                                                  \
  (void*, std::int32_t, std::int32_t* last, T* lower, T* upper, std::make_signed_t<T>* stride) {                      \
    return next_dispatch<T>(last, lower, upper, stride);                                                              \
  }
UNTORCH_KMPC_LOOPS(4, std::int32_t)
UNTORCH_KMPC_LOOPS(4u, std::uint32_t)
UNTORCH_KMPC_LOOPS(8, std::int64_t)
UNTORCH_KMPC_LOOPS(8u, std::uint64_t)
UNTORCH_KMPC(void, for_static_fini)(void*, std::int32_t) {}

UNTORCH_KMPC(void, critical)(void*, std::int32_t, void* name) { enter_critical(word_of(name)); }
UNTORCH_KMPC(void, critical_with_hint)(void*, std::int32_t, void* name, std::uint32_t) {
  enter_critical(word_of(name));
}
UNTORCH_KMPC(void, end_critical)(void*, std::int32_t, void* name) { leave_critical(word_of(name)); }
UNTORCH_KMPC(std::int32_t, single)(void*, std::int32_t) { return begin_single(); }
UNTORCH_KMPC(void, end_single)(void*, std::int32_t) {}
UNTORCH_KMPC(std::int32_t, master)(void*, std::int32_t) { return frame() == nullptr || frame()->id == 0; }
UNTORCH_KMPC(void, end_master)(void*, std::int32_t) {}
UNTORCH_KMPC(void, copyprivate)
(void*, std::int32_t, std::size_t, void* data, void (*copy)(void* to, void* from), std::int32_t mine) {
  if (frame() == nullptr || frame()->team == nullptr) return;
  Team& team = *frame()->team;
  if (mine != 0) team.copied.store(data, std::memory_order_relaxed);
  barrier();
  if (mine == 0) copy(data, team.copied.load(std::memory_order_relaxed));
  barrier();
}
// Every thread adds what it has to the shared variables, one after the other.
UNTORCH_KMPC(std::int32_t, reduce)
(void*, std::int32_t, std::int32_t, std::size_t, void*, void (*)(void*, void*), void* name) {
  enter_critical(word_of(name));
  return 1;
}
UNTORCH_KMPC(void, end_reduce)(void*, std::int32_t, void* name) {
  leave_critical(word_of(name));
  barrier();
}
UNTORCH_KMPC(std::int32_t, reduce_nowait)
(void*, std::int32_t, std::int32_t, std::size_t, void*, void (*)(void*, void*), void* name) {
  enter_critical(word_of(name));
  return 1;
}
UNTORCH_KMPC(void, end_reduce_nowait)(void*, std::int32_t, void* name) { leave_critical(word_of(name)); }

}  // extern "C"
