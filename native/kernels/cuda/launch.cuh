// Launches in clusters, and with more shared memory than a kernel has without asking.
#pragma once

#include "kernels/cuda/scalar.h"

namespace untorch::kernels::cuda {

struct Launch {
  dim3 blocks;
  int threads = 0, shared_bytes = 0;  // shared_bytes: dynamic
  int cluster = 1;                    // blocks along x; above 1 on sm_90 and newer
};

template <class... Parameters, class... Arguments>
int launch_kernel(void (*kernel)(Parameters...), const Launch& how, Stream stream, const Arguments&... arguments) {
  if (how.shared_bytes > 48 * 1024) {
    const cudaError_t code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes);
    if (code != cudaSuccess) return code;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = how.blocks;
  config.blockDim = dim3(static_cast<unsigned>(how.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(how.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(how.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = how.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace untorch::kernels::cuda
