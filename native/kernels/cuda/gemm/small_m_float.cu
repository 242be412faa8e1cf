// Small-M GEMM in float32, in full precision: FFMA, split-K over warps and clusters.
//
//   b [k, n]   a 16-byte load serves every row of a     (columns dense: along k; rows dense: along n)
//   a [m, k]   a 16-byte load serves four columns of b
//   a thread keeps a sum for each of its rows and 4 columns; warp shuffles reduce and scatter them
//
// Roofline: memory up to M = 16, where 2 m n k operations on the FMA units take about as long as reading b once.
// Measured on H200 (benchmarks/gpu_matmul.py): 3.92 of 4.8 TB/s (82 %) at 1 x 4096 x 14336.
#include "kernels/cuda/gemm/small_m.cuh"

namespace untorch::kernels::cuda {
namespace {

__device__ __forceinline__ float4 as_float4(uint4 v) {
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// Sums every value over the lanes that differ in bits Last ... 16, and leaves each lane a share of the totals: the
// values from the returned index on, Count / lanes of them, in v[0...]. (At least one; lanes then share
// it.)
template <int Count, int Last>
__device__ __forceinline__ int reduce_scatter(float (&v)[Count], int lane) {
  int first = 0, count = Count;
#pragma unroll
  for (int offset = 16; offset >= Last; offset /= 2) {
    if (count > 1) {
      count /= 2;
      const bool upper = (lane & offset) != 0;
#pragma unroll
      for (int i = 0; i < Count / 2; ++i) {
        if (i < count) {
          const float give = upper ? v[i] : v[i + count], keep = upper ? v[i + count] : v[i];
          v[i] = keep + __shfl_xor_sync(0xffffffffu, give, offset);
        }
      }
      first += upper ? count : 0;
    } else {
      v[0] += __shfl_xor_sync(0xffffffffu, v[0], offset);
    }
  }
  return first;
}

// Row m of a: those past the end repeat the last one, so that loads need no branch and are all on their way at once.
template <int Rows>
struct RowsOfA {
  __device__ __forceinline__ RowsOfA(const SmallGemm& p, std::int64_t top)
      : data(static_cast<const float*>(p.a) + std::int64_t{blockIdx.z} * p.a_batch + top * p.a_row),
        stride(p.a_row),
        last(static_cast<int>(p.m - top < Rows ? p.m - top : Rows) - 1) {}
  __device__ __forceinline__ float4 at(int m, std::int64_t k) const {
    return *reinterpret_cast<const float4*>(data + (m < last ? m : last) * stride + k);
  }
  const float* data;
  std::int64_t stride;
  int last;
};

// Rows of a that are loaded before the first of them is used.
template <int Rows>
inline constexpr int kRowsAtOnce = Rows < 4   ? Rows
                                   : Rows > 8 ? 2
                                              : 4;

// b's columns are dense: a warp's tile is 4 columns, its lanes lie along k (4 elements each, Steps times).
template <int Rows, int Steps>
__global__ void __launch_bounds__(kGemmThreads, 2) rows_float(SmallGemm p, Shares shares) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  constexpr int kCols = 4, kCount = Rows * kCols, kShare = kCount > 32 ? kCount / 32 : 1, kGroup = kRowsAtOnce<Rows>;
  __shared__ float sums[kGemmWarps * kCount];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Place place = place_of<kCols>(shares);
  const RowsOfA<Rows> a(p, place.top);
  const float* const b = static_cast<const float*>(p.b) + std::int64_t{blockIdx.z} * p.b_batch;
  const float* column[kCols];
  bool inside[kCols];
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    inside[j] = place.first + j < p.n;
    column[j] = b + (inside[j] ? place.first + j : 0) * p.b_col;
  }
  const auto fetch = [&](float4(&w)[Steps][kCols], std::int64_t k0) {
#pragma unroll
    for (int u = 0; u < Steps; ++u) {
      const std::int64_t k = k0 + u * 128 + lane * 4;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        w[u][j] = inside[j] && k < p.k ? as_float4(load_once(column[j] + k)) : float4{0, 0, 0, 0};
      }
    }
  };

