// Our own kernels: fatbinaries that nvcc embeds in the library, loaded into the driver at first launch.
#pragma once

#include "cuda/driver.h"

namespace untorch::cuda {

// The last error of the runtime functions, as cudaGetLastError gives it.
Result note_runtime_error(Result code) noexcept;
// True when the library was built with nvcc and has kernels.
bool has_kernels() noexcept;
// What to say where it has none.
inline constexpr const char* kBuiltWithoutCuda =
    "this untorch was built without CUDA: install the CUDA toolkit (nvcc) and reinstall untorch";

}  // namespace untorch::cuda
