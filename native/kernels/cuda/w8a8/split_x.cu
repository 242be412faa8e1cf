// Rows of x in 16 bits as two rows of 8 bits, for the GEMV: its tensor cores multiply them with weights as they lie.
//
// A CTA has a row: absmax first, then the row again, from L1.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/quantize/fp8_rows.h"
#include "kernels/cuda/quantize/row_absmax.cuh"
#include "kernels/cuda/w8a8/w8_values.cuh"
#include "kernels/cuda/w8a8/w8a8.h"

namespace untorch::kernels::cuda {
namespace {

constexpr float kInt16Max = 127.0f * 256.0f;

struct Split {
  std::uint32_t high, low;
};

// Of x / scale.
__device__ __forceinline__ Split split_of(float value, Int8Weight) {
  const int whole = __float2int_rn(value), low = (whole + 128 & 255) - 128;
  return {static_cast<std::uint32_t>((whole - low) / 256) & 0xffu, static_cast<std::uint32_t>(low) & 0xffu};
}
__device__ __forceinline__ Split split_of(float value, E4m3Weight) {
  const std::uint32_t high = e4m3_of(value);
  return {high, e4m3_of((value - weight_value<E4m3Weight>(high)) * kLowFactorFp8)};
}

__device__ __forceinline__ float scale_of(float absmax, Int8Weight) { return absmax / kInt16Max; }
// So that absmax / scale is from 128 to 256: the rest of a rounding, 16 times, is at most 128.
__device__ __forceinline__ float scale_of(float absmax, E4m3Weight) {
  return __uint_as_float((__float_as_uint(absmax) & 0x7f800000u) - (7u << 23));
}

template <class T, class W>
__global__ void __launch_bounds__(kThreads) split_kernel(W8Gemm p, SplitRows to) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const std::int64_t m = blockIdx.x;
  const T* const from = static_cast<const T*>(p.x) + m * p.x_stride;
  const RowAbsMax found = row_absmax(from, p.x_width);
  const float scale = scale_of(found.absmax, W{}), inverse = 1.0f / scale;
  if (threadIdx.x == 0) to.scales[m] = found.finite ? scale : __uint_as_float(0x7fc00000u);
  for (std::int64_t k = std::int64_t{threadIdx.x} * kStep; k < p.k; k += std::int64_t{kThreads} * kStep) {
    uint2 high{0, 0}, low{0, 0};
    if (k < p.x_width) {
      float values[kStep];
      load_step(from + k, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Split first = split_of(values[i] * inverse, W{}), second = split_of(values[4 + i] * inverse, W{});
        high.x |= first.high << 8 * i, low.x |= first.low << 8 * i;
        high.y |= second.high << 8 * i, low.y |= second.low << 8 * i;
      }
    }
    *reinterpret_cast<uint2*>(to.high + m * p.k + k) = high;
    *reinterpret_cast<uint2*>(to.low + m * p.k + k) = low;
  }
}

}  // namespace

int w8_split_x(const W8Gemm& p, const SplitRows& to, Stream stream) {
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (!is_half_type<T>) {
      return kNoKernel;
    } else {
      return dispatch_weight(p.weight_dtype, [&](auto weight) -> int {
        Launch how;
        how.blocks = dim3(static_cast<unsigned>(p.m));
        how.threads = kThreads;
        how.pdl = p.pdl;
        return launch_kernel(split_kernel<T, decltype(weight)>, how, stream, p, to);
      });
    }
  });
}

}  // namespace untorch::kernels::cuda
