// The GPUs of this machine and their primary contexts, and which of them a thread works on.
#pragma once

#include <string>

#include "cuda/driver.h"

namespace untorch::cuda {

struct DeviceProperties {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int num_sms = 0;
  int max_threads_per_multiprocessor = 0;
  int max_shared_per_block = 0;  // bytes a CTA, after opting in
  int l2_bytes = 0;
  std::size_t total_memory = 0;  // bytes
  // Programmatic dependent launch: compute capability 9.0 and newer, and a driver of CUDA 12.3 or newer, which captures
  // it in graphs.
  bool has_pdl = false;
  std::string architecture() const { return "sm_" + std::to_string(major) + std::to_string(minor); }
};

// Throws what driver() throws.
int device_count();
// Throws kInvalidArgument that lists the devices.
const DeviceProperties& device_properties(int device);
// The device's primary context, retained once and kept until the process ends.
Context primary_context(int device);

// Whose primary context it is, as far as it was retained here; -1 for another one. No call into CUDA.
int device_of(Context context) noexcept;

// The device that this thread works on: that of its current context, else 0.
int current_device();
// Makes the device's primary context current for this thread; cheap when it already is.
void set_device(int device);

// Makes a device current and puts the thread's context back at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  Context before_ = nullptr;
  bool changed_ = false;
};

}  // namespace untorch::cuda
