// Device-side errors: an index out of range, a mask that sets more elements than its source has.
//
// A trap would cost the process its CUDA context. A kernel that meets such a value touches nothing outside of its
// tensors and stores a word (kernels/cuda/common/device_fault.h) into pinned host memory, one word a device. The host
// reads it without synchronizing: the next operator on that device throws it (OnDevice), and so does a run once its
// outputs are ready. What the faulty operator wrote is undefined. Of several faults the last one is reported.
#pragma once

#include <optional>
#include <string>

#include "kernels/cuda/common/device_fault.h"

namespace untorch::cuda {

class DeviceErrors {
 public:
  // The device's word, to pass to kernels. Made at the first use and kept while the process lives. Throws what the
  // driver reports.
  static kernels::cuda::FaultWord* word(int device);
  // The text of what a kernel of the device reported, which is cleared; nothing when none did. No call into CUDA.
  static std::optional<std::string> take(int device) noexcept;
  // The same as an exception (kInvalidArgument).
  static void check(int device);
};

}  // namespace untorch::cuda
