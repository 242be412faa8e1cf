// Small-M GEMM in float16 and bfloat16: mma.sync m16n8k16 straight from registers, split-K over warps and clusters.
//
//   b [k, n], columns dense   thread (g, t) = (lane / 4, lane % 4): 16 bytes along k of column g, k = 8 t … 8 t + 7,
//                             once, L1::no_allocate
//   a [m, k]                  rows g and g + 8, the same k, from L1/L2
//   The order of k inside the instruction is free as long as both operands share it, so 8 elements feed two
//   instructions and nothing is staged in shared memory.
//
// Roofline: memory at every M <= 16: b is read once; 2 m n k operations, and an mma serves 16 rows at the cost of one.
// Measured on H200 (benchmarks/gpu_matmul.py): 3.86 of 4.8 TB/s (80 %) at 1 x 4096 x 14336, 62 % at 4096 x 4096.
#include "kernels/cuda/gemm/small_m.cuh"
#include "kernels/cuda/mma/mma_sync.cuh"

namespace untorch::kernels::cuda {
namespace {

// A row's 16 bytes at k, or zeros outside the matrix.
template <class T>
__device__ __forceinline__ uint4 load_a(const T* row, bool inside, std::int64_t k, std::int64_t end) {
  return inside && k < end ? *reinterpret_cast<const uint4*>(row + k) : uint4{0, 0, 0, 0};
}

// b's columns are dense. A warp's tile is 8 * Tiles columns; High: there are rows 8 to 15; Steps: of 32 along k, loaded
// at once; Ahead: before those before them are multiplied.
template <class T, int Tiles, bool High, int Steps, bool Ahead>
__global__ void __launch_bounds__(kGemmThreads, 2) rows_half(SmallGemm p, Shares shares) {
  constexpr int kCols = 8 * Tiles, kRows = High ? 16 : 8;
  __shared__ float sums[kGemmWarps * kRows * kCols];
  griddepcontrol_launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const auto [first, top, turn, turns] = place_of<kCols>(shares);
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

  const auto fetch = [&](uint4(&w)[Steps][Tiles], std::int64_t k0) {
#pragma unroll
    for (int u = 0; u < Steps; ++u) {
      const std::int64_t k = k0 + u * 32 + t * 8;
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        w[u][i] = inside[i] && k < p.k ? load_once(column[i] + k) : uint4{0, 0, 0, 0};
      }
    }
  };

  float acc[Tiles][4] = {};
  uint4 w[Steps][Tiles];
  [[maybe_unused]] uint4 next[Steps][Tiles];
  const std::int64_t step = std::int64_t{turns} * (32 * Steps);
  std::int64_t k0 = std::int64_t{turn} * (32 * Steps);
  if (!p.b_is_constant) griddepcontrol_wait();
  fetch(w, k0);
  if (p.b_is_constant) griddepcontrol_wait();
  for (; k0 < p.k; k0 += step) {
    if constexpr (Ahead) fetch(next, k0 + step);
    uint4 x[Steps], y[Steps];
#pragma unroll
    for (int u = 0; u < Steps; ++u) {
      const std::int64_t k = k0 + u * 32 + t * 8;
      x[u] = load_a(low, low_inside, k, p.k);
      y[u] = High ? load_a(high, high_inside, k, p.k) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int u = 0; u < Steps; ++u) {
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        mma<T>(acc[i], x[u].x, y[u].x, x[u].y, y[u].y, w[u][i].x, w[u][i].y);
        mma<T>(acc[i], x[u].z, y[u].z, x[u].w, y[u].w, w[u][i].z, w[u][i].w);
      }
    }
    if constexpr (Ahead) {
#pragma unroll
      for (int u = 0; u < Steps; ++u) {
#pragma unroll
        for (int i = 0; i < Tiles; ++i) w[u][i] = next[u][i];
      }
    } else {
      fetch(w, k0 + step);
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
  finish<T, kRows, kCols>(p, sums, shares);
}

// b's rows are dense: a thread loads 4 neighbouring columns of 8 rows, and pairs along k are put together by byte
// permutation. Column g of instruction j is column 4 * g + j of the tile.
template <class T>
__global__ void __launch_bounds__(kGemmThreads, 2) columns_half(SmallGemm p, Shares shares) {
  constexpr int kCols = 32;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  __shared__ float sums[kGemmWarps * kGemmRows * kCols];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const auto [first, top, turn, turns] = place_of<kCols>(shares);
  const T* const a = static_cast<const T*>(p.a) + std::int64_t{blockIdx.z} * p.a_batch;
  const bool low_inside = top + g < p.m, high_inside = top + g + 8 < p.m;
  const T* const low = a + (low_inside ? top + g : 0) * p.a_row;
  const T* const high = a + (high_inside ? top + g + 8 : 0) * p.a_row;
  const bool inside = first + g * 4 < p.n;  // n is a multiple of 4
  const T* const b = static_cast<const T*>(p.b) + std::int64_t{blockIdx.z} * p.b_batch + (inside ? first + g * 4 : 0);
  const auto fetch = [&](uint2(&w)[8], std::int64_t k) {
    const bool here = inside && k < p.k;  // k is a multiple of 8
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = here ? load_once_8(b + (k + i) * p.b_row) : uint2{0, 0};
  };

  float acc[4][4] = {};
  uint2 w[8], next[8];
  const std::int64_t step = std::int64_t{turns} * 32;
  std::int64_t k = std::int64_t{turn} * 32 + t * 8;
  fetch(next, k);
  for (; k - t * 8 < p.k; k += step) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = next[i];
    fetch(next, k + step);
    const uint4 x = load_a(low, low_inside, k, p.k), y = load_a(high, high_inside, k, p.k);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned take = j % 2 == 0 ? 0x5410 : 0x7632;  // the low or the high halves of two words
      const auto pair = [&](int i) {
        return j < 2 ? __byte_perm(w[i].x, w[i + 1].x, take) : __byte_perm(w[i].y, w[i + 1].y, take);
      };
      mma<T>(acc[j], x.x, y.x, x.y, y.y, pair(0), pair(2));
      mma<T>(acc[j], x.z, y.z, x.w, y.w, pair(4), pair(6));
    }
  }

