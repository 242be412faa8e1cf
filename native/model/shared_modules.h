// The GPU kernels of model libraries, loaded once for all containers of a library.
//
// Generated code loads its kernels at a container's first run, and each session has a container of its own. Loading a
// module waits on the CPU for kernels that run, on any stream: a new session's first call would wait for the calls of
// all others. So a module is loaded once for a library and device, and goes with the library.
#pragma once

#include <cstdint>

namespace untorch {

// Unloads what was loaded of images from `start` to `end`, where a library is mapped that is closed next.
void unload_modules(std::uintptr_t start, std::uintptr_t end) noexcept;

}  // namespace untorch
