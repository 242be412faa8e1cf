// Products with few rows in float16 and bfloat16, by tensor cores. Bytes: b once, a once a tile (from the caches).
// Operations: 2 m n k; a matrix instruction serves 16 rows at the cost of one, so memory is the bound at every m <= 16.
//
// mma.m16n8k16 takes a as its 16 rows and b as its 8 columns. The order of k inside the instruction is free as long as
// both operands share it, so each thread loads 16 bytes along k (8 elements: two instructions) and no data goes through
// shared memory. Thread (g, t) = (lane / 4, lane % 4) holds rows g and g + 8 of a, column g of b, k = 8 t ... 8 t + 7.
#include "kernels/cuda/gemm_mma.cuh"
#include "kernels/cuda/gemm_small.cuh"

namespace untorch::kernels::cuda {
namespace {

// A row's 16 bytes at k, or zeros outside the matrix.
template <class T>
__device__ __forceinline__ uint4 load_a(const T* row, bool inside, std::int64_t k, std::int64_t end) {
  return inside && k < end ? __ldg(reinterpret_cast<const uint4*>(row + k)) : uint4{0, 0, 0, 0};
}

// Steps of 32 along k that a warp has in flight: eight loads of b, fewer where the registers would not do.
template <int Tiles, bool High>
inline constexpr int kStepsAtOnce = Tiles == 1 && High ? 4 : 8 / Tiles;

// b's columns are dense. A warp's tile is 8 * Tiles columns; High: there are rows 8 to 15.
template <class T, int Tiles, bool High>
__global__ void __launch_bounds__(kGemmThreads, 2) rows_half(SmallGemm p, int split) {
  constexpr int kCols = 8 * Tiles, kUnroll = kStepsAtOnce<Tiles, High>, kRows = High ? 16 : 8;
  __shared__ float sums[kGemmWarps * kRows * kCols];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const int tile = warp / split, slice = warp % split;
  const std::int64_t first = (std::int64_t{blockIdx.x} * (kGemmWarps / split) + tile) * kCols;
  const std::int64_t top = std::int64_t{blockIdx.y} * kGemmRows;
  const T* const a = static_cast<const T*>(p.a) + std::int64_t{blockIdx.z} * p.a_batch;
  const T* const b = static_cast<const T*>(p.b) + std::int64_t{blockIdx.z} * p.b_batch;

  const bool low_inside = top + g < p.m, high_inside = High && top + g + 8 < p.m;
  const T* const low = a + (low_inside ? top + g : 0) * p.a_row;
  const T* const high = a + (high_inside ? top + g + 8 : 0) * p.a_row;
  const T* column[Tiles];
  bool inside[Tiles];
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
    const std::int64_t n = first + i * 8 + g;
    inside[i] = n < p.n;
    column[i] = b + (inside[i] ? n : 0) * p.b_col;
  }

  float acc[Tiles][4] = {};
  const std::int64_t step = std::int64_t{split} * (32 * kUnroll);
  for (std::int64_t k0 = std::int64_t{slice} * (32 * kUnroll); k0 < p.k; k0 += step) {
    uint4 w[kUnroll][Tiles], x[kUnroll], y[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t k = k0 + u * 32 + t * 8;
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        w[u][i] = inside[i] && k < p.k ? load_once(column[i] + k) : uint4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t k = k0 + u * 32 + t * 8;
      x[u] = load_a(low, low_inside, k, p.k);
      y[u] = High ? load_a(high, high_inside, k, p.k) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        mma<T>(acc[i], x[u].x, y[u].x, x[u].y, y[u].y, w[u][i].x, w[u][i].y);
        mma<T>(acc[i], x[u].z, y[u].z, x[u].w, y[u].w, w[u][i].z, w[u][i].w);
      }
    }
  }

  float* const own = sums + warp * kRows * kCols;
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
    float* const at = own + g * kCols + i * 8 + t * 2;
    at[0] = acc[i][0], at[1] = acc[i][1];
    if (High) at[8 * kCols] = acc[i][2], at[8 * kCols + 1] = acc[i][3];
  }
  __syncthreads();
  finish<T>(p, sums, kRows, kCols, split);
}

// Loads of b that a thread has in flight: 128 bytes either way.
template <int Vec>
inline constexpr int kRowsAtOnce = Vec == 4 ? 16 : 8;

