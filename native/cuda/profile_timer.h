// The GPU's times for the profiler: events around what a range enqueues, and kernel launches as ranges.
#pragma once

#include "base/profile.h"
#include "cuda/driver.h"

namespace untorch::cuda {

// The timer of a device's call stream, which calls of the profiled method are enqueued on. One at a time, as profiles
// are; it keeps its events for the next. Throws what driver() throws.
const profile::DeviceTimer& profile_timer(int device);

// The launch of a kernel of that name as a range, where a profile is recorded. Name: as the driver has it, or null.
template <class Launch>
Result profiled_launch(const char* name, Stream stream, Launch&& launch) {
  const profile::Range range(profile::Kind::kLaunch, name, true, stream);
  return launch();
}

}  // namespace untorch::cuda
