// Grouped GEMM for mixture of experts, any strides: a 64 x 64 x 32 CTA tile, register-staged double buffering.
// A CTA finds its group from the ends on the device, so the grid covers any division into groups, and CTAs without a
// tile return at once. The multiply-adds are mma.sync (sm_80) for float16 and bfloat16, and for float32 where TF32 is
// allowed; else FP32 FMAs.
//
//   a [m, k] rows, b [k, n] columns   → shared memory as lines along k, 32 elements + 16 bytes of padding
//   4 warps, each 32 x 32 of the tile → FP32 accumulators → out
//   mainloop: while one k step is multiplied, the next is on its way from global memory to registers
//
// Bank conflicts: none, of fragments (8 lines at a time, 4 banks apart) or of the FMAs' 16-byte reads.
//
// Roofline: 2 m n k operations on tensor cores or FMA units; a is read n/64 times and b m/64 times, mostly from L2. For
// an FMA a thread reads 1.5 bytes of shared memory, so that FMAs are the bound. Share of the roofline: not measured.
#include "kernels/cuda/gemm/grouped.h"
#include "kernels/cuda/mma/mma_sync.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kTile = 64, kDepth = 32, kThreads = 128;

template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements of a load
template <class T>
constexpr int kPitch = kDepth + kVector<T>;
template <class T>
constexpr int kChunks = kTile * kDepth / kVector<T> / kThreads;  // loads of a thread and operand

// Lines along k of an operand: element (line, k) at line * line_stride + k * k_stride; lines and k end as given.
template <class T>
struct Lines {
  const T* data;
  std::int64_t lines, k, line_stride, k_stride;
};

// A thread's share of the next step. Chunks go along whichever direction is dense.
template <class T>
struct Share {
  T values[kChunks<T>][kVector<T>];
};

template <class T>
__device__ __forceinline__ void fetch(Share<T>& share, const Lines<T>& from, std::int64_t first, std::int64_t k0) {
  const bool along_k = from.k_stride == 1 || from.line_stride != 1;
  const std::int64_t stride = along_k ? from.k_stride : from.line_stride;
  constexpr int kVec = kVector<T>;
#pragma unroll
  for (int c = 0; c < kChunks<T>; ++c) {
    const int chunk = c * kThreads + static_cast<int>(threadIdx.x);
    const std::int64_t line = first + (along_k ? chunk / (kDepth / kVec) : chunk % (kTile / kVec) * kVec);
    const std::int64_t k = k0 + (along_k ? chunk % (kDepth / kVec) * kVec : chunk / (kTile / kVec));
    const std::int64_t left = along_k ? (line < from.lines ? from.k - k : 0) : (k < from.k ? from.lines - line : 0);
    const T* const at = from.data + (left > 0 ? line * from.line_stride + k * from.k_stride : 0);
    if (left >= kVec && stride == 1 && reinterpret_cast<std::uintptr_t>(at) % 16 == 0) {
      *reinterpret_cast<uint4*>(share.values[c]) = __ldg(reinterpret_cast<const uint4*>(at));
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) share.values[c][i] = i < left ? at[i * stride] : narrow<T>(0.0f);
    }
  }
}

template <class T>
__device__ __forceinline__ void put(T (&tile)[kTile][kPitch<T>], const Share<T>& share, const Lines<T>& from) {
  const bool along_k = from.k_stride == 1 || from.line_stride != 1;
  constexpr int kVec = kVector<T>;
#pragma unroll
  for (int c = 0; c < kChunks<T>; ++c) {
    const int chunk = c * kThreads + static_cast<int>(threadIdx.x);
    if (along_k) {
      *reinterpret_cast<uint4*>(&tile[chunk / (kDepth / kVec)][chunk % (kDepth / kVec) * kVec]) =
          *reinterpret_cast<const uint4*>(share.values[c]);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        tile[chunk % (kTile / kVec) * kVec + i][chunk / (kTile / kVec)] = share.values[c][i];
      }
    }
  }
}

template <class T>
__device__ __forceinline__ unsigned pair(const T* at) {
  return *reinterpret_cast<const unsigned*>(at);
}

// How a warp multiplies its 32 x 32 of a k step: Acc is a lane's sums, and each(acc, store) calls store(row, column,
// sum).
template <class T>
struct HalfMma {
  float acc[2][4][4] = {};

