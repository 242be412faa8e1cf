// Dynamic quantization of activations for W8A8 GEMMs: int8 with a scale a row, FP8 with a scale for 128 of a row.
//
// A CTA has a row of int8, or with few rows a part of one: absmax first, then the row again, from L1. 16 lanes have 128
// values of FP8, in registers. Bytes: 2 an element read (4 of float32), 1 written.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/quantize/e4m3_convert.cuh"
#include "kernels/cuda/quantize/row_absmax.cuh"
#include "kernels/cuda/w8a8/w8a8.h"

namespace untorch::kernels::cuda {
namespace {

constexpr float kInt8Max = 127.0f;
constexpr int kPartLanes = static_cast<int>(kW8ScaleBlock) / kStep;

__device__ __forceinline__ float scale_of(bool finite, float absmax, float largest) {
  return finite ? absmax / largest : __uint_as_float(0x7fc00000u);
}

template <class T>
__global__ void __launch_bounds__(kThreads) quantize_int8_kernel(W8Rows p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  for (std::int64_t m = blockIdx.x; m < p.m; m += gridDim.x) {
    const T* const from = static_cast<const T*>(p.x) + m * p.row;
    auto* const to = static_cast<std::uint8_t*>(p.to) + m * p.to_width;
    const RowAbsMax found = row_absmax(from, p.width);
    const float inverse = kInt8Max / found.absmax;
    if (threadIdx.x == 0 && blockIdx.y == 0) p.scales[m] = scale_of(found.finite, found.absmax, kInt8Max);
    const std::int64_t thread = std::int64_t{blockIdx.y} * kThreads + threadIdx.x;
    for (std::int64_t k = thread * kStep; k < p.to_width; k += std::int64_t{gridDim.y} * kThreads * kStep) {
      uint2 bytes{0, 0};
      if (k < p.width) {
        float values[kStep];
        load_step(from + k, values);
        const auto rounded = [&](int i) {
          return static_cast<std::uint32_t>(__float2int_rn(values[i] * inverse)) & 0xffu;
        };
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes.x |= rounded(i) << 8 * i, bytes.y |= rounded(4 + i) << 8 * i;
      }
      *reinterpret_cast<uint2*>(to + k) = bytes;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) quantize_parts_kernel(W8Rows p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const std::int64_t k = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kStep;
  for (std::int64_t m = blockIdx.y; m < p.m; m += gridDim.y) {
    float values[kStep] = {};
    if (k < p.width) load_step(static_cast<const T*>(p.x) + m * p.row + k, values);
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kStep; ++i) largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
#pragma unroll
    for (int lanes = kPartLanes / 2; lanes > 0; lanes /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    const bool finite = largest < 0x7f800000u;
    const float absmax = fmaxf(finite ? __uint_as_float(largest) : 1.0f, kMinAbsMax), inverse = kE4m3Max / absmax;
    if (k >= p.to_width) continue;  // all lanes of a part, or the last of it
    if (threadIdx.x % kPartLanes == 0) {
      p.scales[k / kW8ScaleBlock * p.scales_row + m] = scale_of(finite, absmax, kE4m3Max);
    }
    *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(p.to) + m * p.to_width + k) = e4m3_of_eight(values, inverse);
  }
}

// body(Type<T>{}) for float32, bfloat16 and float16.
template <class Body>
int dispatch_rows(DType dtype, Body&& body) {
  return dispatch_floating(dtype, [&](auto type) -> int {
    if constexpr (std::is_same_v<typename decltype(type)::type, double>) {
      return kNoKernel;
    } else {
      return body(type);
    }
  });
}

}  // namespace

int quantize_rows_int8(const W8Rows& p, Stream stream) {
  if (p.m == 0) return 0;
  return dispatch_rows(p.dtype, [&](auto type) -> int {
    Launch how;
    how.blocks = dim3(blocks_for(p.m, 1), parts_of_row(p.m, p.to_width));
    how.threads = kThreads;
    how.pdl = p.pdl;
    return launch_kernel(quantize_int8_kernel<typename decltype(type)::type>, how, stream, p);
  });
}

int quantize_parts_fp8(const W8Rows& p, Stream stream) {
  constexpr std::int64_t kMaxRowCtas = 65535;
  if (p.m == 0 || p.to_width == 0) return 0;
  return dispatch_rows(p.dtype, [&](auto type) -> int {
    Launch how;
    how.blocks = dim3(static_cast<unsigned>((p.to_width + kThreads * kStep - 1) / (kThreads * kStep)),
                      static_cast<unsigned>(p.m < kMaxRowCtas ? p.m : kMaxRowCtas));
    how.threads = kThreads;
    how.pdl = p.pdl;
    return launch_kernel(quantize_parts_kernel<typename decltype(type)::type>, how, stream, p);
  });
}

}  // namespace untorch::kernels::cuda
