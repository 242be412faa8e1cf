// MoE combine: out [token] = the sum of its top_k pairs' outputs, in the order of top_k, rounded once.
//
// Elementwise: a thread has four neighbouring columns of a token. Bytes: 4·top_k read and 2 or 4 written an element;
// bound by memory, or by L2 for few tokens.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/moe/w4a16_moe.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads) moe_sum_kernel(W4A16Moe p, std::int64_t quads) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= quads) return;
  const std::int64_t token = index / (p.k / 4), column = (index - token * (p.k / 4)) * 4;
  const std::int32_t* const ids = p.topk_ids + token * p.top_k;
  const float* const from = p.pair_out + token * p.top_k * p.k + column;
  const int top_k = static_cast<int>(p.top_k);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int j = 0; j < top_k; ++j) {
    const int expert = ids[j];
    if (expert < 0 || expert >= p.experts) continue;  // not written
    const float4 part = *reinterpret_cast<const float4*>(from + j * p.k);
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  struct alignas(4 * sizeof(T)) Four {
    T x, y, z, w;
  };
  static_cast<Four*>(p.out)[index] = {narrow<T>(sum.x), narrow<T>(sum.y), narrow<T>(sum.z), narrow<T>(sum.w)};
}

template <class T>
int sum_of(const W4A16Moe& p, Stream stream) {
  const std::int64_t quads = p.tokens * p.k / 4;
  if (quads == 0) return 0;
  Launch how;
  how.blocks = dim3(blocks_for(quads, kThreads)), how.threads = kThreads, how.pdl = p.pdl;
  return launch_kernel(moe_sum_kernel<T>, how, stream, p, quads);
}

}  // namespace

int moe_sum(const W4A16Moe& p, Stream stream) {
  if (p.dtype == DType::kFloat16) return sum_of<__half>(p, stream);
  if (p.dtype == DType::kFloat32) return sum_of<float>(p, stream);
  return p.dtype == DType::kBFloat16 ? sum_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