  __device__ __forceinline__ void multiply(const T (&left)[kTile][kPitch<T>], const T (&right)[kTile][kPitch<T>],
                                           int warp_m, int warp_n, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int kk = 0; kk < kDepth; kk += 16) {
      unsigned x[2][4], y[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const T* const at = &left[warp_m + i * 16 + g][kk + t * 2];
        x[i][0] = pair(at), x[i][1] = pair(at + 8 * kPitch<T>), x[i][2] = pair(at + 8),
        x[i][3] = pair(at + 8 * kPitch<T> + 8);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const T* const at = &right[warp_n + j * 8 + g][kk + t * 2];
        y[j][0] = pair(at), y[j][1] = pair(at + 8);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mma<T>(acc[i][j], x[i][0], x[i][1], x[i][2], x[i][3], y[j][0], y[j][1]);
      }
    }
  }
  template <class Store>
  __device__ __forceinline__ void each(int lane, Store&& store) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          store(i * 16 + lane / 4 + e / 2 * 8, j * 8 + lane % 4 * 2 + e % 2, acc[i][j][e]);
        }
      }
    }
  }
};

// mma.m16n8k8, operands rounded to TF32.
struct Tf32Mma {
  float acc[2][4][4] = {};

  __device__ __forceinline__ static unsigned rounded(float value) {
    unsigned out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(value));
    return out;
  }
  __device__ __forceinline__ void multiply(const float (&left)[kTile][kPitch<float>],
                                           const float (&right)[kTile][kPitch<float>], int warp_m, int warp_n,
                                           int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int kk = 0; kk < kDepth; kk += 8) {
      unsigned x[2][4], y[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const at = &left[warp_m + i * 16 + g][kk + t];
        x[i][0] = rounded(at[0]), x[i][1] = rounded(at[8 * kPitch<float>]), x[i][2] = rounded(at[4]),
        x[i][3] = rounded(at[8 * kPitch<float> + 4]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const at = &right[warp_n + j * 8 + g][kk + t];
        y[j][0] = rounded(at[0]), y[j][1] = rounded(at[4]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_tf32(acc[i][j], x[i], y[j]);
      }
    }
  }
  template <class Store>
  __device__ __forceinline__ void each(int lane, Store&& store) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          store(i * 16 + lane / 4 + e / 2 * 8, j * 8 + lane % 4 * 2 + e % 2, acc[i][j][e]);
        }
      }
    }
  }
};

// FP32 FMAs: a lane has rows lane / 8 + 4i and columns lane % 8 + 8j.
struct Float32Fma {
  float acc[8][4] = {};

  __device__ __forceinline__ void multiply(const float (&left)[kTile][kPitch<float>],
                                           const float (&right)[kTile][kPitch<float>], int warp_m, int warp_n,
                                           int lane) {
#pragma unroll
    for (int kk = 0; kk < kDepth; kk += 4) {
      float4 x[8], y[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = *reinterpret_cast<const float4*>(&left[warp_m + lane / 8 + 4 * i][kk]);
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = *reinterpret_cast<const float4*>(&right[warp_n + lane % 8 + 8 * j][kk]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          acc[i][j] = fmaf(x[i].x, y[j].x, acc[i][j]), acc[i][j] = fmaf(x[i].y, y[j].y, acc[i][j]);
          acc[i][j] = fmaf(x[i].z, y[j].z, acc[i][j]), acc[i][j] = fmaf(x[i].w, y[j].w, acc[i][j]);
        }
      }
    }
  }
  template <class Store>
  __device__ __forceinline__ void each(int lane, Store&& store) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) store(lane / 8 + 4 * i, lane % 8 + 8 * j, acc[i][j]);
    }
  }
};

// The rows of group `group`, which is p.groups for those behind the last one, and which of its tiles was asked for.
struct GroupRows {
  std::int64_t group, start, end, tile;
};

