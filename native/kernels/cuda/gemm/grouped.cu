// Grouped GEMM for mixture of experts: mma.sync (sm_80), a 64 x 64 x 32 CTA tile, register-staged double buffering.
// A CTA finds its group from the ends on the device, so the grid covers any division into groups, and CTAs without a
// tile return at once.
//
//   a [m, k] rows, b [k, n] columns   → shared memory as lines along k, 32 elements + 8 of padding (no bank conflicts)
//   4 warps, each 32 x 32 of the tile → FP32 accumulators → out
//   mainloop: while one k step is multiplied, the next is on its way from global memory to registers
//
// Roofline: 2 m n k operations on tensor cores; a is read n/64 times and b m/64 times, mostly from L2. Share of the
// roofline: not measured alone.
#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/gemm.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kTile = 64, kDepth = 32, kPitch = kDepth + 8, kThreads = 128;
constexpr int kChunks = kTile * kDepth / 8 / kThreads;  // of 8 elements, a thread and operand

// Lines along k of an operand: element (line, k) at line * line_stride + k * k_stride; lines and k end as given.
template <class T>
struct Lines {
  const T* data;
  std::int64_t lines, k, line_stride, k_stride;
};

// A thread's share of the next step. Chunks go along whichever direction is dense.
template <class T>
struct Share {
  T values[kChunks][8];
};

template <class T>
__device__ __forceinline__ void fetch(Share<T>& share, const Lines<T>& from, std::int64_t first, std::int64_t k0) {
  const bool along_k = from.k_stride == 1 || from.line_stride != 1;
  const std::int64_t stride = along_k ? from.k_stride : from.line_stride;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int chunk = c * kThreads + static_cast<int>(threadIdx.x);
    const std::int64_t line = first + (along_k ? chunk / (kDepth / 8) : chunk % (kTile / 8) * 8);
    const std::int64_t k = k0 + (along_k ? chunk % (kDepth / 8) * 8 : chunk / (kTile / 8));
    const std::int64_t left = along_k ? (line < from.lines ? from.k - k : 0) : (k < from.k ? from.lines - line : 0);
    const T* const at = from.data + (left > 0 ? line * from.line_stride + k * from.k_stride : 0);
    if (left >= 8 && stride == 1 && reinterpret_cast<std::uintptr_t>(at) % 16 == 0) {
      *reinterpret_cast<uint4*>(share.values[c]) = __ldg(reinterpret_cast<const uint4*>(at));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) share.values[c][i] = i < left ? at[i * stride] : narrow<T>(0.0f);
    }
  }
}

template <class T>
__device__ __forceinline__ void put(T (&tile)[kTile][kPitch], const Share<T>& share, const Lines<T>& from) {
  const bool along_k = from.k_stride == 1 || from.line_stride != 1;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int chunk = c * kThreads + static_cast<int>(threadIdx.x);
    if (along_k) {
      *reinterpret_cast<uint4*>(&tile[chunk / (kDepth / 8)][chunk % (kDepth / 8) * 8]) =
          *reinterpret_cast<const uint4*>(share.values[c]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) tile[chunk % (kTile / 8) * 8 + i][chunk / (kTile / 8)] = share.values[c][i];
    }
  }
}

template <class T>
__device__ __forceinline__ unsigned pair(const T* at) {
  return *reinterpret_cast<const unsigned*>(at);
}

