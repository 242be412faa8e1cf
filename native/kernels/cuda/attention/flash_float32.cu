// FlashAttention in float32, in full precision: FFMA, cp.async, no tensor cores (TF32 keeps ten bits of the mantissa).
//
//   CTA: 64 queries x 64 keys (wide heads: 32 and 16), 256 threads; a half-warp has four query rows, each of its lanes
//   every sixteenth key of the scores and every sixteenth group of four columns of the result
//   Q, K, V in shared memory, rows padded by four floats: 16 bytes of eight neighbouring rows lie in different banks;
//   the probabilities pass through shared memory within the half-warp. cp.async runs ahead as in flash_mma_sm80.cuh.
//
// Roofline: 4 * queries * keys * width operations per head on the FMA units; reading shared memory takes three quarters
// of their time. One query is bound by memory: split-KV, and warps without a row compute nothing. Share: not measured.
#include "kernels/cuda/attention/flash_tile.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kRows = 64;

__device__ __forceinline__ void cp_async_16(float* to, const float* from, int bytes) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// Rows from `limit` on and columns from `width` on become 0.
template <int D, int Rows>
__device__ __forceinline__ void load_tile(float* to, const float* from, std::int64_t stride, int first, int limit,
                                          int width) {
  constexpr int kChunks = D / 4, kRowsAtOnce = kThreads / kChunks;
  static_assert(Rows % kRowsAtOnce == 0);
  const int r0 = static_cast<int>(threadIdx.x) / kChunks, column = static_cast<int>(threadIdx.x) % kChunks * 4;
  const int bytes = min(16, max(0, (width - column) * 4));
  const float* at = from + (static_cast<std::int64_t>(first) + r0) * stride + column;
#pragma unroll 4
  for (int r = r0; r < Rows; r += kRowsAtOnce) {
    cp_async_16(to + r * (D + 4) + column, at, r < limit - first ? bytes : 0);  // with 0 bytes nothing is read
    at += kRowsAtOnce * stride;
  }
}

