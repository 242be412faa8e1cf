// What the fake cuDNN and the fake cuBLASLt do for a call: they launch a kernel of the fake driver, whose parameters
// are the call's addresses and what FAKE_LIBRARY asks for:
//   plain      nothing else; of 4096 bytes of workspace the kernel takes an address in the middle
//   cluster    it is launched in clusters of two
//   shared     it has 64 KiB of shared memory, which is allowed during the call alone
//   zeros      the workspace is filled with zeros before; ones: with 255
//   distance   how far the output is from the input, in place of one's address
//   halves     the output's address, in two words
//   low        the lower half of it beside another number
//   own        an address in memory of this library
//   half       its parameters differ from call to call
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/driver.h"

namespace fake {

using namespace untorch::cuda;

inline std::string mode() {
  const char* const given = std::getenv("FAKE_LIBRARY");
  return given == nullptr ? "plain" : given;
}

template <class T>
T* driver_function(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<T*>(dlsym(library, name));
}

inline int executions = 0;

inline Function kernel(const char* name) {
  Kernel made = nullptr;
  driver_function<Result(Kernel*, Library, const char*)>("cuLibraryGetKernel")(&made, nullptr, name);
  return reinterpret_cast<Function>(made);
}

inline DevicePtr own_memory() {
  static const DevicePtr made = [] {
    DevicePtr address = 0;
    driver_function<Result(DevicePtr*, std::size_t)>("cuMemAlloc_v2")(&address, 512);
    return address;
  }();
  return made;
}

// `words` are the kernel's first parameters.
inline Result execute(Function function, std::vector<DevicePtr> words, DevicePtr input, DevicePtr output,
                      DevicePtr workspace, Stream stream) {
  const std::string what = mode();
  ++executions;
  words.push_back(workspace + 2048);
  words.push_back(DevicePtr{7} << 32 | 7);  // sizes
  if (what == "distance") words.push_back(output - input);
  if (what == "halves") words.push_back(output << 32), words.push_back(output >> 32);
  if (what == "low") words.push_back(DevicePtr{5} << 32 | (output & 0xffffffff));
  if (what == "own") words.push_back(own_memory());
  if (what == "half") words.push_back(static_cast<DevicePtr>(executions));
  if (what == "zeros" || what == "ones") {
    driver_function<Result(DevicePtr, unsigned char, std::size_t, Stream)>("cuMemsetD8Async")(
        workspace, what == "ones" ? 255 : 0, 4096, stream);
  }
  LaunchAttribute cluster{kClusterDimension, {{2, 1, 1}}};
  const unsigned shared = what == "shared" ? 64u << 10 : 0u;
  const LaunchConfig config{9, 1, 1, 128, 1, 1, shared, stream, &cluster, what == "cluster" ? 1u : 0u};
  std::size_t bytes = words.size() * sizeof words[0];
  void* extra[5] = {reinterpret_cast<void*>(1), words.data(), reinterpret_cast<void*>(2), &bytes, nullptr};
  const auto launch = driver_function<Result(const LaunchConfig*, Function, void**, void**)>("cuLaunchKernelEx");
  const auto limit = driver_function<Result(Function, int, int)>("cuFuncSetAttribute");
  limit(function, kMaxDynamicSharedBytes, static_cast<int>(shared));
  const Result result = launch(&config, function, nullptr, extra);
  limit(function, kMaxDynamicSharedBytes, 0);
  return result;
}

}  // namespace fake