  float acc[kCount] = {};
  float4 w[Steps][kCols], next[Steps][kCols];
  const std::int64_t step = std::int64_t{place.turns} * (128 * Steps);
  std::int64_t k0 = std::int64_t{place.turn} * (128 * Steps);
  fetch(next, k0);
  for (; k0 < p.k; k0 += step) {
#pragma unroll
    for (int u = 0; u < Steps; ++u) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) w[u][j] = next[u][j];
    }
    fetch(next, k0 + step);
#pragma unroll
    for (int u = 0; u < Steps; ++u) {
      const std::int64_t at = k0 + u * 128 + lane * 4, k = at < p.k ? at : 0;  // there w is 0
#pragma unroll
      for (int m0 = 0; m0 < Rows; m0 += kGroup) {
        float4 x[kGroup];
#pragma unroll
        for (int m = 0; m < kGroup; ++m) x[m] = a.at(m0 + m, k);
#pragma unroll
        for (int m = 0; m < kGroup; ++m) {
#pragma unroll
          for (int j = 0; j < kCols; ++j) {
            float& sum = acc[(m0 + m) * kCols + j];
            sum = fmaf(x[m].x, w[u][j].x, sum);
            sum = fmaf(x[m].y, w[u][j].y, sum);
            sum = fmaf(x[m].z, w[u][j].z, sum);
            sum = fmaf(x[m].w, w[u][j].w, sum);
          }
        }
      }
    }
  }

  const int at = reduce_scatter<kCount, 1>(acc, lane);
#pragma unroll
  for (int i = 0; i < kShare; ++i) sums[warp * kCount + at + i] = acc[i];  // lanes that share a total write the same
  __syncthreads();
  finish<float, Rows, kCols>(p, sums, shares);
}

// b's rows are dense: a warp's tile is 32 columns, a lane has 4 of them (lane % 8) and every fourth group of 4 rows.
template <int Rows, int Steps>
__global__ void __launch_bounds__(kGemmThreads, 2) columns_float(SmallGemm p, Shares shares) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  constexpr int kCols = 32, kCount = Rows * 4, kShare = kCount / 4, kGroup = kRowsAtOnce<Rows>;
  __shared__ float sums[kGemmWarps * Rows * kCols];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Place place = place_of<kCols>(shares);
  const RowsOfA<Rows> a(p, place.top);
  const std::int64_t n = place.first + lane % 8 * 4;
  const bool inside = n < p.n;  // n is a multiple of 4
  const float* const b = static_cast<const float*>(p.b) + std::int64_t{blockIdx.z} * p.b_batch + (inside ? n : 0);
  const auto fetch = [&](float4(&w)[Steps][4], std::int64_t k0) {
#pragma unroll
    for (int u = 0; u < Steps; ++u) {
      const std::int64_t k = k0 + u * 16 + lane / 8 * 4;
      const bool here = inside && k < p.k;  // k is a multiple of 4
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[u][i] = here ? as_float4(load_once(b + (k + i) * p.b_row)) : float4{0, 0, 0, 0};
      }
    }
  };

  float acc[kCount] = {};
  float4 w[Steps][4], next[Steps][4];
  const std::int64_t step = std::int64_t{place.turns} * (16 * Steps);
  std::int64_t k0 = std::int64_t{place.turn} * (16 * Steps);
  fetch(next, k0);
  for (; k0 < p.k; k0 += step) {
#pragma unroll
    for (int u = 0; u < Steps; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[u][i] = next[u][i];
    }
    fetch(next, k0 + step);
#pragma unroll
    for (int u = 0; u < Steps; ++u) {
      const std::int64_t at = k0 + u * 16 + lane / 8 * 4, k = at < p.k ? at : 0;  // there w is 0
#pragma unroll
      for (int m0 = 0; m0 < Rows; m0 += kGroup) {
        float4 x[kGroup];
#pragma unroll
        for (int m = 0; m < kGroup; ++m) x[m] = a.at(m0 + m, k);
#pragma unroll
        for (int m = 0; m < kGroup; ++m) {
          const float each[4] = {x[m].x, x[m].y, x[m].z, x[m].w};
          float* const sum = acc + (m0 + m) * 4;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[0] = fmaf(each[i], w[u][i].x, sum[0]);
            sum[1] = fmaf(each[i], w[u][i].y, sum[1]);
            sum[2] = fmaf(each[i], w[u][i].z, sum[2]);
            sum[3] = fmaf(each[i], w[u][i].w, sum[3]);
          }
        }
      }
    }
  }

  const int at = reduce_scatter<kCount, 8>(acc, lane);
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int row = (at + i) / 4, col = lane % 8 * 4 + (at + i) % 4;
    sums[(warp * Rows + row) * kCols + col] = acc[i];
  }
  __syncthreads();
  finish<float, Rows, kCols>(p, sums, shares);
}

