// Launches whose CTAs wait for each other.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// All CTAs are on the GPU at the same time, or the launch fails. pdl: as Launch::pdl.
template <class... Parameters, class... Arguments>
int launch_cooperative(void (*kernel)(Parameters...), int ctas, int threads, int shared_bytes, bool pdl, Stream stream,
                       const Arguments&... arguments) {
  const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (code != cudaSuccess) return code;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = pdl ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace untorch::kernels::cuda
