// Launches in clusters, early ones, and with more shared memory than a kernel has without asking.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

struct Launch {
  dim3 blocks;
  int threads = 0, shared_bytes = 0;  // shared_bytes: dynamic
  int cluster = 1;                    // blocks along x; above 1 on sm_90 and newer
  // May begin while the kernel before it on the stream still runs, if that one allows it: for kernels that call
  // wait_for_kernels_before, where DeviceProperties::early_launches is set.
  bool early = false;
};

// Returns when the kernels before this one have ended and what they wrote can be read. Before it an early kernel reads
// nothing that they may write, and writes nothing that they may read.
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets an early kernel after this one begin, as soon as all blocks of this one have said so.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

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
  cudaLaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (how.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(how.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (how.early) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace untorch::kernels::cuda
