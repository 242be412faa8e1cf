// Kernel launches with clusters, programmatic dependent launch (PDL), and more than 48 KiB of dynamic shared memory.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

struct Launch {
  dim3 blocks;
  int threads = 0, shared_bytes = 0;  // shared_bytes: dynamic
  int max_shared_bytes = 0;           // the most of any launch, where shared_bytes varies: the kernel has one limit
  int cluster = 1;                    // CTAs along x; above 1 on sm_90 and newer
  // Programmatic dependent launch: starts while the kernel before it on the stream still runs, once that one has called
  // griddepcontrol_launch_dependents. For kernels that call griddepcontrol_wait, where DeviceProperties::has_pdl is
  // set.
  bool pdl = false;
};

// Returns when the kernels before this one have ended and their writes are visible. Before it a PDL kernel reads
// nothing that they may write, and writes nothing that they may read. Behind it, what they wrote is loaded by plain
// loads:
// __ldg and ld.global.nc take an old line of L1, as they are for memory that nothing writes while the kernel is there,
// and a PDL kernel is there before its inputs are written.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel of the stream start, if it is a PDL launch, once all CTAs of this one have called it.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class... Parameters, class... Arguments>
int launch_kernel(void (*kernel)(Parameters...), const Launch& how, Stream stream, const Arguments&... arguments) {
  const int limit = how.shared_bytes > how.max_shared_bytes ? how.shared_bytes : how.max_shared_bytes;
  if (limit > 48 * 1024) {
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit);
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
  if (how.pdl) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace untorch::kernels::cuda
