// INT8 GEMM by dp4a, for sizes and strides that cuBLASLt does not take, and the scale epilogue of a float8 GEMM.
//
//   a [m, k], b [k, n]   → 64 x 64 CTA tile, 32 of k in shared memory (4 bytes of padding per line), byte by byte
//   256 threads, 4 x 4   → dp4a takes four k per instruction → int32 accumulators → out
//
// Roofline: 2 m n k operations; a is read n/64 times and b m/64 times. It is for odd sizes and far from the roofline;
// not measured. Scale epilogue: memory, 4 m n bytes read and the result written once.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/gemm.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kTile = 64, kDepth = 32, kThreads = 256;

// Tiles in shared memory: a line for every row of a and column of b, `kDepth` bytes along k and 4 against bank
// conflicts.
struct Int8Tile {
  int words[kTile][kDepth / 4 + 1];
};

__device__ __forceinline__ void fill_tile(Int8Tile& tile, const std::int8_t* from, std::int64_t first,
                                          std::int64_t count, std::int64_t stride, std::int64_t k0, std::int64_t k,
                                          std::int64_t k_stride) {
  // Neighbouring threads go along whichever direction is dense in memory.
  const bool along_k = k_stride == 1;
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kThreads) {
    const int line = along_k ? i / kDepth : i % kTile, at = along_k ? i % kDepth : i / kTile;
    const bool inside = first + line < count && k0 + at < k;
    reinterpret_cast<std::int8_t*>(tile.words[line])[at] =
        inside ? from[(first + line) * stride + (k0 + at) * k_stride] : std::int8_t{0};
  }
}

__global__ void __launch_bounds__(kThreads) int8_tiles(Int8Gemm p) {
  __shared__ Int8Tile left, right;
  const std::int64_t tiles_n = (p.n + kTile - 1) / kTile;
  const std::int64_t top = blockIdx.x / tiles_n * kTile, first = blockIdx.x % tiles_n * kTile;
  const int row = static_cast<int>(threadIdx.x) / 16, col = static_cast<int>(threadIdx.x) % 16;
  int acc[4][4] = {};
  for (std::int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
    fill_tile(left, static_cast<const std::int8_t*>(p.a), top, p.m, p.a_row, k0, p.k, p.a_col);
    fill_tile(right, static_cast<const std::int8_t*>(p.b), first, p.n, p.b_col, k0, p.k, p.b_row);
    __syncthreads();
#pragma unroll
    for (int word = 0; word < kDepth / 4; ++word) {
      int x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = left.words[row + 16 * i][word], y[i] = right.words[col + 16 * i][word];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = __dp4a(x[i], y[j], acc[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t m = top + row + 16 * i, n = first + col + 16 * j;
      if (m < p.m && n < p.n) static_cast<int*>(p.out)[m * p.out_row + n * p.out_col] = acc[i][j];
    }
  }
}

// A thread has four columns of every gridDim.y-th row.
template <class T, class S>
__global__ void __launch_bounds__(kThreads) scale_both(ScaledSums p) {
  constexpr int kColumns = 4;
  const auto* const bias = static_cast<const T*>(p.bias);
  const auto* const sums = static_cast<const S*>(p.sums);
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kColumns;
  const int count = static_cast<int>(p.n - first < kColumns ? p.n - first : kColumns);
  float column[kColumns] = {}, added[kColumns] = {};
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    if (j >= count) break;
    column[j] = p.column[p.one_column ? 0 : first + j];
    if (bias != nullptr) added[j] = widen(bias[first + j]);
  }
  const bool whole = count == kColumns && p.sums_row % kColumns == 0 && p.out_row % kColumns == 0 &&
                     (reinterpret_cast<std::uintptr_t>(sums) | reinterpret_cast<std::uintptr_t>(p.out)) % 16 == 0;
  for (std::int64_t r = blockIdx.y; r < p.m; r += gridDim.y) {
    S from[kColumns] = {};
    const S* const row = sums + r * p.sums_row + first;
    T* const out = static_cast<T*>(p.out) + r * p.out_row + first;
    if (whole) {
      const uint4 word = *reinterpret_cast<const uint4*>(row);
      memcpy(from, &word, 16);
    } else {
      for (int j = 0; j < count; ++j) from[j] = row[j];
    }
    alignas(16) T values[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float value = static_cast<float>(from[j]) * (p.row[r] * column[j]);
      if (bias != nullptr) value += added[j];
      values[j] = narrow<T>(value);
    }
    if (whole) {
      using Word = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
      Word word;
      memcpy(&word, values, sizeof word);
      *reinterpret_cast<Word*>(out) = word;
    } else {
      for (int j = 0; j < count; ++j) out[j] = values[j];
    }
  }
}

}  // namespace

int gemm_int8(const Int8Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  const std::int64_t tiles = (p.m + kTile - 1) / kTile * ((p.n + kTile - 1) / kTile);
  if (tiles > 0x7fffffff) return kNoKernel;
  int8_tiles<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

int scale_rows_and_columns(const ScaledSums& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.dtype == DType::kFloat64) return kNoKernel;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      return kNoKernel;
    } else {
      const dim3 blocks(blocks_for(p.n, 4 * kThreads), static_cast<unsigned>(p.m < 0xffff ? p.m : 0xffff));
      if (p.integer_sums) {
        scale_both<T, std::int32_t><<<blocks, kThreads, 0, stream>>>(p);
      } else {
        scale_both<T, float><<<blocks, kThreads, 0, stream>>>(p);
      }
      return cudaGetLastError();
    }
  });
}

}  // namespace untorch::kernels::cuda
