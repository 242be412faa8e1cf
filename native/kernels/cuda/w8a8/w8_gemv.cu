// W8A16 GEMV with 8-bit weights, M up to 8.
//
// sm_90 and newer: rings of shared memory (bulk_ring.cuh), as small_m_bulk.cu, and mma.sync m16n8k32 of 8-bit operands
// on the weights as they lie. A row of x is two rows of 8 bits, `high` and `low` (split_x.cu): 16 rows for M up to 8.
//
//   CTA      one an SM; its part of the 8-column tiles of the result, kGroup tiles at a time
//   warp w   of K's chunks those numbered w, w + 8, …; 64 of K a step: lane (g, t) has 16 weights of column g, from 16
//   t x        a chunk of both rows in registers, for a group of tiles
//
// Elsewhere, and for float32: x as it is, a warp a column, 16 weights a lane.
//
// Roofline: memory; the weight is read once.
#include "kernels/cuda/gemm/bulk_ring.cuh"
#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/w8a8/w8_values.cuh"
#include "kernels/cuda/w8a8/w8a8.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kStepK = 64, kMaxChunk = 512, kLaneK = 16;
constexpr int kBlock = static_cast<int>(kW8ScaleBlock);
static_assert(kBlock == 2 * kStepK);

template <class T>
__device__ __forceinline__ void write_output(const W8Gemm& p, std::int64_t m, std::int64_t n, float sum) {
  if (p.scales_row == 0) sum *= p.scales[n];
  if (p.bias != nullptr) sum += widen(static_cast<const T*>(p.bias)[n]);
  static_cast<T*>(p.out)[m * p.n + n] = narrow<T>(sum);
}

// The sum of high and low products of a row.
__device__ __forceinline__ float joined(float high, float low) { return high + low * (1.0f / kLowFactorFp8); }
__device__ __forceinline__ float joined(int high, int low) {
  return static_cast<float>(high) * kHighFactorInt8 + static_cast<float>(low);
}

template <class W>
using SumOf = std::conditional_t<std::is_same_v<W, E4m3Weight>, float, int>;