// b's rows are dense: a thread loads Vec neighbouring columns of 8 rows, and pairs along k are put together by byte
// permutation. Column g of instruction j is column g * Vec + j of the tile.
template <class T, int Vec>
__global__ void __launch_bounds__(kGemmThreads, 2) columns_half(SmallGemm p, int split) {
  constexpr int kCols = 8 * Vec, kWords = Vec / 2, kUnroll = kRowsAtOnce<Vec> / 8;
  __shared__ float sums[kGemmWarps * kGemmRows * kCols];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const int tile = warp / split, slice = warp % split;
  const std::int64_t first = (std::int64_t{blockIdx.x} * (kGemmWarps / split) + tile) * kCols;
  const std::int64_t top = std::int64_t{blockIdx.y} * kGemmRows;
  const T* const a = static_cast<const T*>(p.a) + std::int64_t{blockIdx.z} * p.a_batch;
  const bool low_inside = top + g < p.m, high_inside = top + g + 8 < p.m;
  const T* const low = a + (low_inside ? top + g : 0) * p.a_row;
  const T* const high = a + (high_inside ? top + g + 8 : 0) * p.a_row;
  const bool inside = first + g * Vec < p.n;  // n is a multiple of Vec
  const T* const b = static_cast<const T*>(p.b) + std::int64_t{blockIdx.z} * p.b_batch + (inside ? first + g * Vec : 0);

  float acc[Vec][4] = {};
  const std::int64_t step = std::int64_t{split} * (32 * kUnroll);
  for (std::int64_t k0 = std::int64_t{slice} * (32 * kUnroll); k0 < p.k; k0 += step) {
    unsigned w[kUnroll][8][kWords];
    uint4 x[kUnroll], y[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t k = k0 + u * 32 + t * 8;
      const bool here = inside && k < p.k;  // k is a multiple of 8
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const T* const from = b + (here ? (k + i) * p.b_row : 0);
        if constexpr (Vec == 8) {
          const uint4 v = here ? load_once(from) : uint4{0, 0, 0, 0};
          w[u][i][0] = v.x, w[u][i][1] = v.y, w[u][i][2] = v.z, w[u][i][3] = v.w;
        } else {
          const uint2 v = here ? load_once_8(from) : uint2{0, 0};
          w[u][i][0] = v.x, w[u][i][1] = v.y;
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t k = k0 + u * 32 + t * 8;
      x[u] = load_a(low, low_inside, k, p.k), y[u] = load_a(high, high_inside, k, p.k);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int j = 0; j < Vec; ++j) {
        const unsigned take = j % 2 == 0 ? 0x5410 : 0x7632;  // the low or the high halves of two words
        const int word = j / 2;
        mma<T>(acc[j], x[u].x, y[u].x, x[u].y, y[u].y, __byte_perm(w[u][0][word], w[u][1][word], take),
               __byte_perm(w[u][2][word], w[u][3][word], take));
        mma<T>(acc[j], x[u].z, y[u].z, x[u].w, y[u].w, __byte_perm(w[u][4][word], w[u][5][word], take),
               __byte_perm(w[u][6][word], w[u][7][word], take));
      }
    }
  }

  float* const own = sums + warp * kGemmRows * kCols;
#pragma unroll
  for (int j = 0; j < Vec; ++j) {
    float* const at = own + g * kCols + 2 * t * Vec + j;
    at[0] = acc[j][0], at[Vec] = acc[j][1];
    at[8 * kCols] = acc[j][2], at[8 * kCols + Vec] = acc[j][3];
  }
  __syncthreads();
  finish<T>(p, sums, kGemmRows, kCols, split);
}

template <class T, int Tiles, bool High>
int launch_rows(const SmallGemm& p, Stream stream) {
  const int split = choose_split(p, 8 * Tiles, 32 * kStepsAtOnce<Tiles, High>);
  rows_half<T, Tiles, High><<<grid_of(p, 8 * Tiles, split), kGemmThreads, 0, stream>>>(p, split);
  return cudaGetLastError();
}

template <class T, int Vec>
int launch_columns(const SmallGemm& p, Stream stream) {
  const int split = choose_split(p, 8 * Vec, 4 * kRowsAtOnce<Vec>);
  columns_half<T, Vec><<<grid_of(p, 8 * Vec, split), kGemmThreads, 0, stream>>>(p, split);
  return cudaGetLastError();
}

// Wide tiles read a less often, narrow ones make more blocks.
template <class T>
int rows_of(const SmallGemm& p, Stream stream) {
  if (p.m <= 8) return p.n >= 2048 ? launch_rows<T, 2, false>(p, stream) : launch_rows<T, 1, false>(p, stream);
  if (p.n >= 8192) return launch_rows<T, 4, true>(p, stream);
  return p.n >= 2048 ? launch_rows<T, 2, true>(p, stream) : launch_rows<T, 1, true>(p, stream);
}

template <class T>
int columns_of(const SmallGemm& p, Stream stream) {
  const bool wide = p.n % 8 == 0 && p.b_row % 8 == 0 && p.b_batch % 8 == 0 &&
                    reinterpret_cast<std::uintptr_t>(p.b) % 16 == 0 && p.n >= 8192;
  return wide ? launch_columns<T, 8>(p, stream) : launch_columns<T, 4>(p, stream);
}

}  // namespace

int gemm_rows_half(const SmallGemm& p, Stream stream) {
  return p.dtype == Scalar::kFloat16 ? rows_of<__half>(p, stream) : rows_of<__nv_bfloat16>(p, stream);
}

int gemm_columns_half(const SmallGemm& p, Stream stream) {
  return p.dtype == Scalar::kFloat16 ? columns_of<__half>(p, stream) : columns_of<__nv_bfloat16>(p, stream);
}

}  // namespace untorch::kernels::cuda