__device__ __forceinline__ float maximum_of_half_warp(float x) {
#pragma unroll
  for (int step = 1; step < 16; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

template <int D, int kKeys>
__global__ void __launch_bounds__(kThreads)
    attention_fma(const __grid_constant__ Attention p, const __grid_constant__ AttentionPlan plan) {
  constexpr int kPitch = D + 4, kScorePitch = kKeys + 4, kKeysEach = kKeys / 16, kFours = D / 64;
  extern __shared__ __align__(128) float memory[];
  float *sq = memory, *sk = sq + kRows * kPitch, *sv = sk + kKeys * kPitch, *sp = sv + kKeys * kPitch;

  clear_random_state(p);
  __shared__ AttentionCta cta;
  if (threadIdx.x == 0) cta.locate(p, plan, kRows, kKeys);
  __syncthreads();
  const int pack = plan.pack;
  cta.pad_lse(p, pack, kRows, kThreads);
  if (cta.row >= cta.rows) return;

  const int lane = static_cast<int>(threadIdx.x) & 15, first_row = static_cast<int>(threadIdx.x) / 16 * 4;
  // By warp, so that no warp parts before its shuffles: rows 8 * warp …
  const bool active = cta.row + static_cast<int>(threadIdx.x) / 32 * 8 < cta.rows;
  const auto* key = static_cast<const float*>(p.key.data) + cta.key_at;
  const auto* value = static_cast<const float*>(p.value.data) + cta.value_at;
  const int tile_begin = cta.tile_begin, tile_end = cta.tile_end;

  float out[4][kFours][4] = {};
  float maximum[4], sum[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) maximum[i] = minus_infinity();
  const float scale_log2 = p.scale * kLog2e;

  if (tile_begin < tile_end) {
    const auto* query = static_cast<const float*>(p.query.data);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * (D / 4); i += kThreads) {
      const int r = i / (D / 4), column = i % (D / 4) * 4;
      const int live = cta.row + r < cta.rows ? min(16, max(0, (p.width - column) * 4)) : 0;
      const float* at = live > 0 ? query + cta.offset(p.query, cta.row + r, pack) + column : query;
      cp_async_16(sq + r * kPitch + column, at, live);
    }
    load_tile<D, kKeys>(sk, key, p.key.row, (tile_end - 1) * kKeys, cta.keys, p.width);
    cp_async_commit();
  }

  for (int tile = tile_end - 1; tile >= tile_begin; --tile) {
    cp_async_wait_all();
    __syncthreads();  // these keys are here, and nobody reads the values of the last tile any more
    load_tile<D, kKeys>(sv, value, p.value.row, tile * kKeys, cta.keys, p.value_width);
    cp_async_commit();

    float score[4][kKeysEach] = {};
    if (active) {
#pragma unroll 2
      for (int d = 0; d < D; d += 4) {
        float4 q[4], k[kKeysEach];
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = *reinterpret_cast<const float4*>(sq + (first_row + i) * kPitch + d);
#pragma unroll
        for (int n = 0; n < kKeysEach; ++n) k[n] = *reinterpret_cast<const float4*>(sk + (lane + 16 * n) * kPitch + d);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int n = 0; n < kKeysEach; ++n) {
            score[i][n] = fmaf(q[i].x, k[n].x, score[i][n]);
            score[i][n] = fmaf(q[i].y, k[n].y, score[i][n]);
            score[i][n] = fmaf(q[i].z, k[n].z, score[i][n]);
            score[i][n] = fmaf(q[i].w, k[n].w, score[i][n]);
          }
        }
      }
    }

    cp_async_wait_all();
    __syncthreads();  // the values are here, and nobody reads these keys any more
    if (tile > tile_begin) {
      load_tile<D, kKeys>(sk, key, p.key.row, (tile - 1) * kKeys, cta.keys, p.width);
      cp_async_commit();
    }
    if (!active) continue;

    const bool masked = tile < cta.full_begin || tile >= cta.full_end;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = cta.row + first_row + i;
      const bool biased = p.bias != nullptr && r < cta.rows;
      const float* bias = static_cast<const float*>(p.bias) + (biased ? cta.bias_offset(p, r, pack) : 0);
      int low = 0, high = 0;
      if (masked) cta.visible(p, pack, r, low, high);
      float top = maximum[i];
#pragma unroll
      for (int n = 0; n < kKeysEach; ++n) {
        const int at = tile * kKeys + lane + 16 * n;
        const float add = biased && at < cta.keys ? bias[at * p.bias_key] : 0.0f;
        score[i][n] = fmaf(score[i][n], scale_log2, add * kLog2e);
        if (masked && (at < low || at > high)) score[i][n] = minus_infinity();
        top = fmaxf(top, score[i][n]);
      }
      top = maximum_of_half_warp(top);
      const float base = top == minus_infinity() ? 0.0f : top;  // nothing seen yet: all exponentials are 0
      const float fade = exp2_fast(maximum[i] - base);
      float part = 0;
#pragma unroll
      for (int n = 0; n < kKeysEach; ++n) {
        const float e = exp2_fast(score[i][n] - base);
        part += e;
        sp[(first_row + i) * kScorePitch + lane + 16 * n] = e;
      }
      maximum[i] = top;
      sum[i] = fmaf(sum[i], fade, part);
#pragma unroll
      for (int c = 0; c < kFours; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][c][j] *= fade;
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int n = 0; n < kKeys; n += 4) {
      float4 e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) e[i] = *reinterpret_cast<const float4*>(sp + (first_row + i) * kScorePitch + n);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int c = 0; c < kFours; ++c) {
          const float4 v = *reinterpret_cast<const float4*>(sv + (n + m) * kPitch + c * 64 + lane * 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float w = m == 0 ? e[i].x : m == 1 ? e[i].y : m == 2 ? e[i].z : e[i].w;
            out[i][c][0] = fmaf(w, v.x, out[i][c][0]);
            out[i][c][1] = fmaf(w, v.y, out[i][c][1]);
            out[i][c][2] = fmaf(w, v.z, out[i][c][2]);
            out[i][c][3] = fmaf(w, v.w, out[i][c][3]);
          }
        }
      }
    }
  }
  if (!active) return;

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float total = sum[i];
#pragma unroll
    for (int step = 1; step < 16; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    const float inverse = total == 0 ? 0.0f : 1.0f / total;  // 0: the row sees no key
    const int r = cta.row + first_row + i;
    if (r >= cta.rows) continue;  // after the last shuffle of this row; the other half-warp may go on
    if (lane == 0) {
      const float empty = plan.splits > 1 ? minus_infinity() : p.empty_lse;
      cta.store_lse(p, plan, r, total == 0 ? empty : maximum[i] * kLn2 + logf(total));
    }
    float* to = plan.splits > 1 ? plan.partial_out + cta.partial(p, r, pack) * p.value_width
                                : static_cast<float*>(p.out.data) + cta.offset(p.out, r, pack);
#pragma unroll
    for (int c = 0; c < kFours; ++c) {
      const int column = c * 64 + lane * 4;
      const float4 four =
          make_float4(out[i][c][0] * inverse, out[i][c][1] * inverse, out[i][c][2] * inverse, out[i][c][3] * inverse);
      if (plan.vector_out && column + 4 <= p.value_width) {
        *reinterpret_cast<float4*>(to + column) = four;
      } else {
        if (column < p.value_width) to[column] = four.x;
        if (column + 1 < p.value_width) to[column + 1] = four.y;
        if (column + 2 < p.value_width) to[column + 2] = four.z;
        if (column + 3 < p.value_width) to[column + 3] = four.w;
      }
    }
  }
}

template <int D, int kKeys>
int launch(const Attention& p, const AttentionPlan& plan, Stream stream) {
  constexpr int kBytes = ((kRows + 2 * kKeys) * (D + 4) + kRows * (kKeys + 4)) * 4;
  const auto kernel = attention_fma<D, kKeys>;
  const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (code != cudaSuccess) return code;
  const auto ctas = static_cast<unsigned>(p.batch) * static_cast<unsigned>(p.heads / plan.pack) *
                    static_cast<unsigned>(plan.row_blocks) * static_cast<unsigned>(plan.splits);
  kernel<<<ctas, kThreads, kBytes, stream>>>(p, plan);
  return cudaGetLastError();
}

}  // namespace

int attention_float32(const Attention& problem, const AttentionPlan& plan, Stream stream) {
  const int width = problem.width > problem.value_width ? problem.width : problem.value_width;
  if (width <= 64) return launch<64, 64>(problem, plan, stream);
  if (width <= 128) return launch<128, 64>(problem, plan, stream);
  if (width <= 256) return launch<256, 32>(problem, plan, stream);
  return launch<512, 16>(problem, plan, stream);
}

}  // namespace untorch::kernels::cuda