// Rows: 1, or 8 for M up to 8.
template <class T, class W, int Rows, bool HasBlocks>
__global__ void __launch_bounds__(kGemmThreads, 1) w8_rows_bulk(W8Gemm p, SplitRows x, BulkPlan plan) {
#if __CUDA_ARCH__ >= 900
  using Sum = SumOf<W>;
  constexpr int kSteps = kMaxChunk / kStepK;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ std::uint64_t mbarriers[kGemmWarps * kMaxStages];
  griddepcontrol_launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const auto* const b = static_cast<const std::uint8_t*>(p.weight);
  const int k = static_cast<int>(p.k);
  const std::int64_t all = p.n / kTile;
  const std::int64_t first = all * blockIdx.x / gridDim.x;
  const int tiles = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x - first);

  float* const sums = reinterpret_cast<float*>(memory);
  const int stage_bytes = kTile * plan.column;
  const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(memory));
  const std::uint32_t ring = shared + kSumsBytes<Rows> + warp * plan.stages * stage_bytes;
  const auto mbarrier = static_cast<std::uint32_t>(__cvta_generic_to_shared(mbarriers + warp * kMaxStages));
  if (lane < plan.stages) mbarrier_init(mbarrier + lane * 8, 1);
  fence_mbarrier_init();
  __syncwarp();

  const auto start_of = [&](const BulkUnit& u) { return (u.round * kGemmWarps + warp) * plan.chunk; };
  const auto length_of = [&](int k0) {
    const int left = k - k0;
    return left < plan.chunk ? (left > 0 ? left : 0) : plan.chunk;
  };
  const auto load = [&](const BulkUnit& u, int stage) {
    const int k0 = start_of(u), bytes = length_of(k0);
    const std::int64_t n = (first + u.group + u.tile) * kTile;
    if (lane == 0) mbarrier_arrive_expect_tx(mbarrier + stage * 8, kTile * bytes);
    __syncwarp();
    if (lane < kTile && bytes > 0) {
      bulk_load(ring + stage * stage_bytes + lane * plan.column, b + (n + lane) * p.k + k0, bytes,
                mbarrier + stage * 8);
    }
  };

  if (!plan.early) griddepcontrol_wait();
  BulkUnit loaded;
  for (int stage = 0; stage < plan.stages && loaded.group < tiles; ++stage) {
    load(loaded, stage);
    loaded.advance(tiles, plan.rounds);
  }
  if (plan.early) griddepcontrol_wait();

  int stage = 0, parity = 0, buffer = 0;
  const bool inside = g < p.m;
  const std::uint8_t* const high = x.high + (inside ? g : 0) * p.k;
  const std::uint8_t* const low = x.low + (inside ? g : 0) * p.k;
  for (int group = 0; group < tiles; group += kGroup, buffer ^= 1) {
    const int count = tiles - group < kGroup ? tiles - group : kGroup;
    float acc[kGroup][2] = {};
    for (int round = 0; round < plan.rounds; ++round) {
      const int k0 = (round * kGemmWarps + warp) * plan.chunk, length = length_of(k0);
      uint4 h[kSteps], l[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int at = s * kStepK + t * kLaneK;
        const bool valid = inside && at < length;
        h[s] = valid ? __ldg(reinterpret_cast<const uint4*>(high + k0 + at)) : uint4{0, 0, 0, 0};
        l[s] = valid ? __ldg(reinterpret_cast<const uint4*>(low + k0 + at)) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i >= count) break;
        mbarrier_wait(mbarrier + stage * 8, parity);
        const std::uint32_t from = ring + stage * stage_bytes + g * plan.column + t * kLaneK;
        const float* const scales =
            HasBlocks ? p.scales + (first + group + i) * kTile / kBlock * p.scales_row + k0 / kBlock : nullptr;
        Sum of_steps[4][4] = {};  // four, so that no mma waits for the one before it
        const auto take = [&](int from_sum, int to_sum, float factor) {
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            Sum highs = of_steps[from_sum][v], lows = of_steps[from_sum][v + 2];
            for (int j = from_sum + 1; j < to_sum; ++j) highs += of_steps[j][v], lows += of_steps[j][v + 2];
            acc[i][v] += joined(highs, lows) * factor;
          }
        };
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const int at = s * kStepK;
          if (at < length) {
            uint4 w = load_shared_16(from + at);
            // Behind K there is what the stage held before, which may be NaN.
            if (at + t * kLaneK >= length) w = uint4{0, 0, 0, 0};
            const int j = s % 2 * 2;
            mma_8bit<W>(of_steps[j], h[s].x, l[s].x, h[s].y, l[s].y, w.x, w.y);
            mma_8bit<W>(of_steps[j + 1], h[s].z, l[s].z, h[s].w, l[s].w, w.z, w.w);
            if constexpr (HasBlocks) {
              if (s % 2 == 1 || at + kStepK >= length) {
                take(0, 4, __ldg(scales + at / kBlock));
#pragma unroll
                for (int r = 0; r < 4; ++r) of_steps[r][0] = of_steps[r][1] = of_steps[r][2] = of_steps[r][3] = 0;
              }
            }
          }
        }
        if constexpr (!HasBlocks) take(0, 4, 1.0f);
        __syncwarp();  // all lanes have read the stage
        if (loaded.group < tiles) {
          load(loaded, stage);
          loaded.advance(tiles, plan.rounds);
        }
        if (++stage == plan.stages) stage = 0, parity ^= 1;
      }
    }
    float* const own = sums + (buffer * kGroup * kGemmWarps + warp) * (Rows * kTile);
    if (g < Rows) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        float* const to = own + i * kGemmWarps * Rows * kTile + g * kTile + t * 2;
        to[0] = acc[i][0], to[1] = acc[i][1];
      }
    }
    __syncthreads();
    const int at = static_cast<int>(threadIdx.x);
    if (at < count * Rows * kTile) {
      const int tile = at / (Rows * kTile), element = at % (Rows * kTile);
      const float* const from = sums + (buffer * kGroup + tile) * kGemmWarps * Rows * kTile + element;
      float sum = from[0];
#pragma unroll
      for (int w = 1; w < kGemmWarps; ++w) sum += from[w * Rows * kTile];
      const std::int64_t m = element / kTile, n = (first + group + tile) * kTile + element % kTile;
      if (m < p.m) write_output<T>(p, m, n, sum * x.scales[m]);
    }
  }
