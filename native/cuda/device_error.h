// Errors that only a kernel can see: an index out of range, a mask that asks for more than there is.
//
// Stopping the kernel would cost the process its CUDA context. A kernel that meets such a value touches nothing outside
// of its tensors and stores a word (kernels/cuda/common/device_fault.h) into pinned host memory, one word a device. The
// host finds it without waiting: the next shim on that device throws it (OnDevice), and so does a run once its outputs
// are waited for. What the faulty operator wrote is not to be used. Of several faults the last one is told.
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
  // What a kernel of the device reported, as a text, and clears it; nothing when none did. No call into CUDA.
  static std::optional<std::string> take(int device) noexcept;
  // The same as an exception (kInvalidArgument).
  static void check(int device);
};

}  // namespace untorch::cuda