// For small problems with dense columns of b: eight lanes per element of the result, all loads issued at once. k is at
// most kDotLength.
constexpr int kDotLength = 256, kDotLanes = 8;
__global__ void __launch_bounds__(128) dots_float(SmallGemm p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int lane = static_cast<int>(threadIdx.x) % kDotLanes;
  const std::int64_t element = (std::int64_t{blockIdx.x} * 128 + threadIdx.x) / kDotLanes, z = blockIdx.z;
  const bool inside = element < p.m * p.n;
  const std::int64_t n = inside ? element % p.n : 0, m = inside ? element / p.n : 0;
  const float* const a = static_cast<const float*>(p.a) + z * p.a_batch + m * p.a_row;
  const float* const b = static_cast<const float*>(p.b) + z * p.b_batch + n * p.b_col;
  constexpr int kLoads = kDotLength / (4 * kDotLanes);
  float4 x[kLoads], w[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int k = (i * kDotLanes + lane) * 4;
    x[i] = w[i] = float4{0, 0, 0, 0};
    if (k < p.k) {
      w[i] = *reinterpret_cast<const float4*>(b + k);
      x[i] = *reinterpret_cast<const float4*>(a + k);
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    sum = fmaf(x[i].x, w[i].x, sum);
    sum = fmaf(x[i].y, w[i].y, sum);
    sum = fmaf(x[i].z, w[i].z, sum);
    sum = fmaf(x[i].w, w[i].w, sum);
  }
#pragma unroll
  for (int offset = kDotLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane == 0 && inside) write<float>(p, m, n, z, sum);
}

template <int Rows>
int launch_rows(const SmallGemm& p, Stream stream) {
  constexpr int kSteps = Rows <= 2 ? 2 : 1;
  return launch_small(rows_float<Rows, kSteps>, p, 4, shares_of(p, 4, 64, kNoCluster), stream);
}

template <int Rows>
int launch_columns(const SmallGemm& p, Stream stream) {
  constexpr int kSteps = Rows <= 2 ? 2 : 1;
  return launch_small(columns_float<Rows, kSteps>, p, 32, shares_of(p, 32, 16, 32), stream);
}

// The instance for M, or the next larger one.
template <class Launch>
int with_rows(const SmallGemm& p, Launch&& launch) {
  if (p.m == 1) return launch(std::integral_constant<int, 1>{});
  if (p.m == 2) return launch(std::integral_constant<int, 2>{});
  if (p.m <= 4) return launch(std::integral_constant<int, 4>{});
  return p.m <= 8 ? launch(std::integral_constant<int, 8>{}) : launch(std::integral_constant<int, 16>{});
}

}  // namespace

int gemm_rows_float(const SmallGemm& p, Stream stream) {
  constexpr std::int64_t kElements = 1 << 15;  // more are worth loading a row or a column once for several
  if (p.k <= kDotLength && p.m * p.n <= kElements) {
    const std::int64_t ctas = (p.m * p.n * kDotLanes + 127) / 128;
    Launch how;
    how.blocks = dim3(static_cast<unsigned>(ctas), 1, static_cast<unsigned>(p.batch));
    how.threads = 128;
    how.pdl = p.pdl;
    return launch_kernel(dots_float, how, stream, p);
  }
  return with_rows(p, [&](auto rows) { return launch_rows<rows.value>(p, stream); });
}

int gemm_columns_float(const SmallGemm& p, Stream stream) {
  return with_rows(p, [&](auto rows) { return launch_columns<rows.value>(p, stream); });
}

}  // namespace untorch::kernels::cuda