#endif
}

// A warp a column.
template <class T, class W, int Rows, bool HasBlocks>
__global__ void __launch_bounds__(kGemmThreads) w8_rows(W8Gemm p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t n = std::int64_t{blockIdx.x} * kGemmWarps + threadIdx.x / 32;
  if (n >= p.n) return;  // the whole warp agrees
  const auto* const column = static_cast<const std::uint8_t*>(p.weight) + n * p.k;
  const T* const x = static_cast<const T*>(p.x);
  float acc[Rows] = {};
  for (std::int64_t k = lane * kLaneK; k < p.x_width; k += 32 * kLaneK) {
    const uint4 w = load_once(column + k);
    const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
    const float scale = HasBlocks ? p.scales[n / kBlock * p.scales_row + k / kBlock] : 1.0f;
    const int count = p.x_width - k < kLaneK ? static_cast<int>(p.x_width - k) : kLaneK;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (r >= p.m) break;
      const T* const from = x + r * p.x_stride + k;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kLaneK; ++j) {
        if (j < count) sum += widen(from[j]) * weight_value<W>(words[j / 4] >> 8 * (j % 4) & 0xffu);
      }
      acc[r] += sum * scale;
    }
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) acc[r] += __shfl_xor_sync(0xffffffffu, acc[r], offset);
    if (lane == 0 && r < p.m) write_output<T>(p, r, n, acc[r]);
  }
}

template <class T, class W, int Rows, bool HasBlocks>
int launch(const W8Gemm& p, const SplitRows& x, Stream stream) {
  if constexpr (is_half_type<T>) {
    if (x.high != nullptr) {
      BulkPlan plan =
          bulk_plan(static_cast<int>(p.k), 1, HasBlocks ? kBlock : kStepK, kMaxChunk, p.pdl && p.is_constant);
      const Launch how = bulk_launch<Rows>(plan, p.n, p.num_sms, p.max_shared_bytes, p.pdl);
      return launch_kernel(w8_rows_bulk<T, W, Rows, HasBlocks>, how, stream, p, x, plan);
    }
  }
  Launch how;
  how.blocks = dim3(static_cast<unsigned>((p.n + kGemmWarps - 1) / kGemmWarps));
  how.threads = kGemmThreads;
  how.pdl = p.pdl;
  return launch_kernel(w8_rows<T, W, Rows, HasBlocks>, how, stream, p);
}

template <class T, class W, int Rows>
int by_scales(const W8Gemm& p, const SplitRows& x, Stream stream) {
  if constexpr (std::is_same_v<W, E4m3Weight>) {
    if (p.scales_row != 0) return launch<T, W, Rows, true>(p, x, stream);
  }
  return launch<T, W, Rows, false>(p, x, stream);
}

}  // namespace

bool w8_gemv_splits(const W8Gemm& p) { return p.has_clusters && element_size(p.dtype) == 2; }

int w8_gemv(const W8Gemm& p, const SplitRows& x, Stream stream) {
  if (p.m > kW8GemvMaxM || p.n > 0x7fffffff || p.k > kW8GemvMaxK) return kNoKernel;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      return kNoKernel;
    } else {
      return dispatch_weight(p.weight_dtype, [&](auto weight) -> int {
        using W = decltype(weight);
        return p.m == 1 ? by_scales<T, W, 1>(p, x, stream) : by_scales<T, W, 8>(p, x, stream);
      });
    }
  });
}

}  // namespace untorch::kernels::cuda