template <class T>
__global__ void __launch_bounds__(kThreads) grouped(GroupedGemm p, std::int64_t tiles_m, std::int64_t tiles_n) {
  __shared__ alignas(16) T left[2][kTile][kPitch];
  __shared__ alignas(16) T right[2][kTile][kPitch];
  const std::int64_t first = blockIdx.x % tiles_n * kTile;
  std::int64_t tile = blockIdx.x / tiles_n, group = 0, start = 0, end = 0, top = 0;
  const auto end_of = [&](std::int64_t g, std::int64_t before, std::int64_t total) {
    const std::int64_t e = static_cast<const int*>(p.ends)[g * p.ends_stride];
    return e < before ? before : e > total ? total : e;
  };
  if (p.along_k) {
    group = tile / tiles_m;
    top = tile % tiles_m * kTile;
    for (std::int64_t g = 0; g <= group; ++g) {
      start = end;
      end = end_of(g, start, p.k);
    }
  } else {
    for (;; ++group) {
      if (group == p.groups) return;  // the whole CTA
      start = end;
      end = end_of(group, start, p.m);
      const std::int64_t tiles = (end - start + kTile - 1) / kTile;
      if (tile < tiles) break;
      tile -= tiles;
    }
    top = start + tile * kTile;
  }

  // Along k both operands begin at the group's start; along the rows a ends where the group does.
  const std::int64_t depth = p.along_k ? end - start : p.k, skipped = p.along_k ? start : 0;
  const Lines<T> a{static_cast<const T*>(p.a) + skipped * p.a_col, p.along_k ? p.m : end, depth, p.a_row, p.a_col};
  const Lines<T> b{static_cast<const T*>(p.b) + group * p.b_group + skipped * p.b_row, p.n, depth, p.b_col, p.b_row};

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, warp_m = warp / 2 * 32, warp_n = warp % 2 * 32;
  float acc[2][4][4] = {};
  alignas(16) Share<T> next_a, next_b;
  if (depth > 0) {
    fetch(next_a, a, top, 0);
    fetch(next_b, b, first, 0);
    put(left[0], next_a, a);
    put(right[0], next_b, b);
    __syncthreads();
  }
  int now = 0;
  for (std::int64_t k0 = 0; k0 < depth; k0 += kDepth, now ^= 1) {
    const bool more = k0 + kDepth < depth;
    if (more) {
      fetch(next_a, a, top, k0 + kDepth);
      fetch(next_b, b, first, k0 + kDepth);
    }
#pragma unroll
    for (int kk = 0; kk < kDepth; kk += 16) {
      unsigned x[2][4], y[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const T* const at = &left[now][warp_m + i * 16 + g][kk + t * 2];
        x[i][0] = pair(at), x[i][1] = pair(at + 8 * kPitch), x[i][2] = pair(at + 8),
        x[i][3] = pair(at + 8 * kPitch + 8);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const T* const at = &right[now][warp_n + j * 8 + g][kk + t * 2];
        y[j][0] = pair(at), y[j][1] = pair(at + 8);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mma<T>(acc[i][j], x[i][0], x[i][1], x[i][2], x[i][3], y[j][0], y[j][1]);
      }
    }
    if (more) {
      put(left[now ^ 1], next_a, a);
      put(right[now ^ 1], next_b, b);
    }
    __syncthreads();
  }

  T* const out = static_cast<T*>(p.out) + (p.along_k ? group * p.out_group : 0);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const std::int64_t m = top + warp_m + i * 16 + g + e / 2 * 8, n = first + warp_n + j * 8 + t * 2 + e % 2;
        if (m < a.lines && n < p.n) out[m * p.out_row + n * p.out_col] = narrow<T>(acc[i][j][e]);
      }
    }
  }
}

}  // namespace

int gemm_grouped(const GroupedGemm& p, Stream stream) {
  if (p.groups == 0 || p.m == 0 || p.n == 0) return 0;
  const std::int64_t tiles_n = (p.n + kTile - 1) / kTile, tiles_m = (p.m + kTile - 1) / kTile;
  // Every group may end in a tile that is not full.
  const std::int64_t tiles = tiles_n * (p.along_k ? tiles_m * p.groups : tiles_m + p.groups);
  if (tiles > 0x7fffffff) return kNoKernel;
  const auto ctas = static_cast<unsigned>(tiles);
  if (p.dtype == DType::kFloat16) {
    grouped<__half><<<ctas, kThreads, 0, stream>>>(p, tiles_m, tiles_n);
  } else if (p.dtype == DType::kBFloat16) {
    grouped<__nv_bfloat16><<<ctas, kThreads, 0, stream>>>(p, tiles_m, tiles_n);
  } else {
    return kNoKernel;
  }
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
