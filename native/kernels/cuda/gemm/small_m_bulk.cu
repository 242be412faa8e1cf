// GEMV in float16 and bfloat16 (M up to 8) for large weights, sm_90 and newer: bulk copies into rings of shared memory.
//
//   CTA      one an SM; its part of the 8-column tiles of the result, kGroup tiles at a time
//   warp w   of K's chunks those numbered w, w + 8, …: all of its loads, and the mma.sync m16n8k16 on what arrived
//   stage    8 columns of b, a chunk of K each: one cp.async.bulk a column, an mbarrier a stage
//   a        a chunk's fragment in registers, for a group of tiles
//
// Some 150 KB an SM are on their way. Where b is a weight of the file, they are before the kernels that make a have
// ended (PDL): norms and attention take no time of the memory's.
//
// A column's stride in a stage is 64 bytes beside a multiple of 128: the 16-byte loads of eight lanes, two columns of
// four, touch all banks once.
//
// Roofline: memory; b is read once, a once a group of tiles from L2.
#include "kernels/cuda/gemm/bulk_ring.cuh"
#include "kernels/cuda/mma/mma_sync.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kStepK = 32, kMaxChunk = 256;

// Rows: 1, or 8 for M up to 8.
template <class T, int Rows>
__global__ void __launch_bounds__(kGemmThreads, 1) rows_bulk(SmallGemm p, BulkPlan plan) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSteps = kMaxChunk / kStepK;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ std::uint64_t mbarriers[kGemmWarps * kMaxStages];
  griddepcontrol_launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const T* const a = static_cast<const T*>(p.a);
  const T* const b = static_cast<const T*>(p.b);
  const int k = static_cast<int>(p.k);
  const std::int64_t all = (p.n + kTile - 1) / kTile;
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
    const int k0 = start_of(u), bytes = length_of(k0) * static_cast<int>(sizeof(T));
    const std::int64_t n = (first + u.group + u.tile) * kTile, left = p.n - n;
    const int columns = left < kTile ? static_cast<int>(left) : kTile;
    if (lane == 0) mbarrier_arrive_expect_tx(mbarrier + stage * 8, columns * bytes);
    __syncwarp();
    if (lane < columns && bytes > 0) {
      bulk_load(ring + stage * stage_bytes + lane * plan.column, b + (n + lane) * p.b_col + k0, bytes,
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
  const T* const row = a + (inside ? g : 0) * p.a_row;
  for (int group = 0; group < tiles; group += kGroup, buffer ^= 1) {
    const int count = tiles - group < kGroup ? tiles - group : kGroup;
    float acc[kGroup][2] = {};
    for (int round = 0; round < plan.rounds; ++round) {
      const int k0 = (round * kGemmWarps + warp) * plan.chunk, steps = length_of(k0) / kStepK;
      uint4 x[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        x[s] = inside && s < steps ? __ldg(reinterpret_cast<const uint4*>(row + k0 + s * kStepK + t * 8))
                                   : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i >= count) break;
        mbarrier_wait(mbarrier + stage * 8, parity);
        const std::uint32_t from = ring + stage * stage_bytes + g * plan.column + t * 16;
        float sums_of_steps[2][2][4] = {};  // four, so that no mma waits for the one before it
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if (s < steps) {
            const uint4 w = load_shared_16(from + s * (kStepK * 2));
            mma<T>(sums_of_steps[s % 2][0], x[s].x, 0u, x[s].y, 0u, w.x, w.y);
            mma<T>(sums_of_steps[s % 2][1], x[s].z, 0u, x[s].w, 0u, w.z, w.w);
          }
        }
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          acc[i][v] +=
              (sums_of_steps[0][0][v] + sums_of_steps[0][1][v]) + (sums_of_steps[1][0][v] + sums_of_steps[1][1][v]);
        }
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
      if (m < p.m && n < p.n) write<T>(p, m, n, 0, sum);
    }
  }
#endif
}

template <class T, int Rows>
int launch_bulk(const SmallGemm& p, BulkPlan plan, Stream stream) {
  const Launch how = bulk_launch<Rows>(plan, p.n, p.num_sms, p.max_shared_bytes, p.pdl);
  return launch_kernel(rows_bulk<T, Rows>, how, stream, p, plan);
}

template <class T>
int bulk_of_dtype(const SmallGemm& p, const BulkPlan& plan, Stream stream) {
  return p.m == 1 ? launch_bulk<T, 1>(p, plan, stream) : launch_bulk<T, 8>(p, plan, stream);
}

}  // namespace

int gemm_rows_bulk(const SmallGemm& p, Stream stream) {
  const BulkPlan plan = bulk_plan(static_cast<int>(p.k), 2, kStepK, kMaxChunk, p.pdl && p.b_is_constant);
  return p.dtype == DType::kFloat16 ? bulk_of_dtype<__half>(p, plan, stream)
                                    : bulk_of_dtype<__nv_bfloat16>(p, plan, stream);
}

}  // namespace untorch::kernels::cuda