  float* const own = sums + warp * kGemmRows * kCols;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float* const at = own + g * kCols + 2 * t * 4 + j;
    at[0] = acc[j][0], at[4] = acc[j][1];
    at[8 * kCols] = acc[j][2], at[8 * kCols + 4] = acc[j][3];
  }
  __syncthreads();
  finish<T, kGemmRows, kCols>(p, sums, shares);
}

template <class T, int Tiles, bool High, int Steps, bool Ahead = false>
int launch_rows(const SmallGemm& p, Stream stream) {
  constexpr int kCols = 8 * Tiles;
  return launch_small(rows_half<T, Tiles, High, Steps, Ahead>, p, kCols, shares_of(p, kCols, 8 * Steps, 256), stream);
}

// Wide tiles read a less often, narrow ones make more CTAs; where k is short, so are the steps.
// sm_90 and newer, large weights, M up to 8: rings of bulk copies. Below, there is too little for every SM.
bool takes_bulk(const SmallGemm& p) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 23;
  return p.has_clusters && p.batch == 1 && p.m <= 8 && p.k % 32 == 0 && p.n * p.k >= kLarge && p.k <= (1 << 20) &&
         p.b_col * 2 % 16 == 0;
}

template <class T, bool High>
int rows_of(const SmallGemm& p, Stream stream) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 25;  // on an H200: of 2^24 weights it is slower, of 2^25.8 faster
  if (p.n * p.k >= kLarge && p.n >= 2048) return launch_rows<T, 4, High, 2>(p, stream);
  if (p.n < 2048) {
    return p.k <= 512 ? launch_rows<T, 1, High, 2, true>(p, stream) : launch_rows<T, 1, High, 4>(p, stream);
  }
  return High && p.k <= 2048 ? launch_rows<T, 2, High, 2>(p, stream) : launch_rows<T, 2, High, 4>(p, stream);
}

template <class T>
int rows_of_dtype(const SmallGemm& p, Stream stream) {
  return p.m > 8 ? rows_of<T, true>(p, stream) : rows_of<T, false>(p, stream);
}

template <class T>
int columns_of_dtype(const SmallGemm& p, Stream stream) {
  return launch_small(columns_half<T>, p, 32, shares_of(p, 32, 32, 64), stream);
}

}  // namespace

int gemm_rows_half(const SmallGemm& p, Stream stream) {
  if (takes_bulk(p)) return gemm_rows_bulk(p, stream);
  return p.dtype == DType::kFloat16 ? rows_of_dtype<__half>(p, stream) : rows_of_dtype<__nv_bfloat16>(p, stream);
}

int gemm_columns_half(const SmallGemm& p, Stream stream) {
  return p.dtype == DType::kFloat16 ? columns_of_dtype<__half>(p, stream) : columns_of_dtype<__nv_bfloat16>(p, stream);
}

}  // namespace untorch::kernels::cuda
