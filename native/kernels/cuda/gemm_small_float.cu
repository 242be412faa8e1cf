// Products with few rows in float32, in full precision. Bytes: b once, a once a tile (from the caches). Operations:
// 2 m n k multiply-adds on the ordinary units; at m = 16 these take about as long as reading b.
//
// A thread keeps a sum for every row it serves (Rows) and each of 4 columns; one 16-byte load of b serves all rows, one
// of a serves four columns.
#include "kernels/cuda/gemm_small.cuh"

namespace untorch::kernels::cuda {
namespace {

__device__ __forceinline__ float4 as_float4(uint4 v) {
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// Sums every value over the lanes that differ in bits Last ... 16, and leaves each lane a share of the totals: the
// values from the returned index on, Count / (number of lanes) of them, in v[0...]. (At least one; lanes then share
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

// b's columns are dense: a warp's tile is 4 columns, its lanes lie along k (4 elements each).
template <int Rows>
__global__ void __launch_bounds__(kGemmThreads, 2) rows_float(SmallGemm p, int split) {
  constexpr int kCols = 4, kUnroll = Rows <= 8 ? 2 : 1, kCount = Rows * kCols, kShare = kCount > 32 ? kCount / 32 : 1;
  __shared__ float sums[kGemmWarps * kCount];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = warp / split, slice = warp % split;
  const std::int64_t first = (std::int64_t{blockIdx.x} * (kGemmWarps / split) + tile) * kCols;
  const std::int64_t top = std::int64_t{blockIdx.y} * kGemmRows;
  const float* const a = static_cast<const float*>(p.a) + std::int64_t{blockIdx.z} * p.a_batch + top * p.a_row;
  const float* const b = static_cast<const float*>(p.b) + std::int64_t{blockIdx.z} * p.b_batch;
  const int rows = static_cast<int>(p.m - top < Rows ? p.m - top : Rows);
  const float* column[kCols];
  bool inside[kCols];
#pragma unroll
  for (int j = 0; j < kCols; ++j) {
    inside[j] = first + j < p.n;
    column[j] = b + (inside[j] ? first + j : 0) * p.b_col;
  }

  float acc[kCount] = {};
  const std::int64_t step = std::int64_t{split} * (128 * kUnroll);
  for (std::int64_t k0 = std::int64_t{slice} * (128 * kUnroll); k0 < p.k; k0 += step) {
    float4 w[kUnroll][kCols];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t k = k0 + u * 128 + lane * 4;
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        w[u][j] = inside[j] && k < p.k ? as_float4(load_once(column[j] + k)) : float4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t k = k0 + u * 128 + lane * 4;
      if (k >= p.k) continue;
#pragma unroll
      for (int m = 0; m < Rows; ++m) {
        if (m >= rows) continue;
        const float4 x = __ldg(reinterpret_cast<const float4*>(a + m * p.a_row + k));
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          float& sum = acc[m * kCols + j];
          sum = fmaf(x.x, w[u][j].x, sum);
          sum = fmaf(x.y, w[u][j].y, sum);
          sum = fmaf(x.z, w[u][j].z, sum);
          sum = fmaf(x.w, w[u][j].w, sum);
        }
      }
    }
  }

  const int at = reduce_scatter<kCount, 1>(acc, lane);
#pragma unroll
  for (int i = 0; i < kShare; ++i) sums[warp * kCount + at + i] = acc[i];  // lanes that share a total write the same
  __syncthreads();
  finish<float>(p, sums, Rows, kCols, split);
}

// b's rows are dense: a warp's tile is 32 columns, a lane has 4 of them (lane % 8) and every fourth group of 4 rows.
template <int Rows>
__global__ void __launch_bounds__(kGemmThreads, 2) columns_float(SmallGemm p, int split) {
  constexpr int kCols = 32, kCount = Rows * 4, kShare = kCount / 4;
  __shared__ float sums[kGemmWarps * Rows * kCols];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = warp / split, slice = warp % split;
  const std::int64_t n = (std::int64_t{blockIdx.x} * (kGemmWarps / split) + tile) * kCols + lane % 8 * 4;
  const std::int64_t top = std::int64_t{blockIdx.y} * kGemmRows;
  const float* const a = static_cast<const float*>(p.a) + std::int64_t{blockIdx.z} * p.a_batch + top * p.a_row;
  const bool inside = n < p.n;  // n is a multiple of 4
  const float* const b = static_cast<const float*>(p.b) + std::int64_t{blockIdx.z} * p.b_batch + (inside ? n : 0);
  const int rows = static_cast<int>(p.m - top < Rows ? p.m - top : Rows);

  float acc[kCount] = {};
  const std::int64_t step = std::int64_t{split} * 32;
  for (std::int64_t k0 = std::int64_t{slice} * 32; k0 < p.k; k0 += step) {
    float4 w[2][4];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const std::int64_t k = k0 + u * 16 + lane / 8 * 4;
      const bool here = inside && k < p.k;  // k is a multiple of 4
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[u][i] = here ? as_float4(load_once(b + (k + i) * p.b_row)) : float4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const std::int64_t k = k0 + u * 16 + lane / 8 * 4;
      if (k >= p.k) continue;
#pragma unroll
      for (int m = 0; m < Rows; ++m) {
        if (m >= rows) continue;
        const float4 x = __ldg(reinterpret_cast<const float4*>(a + m * p.a_row + k));
        const float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[m * 4 + 0] = fmaf(each[i], w[u][i].x, acc[m * 4 + 0]);
          acc[m * 4 + 1] = fmaf(each[i], w[u][i].y, acc[m * 4 + 1]);
          acc[m * 4 + 2] = fmaf(each[i], w[u][i].z, acc[m * 4 + 2]);
          acc[m * 4 + 3] = fmaf(each[i], w[u][i].w, acc[m * 4 + 3]);
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
  finish<float>(p, sums, Rows, kCols, split);
}

template <int Rows>
int launch_rows(const SmallGemm& p, Stream stream) {
  const int split = choose_split(p, 4, Rows <= 8 ? 256 : 128);
  rows_float<Rows><<<grid_of(p, 4, split), kGemmThreads, 0, stream>>>(p, split);
  return cudaGetLastError();
}

template <int Rows>
int launch_columns(const SmallGemm& p, Stream stream) {
  const int split = choose_split(p, 32, 32);
  columns_float<Rows><<<grid_of(p, 32, split), kGemmThreads, 0, stream>>>(p, split);
  return cudaGetLastError();
}

}  // namespace

int gemm_rows_float(const SmallGemm& p, Stream stream) {
  if (p.m == 1) return launch_rows<1>(p, stream);
  if (p.m == 2) return launch_rows<2>(p, stream);
  if (p.m <= 4) return launch_rows<4>(p, stream);
  return p.m <= 8 ? launch_rows<8>(p, stream) : launch_rows<16>(p, stream);
}

int gemm_columns_float(const SmallGemm& p, Stream stream) {
  if (p.m == 1) return launch_columns<1>(p, stream);
  return p.m <= 4 ? launch_columns<4>(p, stream) : launch_columns<16>(p, stream);
}

}  // namespace untorch::kernels::cuda
