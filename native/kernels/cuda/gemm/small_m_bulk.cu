// GEMV in float16 and bfloat16 (M up to 8) for large weights, sm_90 and newer: bulk copies into rings of shared memory.
//
// bulk_ring.cuh has the skeleton: a CTA an SM, a ring a warp. Here a chunk of a is a fragment in registers, and what
// arrived goes into mma.sync m16n8k16.
//
// Roofline: memory; b is read once, a once a group of tiles from L2.
#include "kernels/cuda/gemm/bulk_ring.cuh"
#include "kernels/cuda/mma/mma_sync.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kStepK = 32, kMaxChunk = 256;

#if __CUDA_ARCH__ >= 900
template <class T>
struct HalfMath {
  static constexpr int kSteps = kMaxChunk / kStepK;
  const T* row;  // of this lane
  bool inside;
  int t;
  uint4 x[kSteps];

  __device__ __forceinline__ void load(int k0, int length) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      x[s] = inside && s * kStepK < length ? *reinterpret_cast<const uint4*>(row + k0 + s * kStepK + t * 8)
                                           : uint4{0, 0, 0, 0};
    }
  }
  __device__ __forceinline__ void multiply(std::uint32_t from, std::int64_t, int, int length, float (&acc)[2]) const {
    float sums[2][2][4] = {};  // four, so that no mma waits for the one before it
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s * kStepK < length) {
        const uint4 w = load_shared_16(from + t * 16 + s * (kStepK * 2));
        mma<T>(sums[s % 2][0], x[s].x, 0u, x[s].y, 0u, w.x, w.y);
        mma<T>(sums[s % 2][1], x[s].z, 0u, x[s].w, 0u, w.z, w.w);
      }
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) acc[v] += (sums[0][0][v] + sums[0][1][v]) + (sums[1][0][v] + sums[1][1][v]);
  }
};
#endif

// Rows: 1, or 8 for M up to 8.
template <class T, int Rows>
__global__ void __launch_bounds__(kGemmThreads, 1) rows_bulk(SmallGemm p, BulkPlan plan) {
#if __CUDA_ARCH__ >= 900
  griddepcontrol_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  HalfMath<T> math;
  math.inside = lane / 4 < p.m, math.t = lane % 4;
  math.row = static_cast<const T*>(p.a) + (math.inside ? lane / 4 : 0) * p.a_row;
  const BulkColumns columns{p.b, p.b_col * static_cast<std::int64_t>(sizeof(T)), p.n, static_cast<int>(p.k)};
  bulk_gemv<Rows, sizeof(T)>(columns, plan, math, [&](std::int64_t m, std::int64_t n, float sum) {
    if (m < p.m) write<T>(p, m, n, 0, sum);
  });
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
