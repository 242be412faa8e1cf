// Devices whose context a kernel destroyed: a failed device-side assertion, an illegal address, a kernel that ran too
// long. CUDA returns that error from every later call in the context, and no memory of it can be read any more.
//
// untorch does not reset the context: it is the primary one, which the process shares with every other CUDA library,
// and their arrays lie in it. The device is marked instead, and every later use of it throws the same text
// (kDeviceLost).
#pragma once

#include <string>

#include "cuda/driver.h"

namespace untorch::cuda {

// True for an error that CUDA keeps returning until the context is destroyed.
bool is_fatal(Result code) noexcept;

// Marks the thread's current device and returns the text. The first failure of a device is the one that is kept.
std::string mark_lost(Result code, const char* what) noexcept;

// Throws kDeviceLost if the device was marked. One atomic load.
void check_not_lost(int device);

// The same after asking the driver, without waiting for the device: for a failure whose code nobody saw, such as that
// of a launch in generated code.
void probe_lost(int device, const char* what);

// Says which kernels may have failed; `fatal` is an assertion or not. Empty for nothing to say.
using Diagnosis = std::string (*)(bool assertion);
void set_lost_diagnosis(Diagnosis diagnosis) noexcept;

}  // namespace untorch::cuda
