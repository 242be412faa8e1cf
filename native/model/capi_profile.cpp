// capi.h, the part of the profiler.
#include <algorithm>
#include <chrono>
#include <vector>

#include "base/parallel.h"
#include "base/profile.h"
#include "cuda/profile_timer.h"
#include "model/capi.h"
#include "model/capi_handles.h"

namespace {

constexpr int kPasses = 5;

// Eight sums, so that the loads do not wait for each other.
std::uint64_t read_all(const std::vector<std::uint64_t>& memory) {
  std::uint64_t sums[8] = {};
  for (std::size_t i = 0; i + 8 <= memory.size(); i += 8) {
    for (std::size_t k = 0; k < 8; ++k) sums[k] += memory[i + k];
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t part : sums) sum += part;
  return sum;
}

}  // namespace

extern "C" {

untorch_status untorch_profile_read_rate(size_t bytes, uint32_t threads, double* bytes_per_second) {
  return untorch::capi::guarded([&] {
    using Clock = std::chrono::steady_clock;
    std::vector<std::vector<std::uint64_t>> memory(threads, std::vector<std::uint64_t>(bytes / 8, 1));
    std::vector<std::uint64_t> sums(threads);
    double best = 0;
    for (int pass = 0; pass < kPasses; ++pass) {
      const Clock::time_point start = Clock::now();
      untorch::for_each_parallel(threads, threads, [&](std::size_t i) { sums[i] += read_all(memory[i]); });
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      best = std::max(best, static_cast<double>(bytes) * threads / seconds);
    }
    for (const std::uint64_t sum : sums) untorch::check(sum != 0, "the memory has other values than were written");
    *bytes_per_second = best;
  });
}

untorch_status untorch_profile_start(int32_t device_index) {
  return untorch::capi::guarded(
      [&] { untorch::profile::start(device_index < 0 ? nullptr : &untorch::cuda::profile_timer(device_index)); });
}

untorch_status untorch_profile_collect(void (*visit)(void* context, const untorch_profile_range* range), void* context,
                                       size_t* dropped) {
  struct Visit {
    void (*visit)(void* context, const untorch_profile_range* range);
    void* context;
  } to{visit, context};
  return untorch::capi::guarded([&] {
    *dropped = untorch::profile::collect(
        [](void* with, const untorch::profile::Collected& r) {
          const untorch_profile_range range{r.name,
                                            r.function,
                                            static_cast<int32_t>(r.kind),
                                            r.captured ? 1 : 0,
                                            r.thread,
                                            r.begin_ns,
                                            r.end_ns,
                                            r.device_begin_ns,
                                            r.device_end_ns};
          const auto* const visitor = static_cast<const Visit*>(with);
          visitor->visit(visitor->context, &range);
        },
        &to);
  });
}

void untorch_profile_stop(void) { untorch::profile::stop(); }

}  // extern "C"
