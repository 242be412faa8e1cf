// Dispatch of the small-M GEMM, and its kernel for strides that no wide load fits.
//
//   16 x 32 CTA tile, a lane per column; warp w takes k = w, w + 8, … (split-K over 8 warps), summed in shared memory
//
// Roofline of that kernel: b is read once per 16 rows, element by element, 32 neighbouring columns per warp; 2 m n k
// operations. It is for problems that take a launch's time whatever the kernel does, so its share is not measured.
#include "kernels/cuda/gemm/small_m.cuh"

namespace untorch::kernels::cuda {
namespace {

// The CTA tile is 16 rows and 32 columns; warp w takes k = w, w + 8, ...
template <class T>
__global__ void __launch_bounds__(kGemmThreads) any_strides(SmallGemm p, Shares shares) {
  using C = Compute<T>;
  constexpr int kCols = 32;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  __shared__ C sums[kGemmWarps * kGemmRows * kCols];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t n = std::int64_t{blockIdx.x} * kCols + lane, top = std::int64_t{blockIdx.y} * kGemmRows;
  const T* const a = static_cast<const T*>(p.a) + std::int64_t{blockIdx.z} * p.a_batch + top * p.a_row;
  const bool inside = n < p.n;
  const T* const b = static_cast<const T*>(p.b) + std::int64_t{blockIdx.z} * p.b_batch + (inside ? n : 0) * p.b_col;
  const int rows = static_cast<int>(p.m - top < kGemmRows ? p.m - top : kGemmRows);
  C acc[kGemmRows] = {};
  for (std::int64_t k = warp; k < p.k; k += kGemmWarps) {
    const C w = inside ? widen(b[k * p.b_row]) : C(0);
#pragma unroll
    for (int m = 0; m < kGemmRows; ++m) {
      if (m < rows) acc[m] += widen(a[m * p.a_row + k * p.a_col]) * w;
    }
  }
#pragma unroll
  for (int m = 0; m < kGemmRows; ++m) sums[(warp * kGemmRows + m) * kCols + lane] = acc[m];
  __syncthreads();
  finish<T, kGemmRows, kCols>(p, sums, shares);
}

bool multiple_of_16(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

}  // namespace

SmallPath small_path(const SmallGemm& p) {
  const bool half = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  if (!half && p.dtype != DType::kFloat32 && p.dtype != DType::kFloat64) return SmallPath::kNone;
  if (p.batch > 65535 || p.m > 65535 * kGemmRows || p.n > std::int64_t{0x7fffffff}) return SmallPath::kNone;
  if (p.dtype == DType::kFloat64) return SmallPath::kAny;
  // 16 bytes of a along k must lie in its rows; strides that are never taken do not count.
  const std::int64_t unit = half ? 8 : 4;
  const auto fits = [&](std::int64_t stride, std::int64_t size) { return size == 1 || stride % unit == 0; };
  const bool a_fits = p.a_col == 1 && p.k % unit == 0 && multiple_of_16(p.a) && fits(p.a_row, p.m) &&
                      fits(p.a_batch, p.batch) && multiple_of_16(p.b) && fits(p.b_batch, p.batch);
  if (!a_fits) return SmallPath::kAny;
  if (p.b_row == 1 && fits(p.b_col, p.n)) return SmallPath::kRows;
  // Four columns at a time: 8 bytes in half types.
  if (p.b_col == 1 && p.n % 4 == 0 && p.b_row % 4 == 0) return SmallPath::kColumns;
  return SmallPath::kAny;
}

int gemm_small(const SmallGemm& p, Stream stream) {
  if (p.batch == 0 || p.m == 0 || p.n == 0) return 0;
  const bool half = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  switch (small_path(p)) {
    case SmallPath::kNone:
      return kNoKernel;
    case SmallPath::kRows:
      return half ? gemm_rows_half(p, stream) : gemm_rows_float(p, stream);
    case SmallPath::kColumns:
      return half ? gemm_columns_half(p, stream) : gemm_columns_float(p, stream);
    case SmallPath::kAny:
      break;
  }
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    return launch_small(any_strides<T>, p, 32, {.split_bits = 3}, stream);
  });
}

}  // namespace untorch::kernels::cuda
