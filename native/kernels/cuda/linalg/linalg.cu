// Elementwise steps around cuBLAS and cuSOLVER: pointer arrays, unit matrices, Hermitian completion, LU unpacking.
//
// Grid-stride loops, one thread an element. Roofline: every element is read and written once, without arithmetic: bound
// by DRAM. Permutations take one thread a matrix, which makes its row swaps in order: bound by latency, m steps. The
// share of the roofline has not been measured.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/index_split.cuh"
#include "kernels/linalg.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ __forceinline__ T scalar(int value);
template <>
__device__ __forceinline__ float scalar<float>(int value) {
  return static_cast<float>(value);
}
template <>
__device__ __forceinline__ double scalar<double>(int value) {
  return value;
}
template <>
__device__ __forceinline__ float2 scalar<float2>(int value) {
  return {static_cast<float>(value), 0.0f};
}
template <>
__device__ __forceinline__ double2 scalar<double2>(int value) {
  return {static_cast<double>(value), 0.0};
}

__device__ __forceinline__ float conjugate(float x) { return x; }
__device__ __forceinline__ double conjugate(double x) { return x; }
__device__ __forceinline__ float2 conjugate(float2 x) { return {x.x, -x.y}; }
__device__ __forceinline__ double2 conjugate(double2 x) { return {x.x, -x.y}; }
__device__ __forceinline__ float real_part(float x) { return x; }
__device__ __forceinline__ double real_part(double x) { return x; }
__device__ __forceinline__ float2 real_part(float2 x) { return {x.x, 0.0f}; }
__device__ __forceinline__ double2 real_part(double2 x) { return {x.x, 0.0}; }

template <class Body>
int dispatch(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Type<float>{});
    case DType::kFloat64:
      return body(Type<double>{});
    case DType::kComplex64:
      return body(Type<float2>{});
    case DType::kComplex128:
      return body(Type<double2>{});
    default:
      return kNoKernel;
  }
}

__global__ void __launch_bounds__(kThreads)
    write_pointers(std::int64_t count, const char* base, std::int64_t step_bytes, const void** pointers) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    pointers[i] = base + i * step_bytes;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) write_units(std::int64_t numel, std::int64_t n, T* out) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    std::int64_t rest = i;
    const std::int64_t column = split(rest, n, numel <= 0x7fffffff), row = split(rest, n, numel <= 0x7fffffff);
    out[i] = scalar<T>(row == column ? 1 : 0);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) complete(std::int64_t numel, std::int64_t n, T* out) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    std::int64_t item = i;
    const std::int64_t row = split(item, n, numel <= 0x7fffffff), column = split(item, n, numel <= 0x7fffffff);
    // Only the lower triangle is written and only the upper one is read.
    if (row == column) out[i] = real_part(out[i]);
    if (row > column) out[i] = conjugate(out[(item * n + row) * n + column]);
  }
}

__global__ void __launch_bounds__(kThreads)
    run_swaps(std::int64_t count, std::int64_t m, std::int64_t steps, const std::int32_t* swaps, std::int64_t* order,
              FaultWord* faults) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; item < count; item += step) {
    std::int64_t* const rows = order + item * m;
    for (std::int64_t i = 0; i < m; ++i) rows[i] = i;
    for (std::int64_t k = 0; k < steps; ++k) {
      const std::int64_t with = std::int64_t{swaps[item * steps + k]} - 1;
      if (with < 0 || with >= m) {
        report(faults, DeviceFault::kLuPivot, with + 1);
        continue;
      }
      const std::int64_t row = rows[k];
      rows[k] = rows[with];
      rows[with] = row;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    write_permutations(std::int64_t numel, std::int64_t m, const std::int64_t* order, T* p) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    std::int64_t item = i;
    const std::int64_t column = split(item, m, numel <= 0x7fffffff), row = split(item, m, numel <= 0x7fffffff);
    p[i] = scalar<T>(order[item * m + column] == row ? 1 : 0);
  }
}

// One triangle of lu: `rows` × `columns` of it, the diagonal of the lower one being ones.
template <class T>
__global__ void __launch_bounds__(kThreads)
    write_triangle(std::int64_t numel, std::int64_t rows, std::int64_t columns, std::int64_t m, std::int64_t n,
                   bool upper, const T* __restrict__ lu, T* __restrict__ out) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    std::int64_t item = i;
    const std::int64_t column = split(item, columns, numel <= 0x7fffffff), row = split(item, rows, numel <= 0x7fffffff);
    const bool inside = upper ? row <= column : row > column;
    out[i] = inside ? lu[(item * m + row) * n + column] : scalar<T>(!upper && row == column ? 1 : 0);
  }
}

}  // namespace

int fill_pointers(std::int64_t count, const void* base, std::int64_t step_bytes, const void** pointers, Stream stream) {
  if (count == 0) return 0;
  write_pointers<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(count, static_cast<const char*>(base),
                                                                       step_bytes, pointers);
  return cudaGetLastError();
}

int unit_matrices(std::int64_t count, std::int64_t n, DType dtype, void* out, Stream stream) {
  const std::int64_t numel = count * n * n;
  if (numel == 0) return 0;
  return dispatch(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    write_units<<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(numel, n, static_cast<T*>(out));
    return cudaGetLastError();
  });
}

int make_hermitian(std::int64_t count, std::int64_t n, DType dtype, void* out, Stream stream) {
  const std::int64_t numel = count * n * n;
  if (numel == 0) return 0;
  return dispatch(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    complete<<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(numel, n, static_cast<T*>(out));
    return cudaGetLastError();
  });
}

int unpack_permutations(std::int64_t count, std::int64_t m, std::int64_t steps, const std::int32_t* swaps,
                        std::int64_t* order, DType dtype, void* p, FaultWord* faults, Stream stream) {
  const std::int64_t numel = count * m * m;
  if (numel == 0) return 0;
  run_swaps<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(count, m, steps, swaps, order, faults);
  if (const int code = cudaGetLastError(); code != 0) return code;
  return dispatch(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    write_permutations<<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(numel, m, order, static_cast<T*>(p));
    return cudaGetLastError();
  });
}

int unpack_factors(std::int64_t count, std::int64_t m, std::int64_t n, DType dtype, const void* lu, void* lower,
                   void* upper, Stream stream) {
  const std::int64_t k = m < n ? m : n;
  if (count * k == 0) return 0;
  return dispatch(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto* const from = static_cast<const T*>(lu);
    write_triangle<<<blocks_for(count * m * k, kThreads), kThreads, 0, stream>>>(count * m * k, m, k, m, n, false, from,
                                                                                 static_cast<T*>(lower));
    if (const int code = cudaGetLastError(); code != 0) return code;
    write_triangle<<<blocks_for(count * k * n, kThreads), kThreads, 0, stream>>>(count * k * n, k, n, m, n, true, from,
                                                                                 static_cast<T*>(upper));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