// By a whole warp, 32 groups at a time.
__device__ __forceinline__ GroupRows find_rows(const GroupedGemm& p, std::int64_t tile, int lane) {
  std::int64_t start = 0;
  for (std::int64_t first = 0; first < p.groups; first += 32) {
    const std::int64_t g = first + lane;
    std::int64_t end = g < p.groups ? static_cast<const int*>(p.ends)[g * p.ends_stride] : 0;
    end = end < start ? start : end > p.m ? p.m : end;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int64_t other = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step && other > end) end = other;
    }
    std::int64_t before = __shfl_up_sync(0xffffffffu, end, 1);
    if (lane == 0) before = start;
    const std::int64_t tiles = (end - before + kTile - 1) / kTile;
    std::int64_t sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int64_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (const unsigned found = __ballot_sync(0xffffffffu, sum > tile)) {
      const int leader = __ffs(static_cast<int>(found)) - 1;
      return {first + leader, __shfl_sync(0xffffffffu, before, leader), __shfl_sync(0xffffffffu, end, leader),
              tile - __shfl_sync(0xffffffffu, sum - tiles, leader)};
    }
    tile -= __shfl_sync(0xffffffffu, sum, 31);
    start = __shfl_sync(0xffffffffu, end, 31);
  }
  return {p.groups, start, p.m, tile};
}

template <class T, class Math>
__global__ void __launch_bounds__(kThreads) grouped(GroupedGemm p, std::int64_t tiles_m, std::int64_t tiles_n) {
  __shared__ alignas(16) T left[2][kTile][kPitch<T>];
  __shared__ alignas(16) T right[2][kTile][kPitch<T>];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t first = blockIdx.x % tiles_n * kTile, tile = blockIdx.x / tiles_n;
  std::int64_t group = 0, start = 0, end = 0, top = 0;
  if (p.along_k) {
    group = tile / tiles_m;
    top = tile % tiles_m * kTile;
    for (std::int64_t g = 0; g <= group; ++g) {
      start = end;
      const std::int64_t e = static_cast<const int*>(p.ends)[g * p.ends_stride];
      end = e < start ? start : e > p.k ? p.k : e;
    }
  } else {
    const GroupRows rows = find_rows(p, tile, lane);
    group = rows.group, start = rows.start, end = rows.end;
    top = start + rows.tile * kTile;
    if (top >= end) return;  // the whole CTA: the grid has more than there are
  }

  // Along k both operands begin at the group's start; along the rows a ends where the group does.
  const std::int64_t depth = p.along_k ? end - start : group == p.groups ? 0 : p.k, skipped = p.along_k ? start : 0;
  const Lines<T> a{static_cast<const T*>(p.a) + skipped * p.a_col, p.along_k ? p.m : end, depth, p.a_row, p.a_col};
  const Lines<T> b{static_cast<const T*>(p.b) + group * p.b_group + skipped * p.b_row, p.n, depth, p.b_col, p.b_row};

  const int warp_m = warp / 2 * 32, warp_n = warp % 2 * 32;
  Math math;
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
    math.multiply(left[now], right[now], warp_m, warp_n, lane);
    if (more) {
      put(left[now ^ 1], next_a, a);
      put(right[now ^ 1], next_b, b);
    }
    __syncthreads();
  }

  T* const out = static_cast<T*>(p.out) + (p.along_k ? group * p.out_group : 0);
  math.each(lane, [&](int row, int column, float sum) {
    const std::int64_t m = top + warp_m + row, n = first + warp_n + column;
    if (m < a.lines && n < p.n) out[m * p.out_row + n * p.out_col] = narrow<T>(sum);
  });
}

template <class T, class Math>
int launch(const GroupedGemm& p, Stream stream) {
  const std::int64_t tiles_n = (p.n + kTile - 1) / kTile, tiles_m = (p.m + kTile - 1) / kTile;
  // Every group, and the rows behind the last one, may end in a tile that is not full.
  const std::int64_t tiles = tiles_n * (p.along_k ? tiles_m * p.groups : tiles_m + p.groups);
  if (tiles > 0x7fffffff) return kNoKernel;
  grouped<T, Math><<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(p, tiles_m, tiles_n);
  return cudaGetLastError();
}

}  // namespace

int gemm_grouped(const GroupedGemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0 || (p.along_k && p.groups == 0)) return 0;
  if (has_grouped_sm90(p)) return grouped_sm90(p, stream);
  switch (p.dtype) {
    case DType::kFloat16:
      return launch<__half, HalfMma<__half>>(p, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16, HalfMma<__nv_bfloat16>>(p, stream);
    case DType::kFloat32:
      return p.allow_tf32 ? launch<float, Tf32Mma>(p, stream) : launch<float, Float32Fma>(p, stream);
    default:
      return kNoKernel;
  }
}

}  // namespace untorch::kernels::cuda
