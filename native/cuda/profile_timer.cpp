// Events with a time. In a capture they become nodes of the graph, and each replay records them again.
#include "cuda/profile_timer.h"

#include <time.h>

#include <vector>

#include "base/export.h"
#include "cuda/device.h"
#include "cuda/stream.h"

namespace untorch::cuda {
namespace {

constexpr unsigned kEventRecordExternal = 1;  // CU_EVENT_RECORD_EXTERNAL

struct Timer {
  int device = 0;
  Event base = nullptr;
  std::vector<Event> unused;
};
Timer& timer() {
  static auto& made = *new Timer;
  return made;
}

Event take() {
  Timer& all = timer();
  if (!all.unused.empty()) {
    const Event event = all.unused.back();
    all.unused.pop_back();
    return event;
  }
  Event event = nullptr;
  check_driver(driver().event_create(&event, 0), "creating an event");
  return event;
}

// A range without an event has no time of the GPU. The call itself is not to fail by being profiled.
profile::Mark mark(Stream stream) noexcept {
  try {
    const Driver& api = driver();
    const Event event = take();
    const bool captured = is_capturing(stream);
    const Result code =
        captured ? api.event_record_with_flags(event, stream, kEventRecordExternal) : api.event_record(event, stream);
    if (code == kSuccess) return {event, captured};
    timer().unused.push_back(event);
  } catch (...) {
  }
  return {};
}

Stream stream_here() noexcept {
  try {
    return current_stream(timer().device);
  } catch (...) {
    return nullptr;
  }
}

void release(void* event) noexcept {
  try {
    timer().unused.push_back(static_cast<Event>(event));
  } catch (...) {
  }
}

double nanoseconds(void* event) noexcept {
  float milliseconds = 0;
  const Timer& all = timer();
  const Result code = driver().event_elapsed(&milliseconds, all.base, static_cast<Event>(event));
  return code == kSuccess && milliseconds >= 0 ? 1e6 * static_cast<double>(milliseconds) : -1;
}

void synchronize() {
  const DeviceGuard guard(timer().device);
  check_driver(driver().context_synchronize(), "waiting for the profiled work");
}

// The host's time right behind the wait for the base: a few microseconds later than the device's.
void rebase(std::int64_t& host_ns) {
  Timer& all = timer();
  const DeviceGuard guard(all.device);
  const Driver& api = driver();
  if (all.base == nullptr) check_driver(api.event_create(&all.base, 0), "creating an event");
  check_driver(api.event_record(all.base, thread_stream(all.device)), "recording an event");
  check_driver(api.event_synchronize(all.base), "waiting for an event");
  timespec now{};
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  host_ns = std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

const profile::DeviceTimer& profile_timer(int device) {
  static constexpr profile::DeviceTimer made{mark, stream_here, release, nanoseconds, synchronize, rebase};
  const DeviceGuard guard(device);
  Timer& all = timer();
  if (all.device != device) {  // events belong to a device's context
    all.unused.clear();
    all.base = nullptr;
  }
  all.device = device;
  return made;
}

}  // namespace untorch::cuda

namespace {

using namespace untorch;
using namespace untorch::cuda;

// The name of a kernel that a model library launches; null if the driver does not tell.
const char* name_of(Function function) noexcept {
  const char* name = nullptr;
  return profile::is_recording() && driver().function_name(&name, function) == kSuccess ? name : nullptr;
}

}  // namespace

// cuLaunchKernel and cuLaunchKernelEx for model libraries (model/own_names.h).
extern "C" UNTORCH_EXPORT Result utLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                                unsigned block_x, unsigned block_y, unsigned block_z,
                                                unsigned shared_bytes, Stream stream, void** params, void** extra) {
  const Driver* const api = try_driver(nullptr);
  if (api == nullptr) return kErrorNotInitialized;
  return profiled_launch(name_of(function), stream, [&] {
    return api->launch_kernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, params,
                              extra);
  });
}
extern "C" UNTORCH_EXPORT Result utLaunchKernelEx(const LaunchConfig* config, Function function, void** params,
                                                  void** extra) {
  const Driver* const api = try_driver(nullptr);
  if (api == nullptr) return kErrorNotInitialized;
  return profiled_launch(name_of(function), config->stream,
                         [&] { return api->launch_kernel_ex(config, function, params, extra); });
}
