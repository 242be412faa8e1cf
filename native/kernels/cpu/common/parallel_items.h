// A parallel loop over independent items whose body may throw.
#pragma once

#include <cstdint>
#include <exception>

namespace untorch::kernels {

// Element operations below which one thread is faster than several.
inline constexpr double kParallelWork = 32768;

// Runs body(i) for i in [0, items), on all threads when `parallel`; the first exception is rethrown after the region.
template <class Body>
void for_each_item(std::int64_t items, bool parallel, Body&& body) {
  if (!parallel || items < 2) {
    for (std::int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t i = 0; i < items; ++i) {
    try {
      body(i);
    } catch (...) {
#pragma omp critical(untorch_item_failure)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// The same in runs of `grain` items, for short bodies.
template <class Body>
void for_each_item_grained(std::int64_t items, std::int64_t grain, bool parallel, Body&& body) {
  if (grain < 1) grain = 1;
  for_each_item((items + grain - 1) / grain, parallel, [&](std::int64_t run) {
    const std::int64_t last = items < (run + 1) * grain ? items : (run + 1) * grain;
    for (std::int64_t i = run * grain; i < last; ++i) body(i);
  });
}

}  // namespace untorch::kernels
