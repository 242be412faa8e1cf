// FlashAttention-2 forward for float16 and bfloat16: mma.sync m16n8k16, ldmatrix, cp.async (sm_80 and newer).
//
//   CTA: 64 or 128 query rows; a warp has 16 or 32 of them, S and O in registers as mma accumulators, the online
//   softmax's maximum and sum per row. P, rounded to the half type, is the A operand of P·V as it lies.
//   Q, one tile of K and one of V in shared memory: 16-byte chunks, XOR-swizzled within a row (no ldmatrix conflicts)
//   cp.async brings V while S = Q·Kᵀ runs, and the next K during softmax and P·V. Several CTAs per SM hide the rest.
//   Head sizes between those of the templates are padded with zeros, in shared memory only.
//
// Roofline: 4 * queries * keys * width operations per head (half of it when causal) on tensor cores, and
// 2 * (2 * queries + 2 * keys) * width bytes: compute-bound from a few hundred queries on. One query is bound by
// memory: split-KV (split_kv.cu). Measured on H200 in bfloat16 (benchmarks/gpu_attention.py): 343 of 989 TFLOP/s (35 %;
// mma.sync cannot reach WGMMA's peak) at 4 x 4096, D 128; decode 3817 of 4800 GB/s (80 %) at 16 x 4096 keys.
#pragma once

#include "kernels/cuda/attention/flash_tile.cuh"
#include "kernels/cuda/common/half_pair.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <class T>
__device__ __forceinline__ float2 unpack_halves(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

// A tile [rows][D] in shared memory, in 16-byte chunks.
template <int D>
struct TileLayout {
  static_assert(D % 64 == 0 || D == 96);
  static constexpr int kChunks = D / 8, kPitch = D * 2;
  // A row is a multiple of 128 bytes: the low three bits of the row permute its chunks. 96 columns are one and a half
  // times that, so that the row's parity moves by half a line already and two bits do.
  static constexpr int kMask = D % 64 == 0 ? 7 : 3;
  static __device__ __forceinline__ int permutation(int row) { return D % 64 == 0 ? row & 7 : (row >> 1) & 3; }
  static __device__ __forceinline__ int at(int row, int chunk) {
    return row * kPitch + ((chunk ^ permutation(row)) << 4);
  }
  // From the address of chunk `low` (0 or 1) of a row to that of its chunk 2 * pair + low: one xor, and a constant
  // offset. The tile begins at a multiple of 128 bytes, so that the xor meets the chunk's bits alone.
  static __device__ __forceinline__ std::uint32_t pair_at(std::uint32_t address, int pair) {
    return (address ^ (((2 * pair) & kMask) << 4)) + (((2 * pair) & ~kMask) << 4);
  }
};

// Rows [first, first + Rows) of a head; those from `limit` on, and columns from `width` on, become 0.
template <class T, int D, int Rows, int kThreads>
__device__ __forceinline__ void load_tile(std::uint32_t to, const T* from, std::int64_t stride, int first, int limit,
                                          int width) {
  using Layout = TileLayout<D>;
  constexpr int kChunks = Layout::kChunks, kSteps = Rows * kChunks / kThreads;
  static_assert(Rows * kChunks % kThreads == 0);
  if constexpr (kThreads % kChunks == 0) {  // a thread stays in its column
    constexpr int kRowsAtOnce = kThreads / kChunks;
    const int r0 = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int bytes = min(16, max(0, (width - chunk * 8) * 2));
    const T* at = from + (static_cast<std::int64_t>(first) + r0) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int r = r0 + i * kRowsAtOnce;
      const int live = r < limit - first ? bytes : 0;
      cp_async_16(to + Layout::at(r, chunk), at, live);  // with 0 bytes the address is not read
      at += kRowsAtOnce * stride;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int linear = static_cast<int>(threadIdx.x) + i * kThreads;
      const int r = linear / kChunks, chunk = linear % kChunks;
      const int live = r < limit - first ? min(16, max(0, (width - chunk * 8) * 2)) : 0;
      const T* at = from + (static_cast<std::int64_t>(first) + r) * stride + chunk * 8;
      cp_async_16(to + Layout::at(r, chunk), at, live);
    }
  }
}

template <class T, int D, int kRows, int kKeys, int kWarps, bool kBias>
__global__ void __launch_bounds__(kWarps * 32)
    flash_attention_mma(const __grid_constant__ Attention p, const __grid_constant__ AttentionPlan plan) {
  using Layout = TileLayout<D>;
  constexpr int kThreads = kWarps * 32, kBands = kRows / (16 * kWarps), kKeyTiles = kKeys / 8, kColumnTiles = D / 8;
  extern __shared__ __align__(128) unsigned char memory[];
  const std::uint32_t sq = shared_address(memory);
  const std::uint32_t sk = sq + kRows * Layout::kPitch, sv = sk + kKeys * Layout::kPitch;

  clear_random_state(p);
  __shared__ AttentionCta cta;
  if (threadIdx.x == 0) cta.locate(p, plan, kRows, kKeys);
  __syncthreads();
  const int pack = plan.pack;
  cta.pad_lse(p, pack, kRows, kThreads);
  if (cta.row >= cta.rows) return;
  // Where each row's bias begins; -1: none. The barriers of the loop come before the first reader.
  __shared__ std::int64_t bias_at[kBias ? kRows : 1];
  if constexpr (kBias) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows; i += kThreads) {
      const bool live = p.bias != nullptr && cta.row + i < cta.rows;
      bias_at[i] = live ? cta.bias_offset(p, cta.row + i, pack) : -1;
    }
  }

  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int group = lane >> 2, pair = lane & 3;  // accumulators: rows group and group + 8, columns 2 * pair and + 1
  const int warp_row = warp * (16 * kBands);     // in the CTA's tile
  // Asked anew each time: a register kept across both GEMMs would be spilled.
  const auto active = [&] { return cta.row + warp_row < cta.rows; };

  float out[kBands][kColumnTiles][4] = {};
  float maximum[kBands][2], sum[kBands][2];
#pragma unroll
  for (int i = 0; i < kBands; ++i) {
    maximum[i][0] = maximum[i][1] = minus_infinity();
    sum[i][0] = sum[i][1] = 0;
  }
  const float scale_log2 = p.scale * kLog2e;

  const int tile_begin = cta.tile_begin, tile_end = cta.tile_end;
  if (tile_begin < tile_end) {
    const auto* query = static_cast<const T*>(p.query.data);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < kRows * Layout::kChunks; i += kThreads) {
      const int r = i / Layout::kChunks, chunk = i % Layout::kChunks;
      const int live = cta.row + r < cta.rows ? min(16, max(0, (p.width - chunk * 8) * 2)) : 0;
      const T* at = live > 0 ? query + cta.offset(p.query, cta.row + r, pack) + chunk * 8 : query;
      cp_async_16(sq + Layout::at(r, chunk), at, live);
    }
    load_tile<T, D, kKeys, kThreads>(sk, static_cast<const T*>(p.key.data) + cta.key_at, p.key.row,
                                     (tile_end - 1) * kKeys, cta.keys, p.width);
    cp_async_commit();
  }

  // ldmatrix: the address that each lane gives. Every 16 rows the permutation repeats.
  const std::uint32_t a_base = sq + Layout::at(warp_row + (lane & 15), lane >> 4);
  const std::uint32_t b_base = sk + Layout::at((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  const std::uint32_t v_base = sv + Layout::at(lane & 15, lane >> 4);

  for (int tile = tile_end - 1; tile >= cta.tile_begin; --tile) {
    cp_async_wait_all();
    __syncthreads();  // these keys are here, and nobody reads the values of the last tile any more
    load_tile<T, D, kKeys, kThreads>(sv, static_cast<const T*>(p.value.data) + cta.value_at, p.value.row, tile * kKeys,
                                     cta.keys, p.value_width);
    cp_async_commit();

    float score[kBands][kKeyTiles][4] = {};
    if (active()) {
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        std::uint32_t a[kBands][4];
#pragma unroll
        for (int i = 0; i < kBands; ++i) ldmatrix_x4(a[i], Layout::pair_at(a_base, k) + i * 16 * Layout::kPitch);
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          std::uint32_t b[4];
          ldmatrix_x4(b, Layout::pair_at(b_base, k) + n * 16 * Layout::kPitch);
#pragma unroll
          for (int i = 0; i < kBands; ++i) {
            multiply<T>(score[i][2 * n], a[i], b[0], b[1]);
            multiply<T>(score[i][2 * n + 1], a[i], b[2], b[3]);
          }
        }
      }
    }

    cp_async_wait_all();
    __syncthreads();  // the values are here, and nobody reads these keys any more
    if (tile > cta.tile_begin) {
      load_tile<T, D, kKeys, kThreads>(sk, static_cast<const T*>(p.key.data) + cta.key_at, p.key.row,
                                       (tile - 1) * kKeys, cta.keys, p.width);
      cp_async_commit();
    }
    if (!active()) continue;

    if constexpr (kBias) {
#pragma unroll
      for (int i = 0; i < kBands; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::int64_t row_at = bias_at[warp_row + i * 16 + half * 8 + group];
          const bool live = row_at >= 0;
          const T* bias = static_cast<const T*>(p.bias) + (live ? row_at : 0);
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            float(&s)[4] = score[i][n];
            const int at = tile * kKeys + n * 8 + 2 * pair;
            float2 add = make_float2(0, 0);
            if (live && plan.bias_pairs && at + 1 < cta.keys) {
              add = unpack_halves<T>(*reinterpret_cast<const std::uint32_t*>(bias + at));
            } else if (live) {
              if (at < cta.keys) add.x = widen<T>(bias[at * p.bias_key]);
              if (at + 1 < cta.keys) add.y = widen<T>(bias[(at + 1) * p.bias_key]);
            }
            s[2 * half] = fmaf(s[2 * half], scale_log2, add.x * kLog2e);
            s[2 * half + 1] = fmaf(s[2 * half + 1], scale_log2, add.y * kLog2e);
          }
        }
      }
    }

    if (tile < cta.full_begin || tile >= cta.full_end) {
#pragma unroll
      for (int i = 0; i < kBands; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int low, high;
          cta.visible(p, pack, cta.row + warp_row + i * 16 + half * 8 + group, low, high);
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int at = tile * kKeys + n * 8 + 2 * pair + j;
              if (at < low || at > high) score[i][n][2 * half + j] = minus_infinity();
            }
          }
        }
      }
    }

    // Without a bias the maximum is that of the bare scores (the scale is positive), and the scale goes into the
    // exponential's multiply-add.
#pragma unroll
    for (int i = 0; i < kBands; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = maximum[i][half];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          top = fmaxf(top, fmaxf(score[i][n][2 * half], score[i][n][2 * half + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float base = top == minus_infinity() ? 0.0f : top;  // nothing seen yet: all exponentials are 0
        float fade, part = 0;
        if constexpr (kBias) {
          fade = exp2_fast(maximum[i][half] - base);
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j) part += score[i][n][j] = exp2_fast(score[i][n][j] - base);
          }
        } else {
          const float offset = base * scale_log2;
          fade = exp2_fast(fmaf(maximum[i][half], scale_log2, -offset));
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j) {
              part += score[i][n][j] = exp2_fast(fmaf(score[i][n][j], scale_log2, -offset));
            }
          }
        }
        maximum[i][half] = top;
        sum[i][half] = fmaf(sum[i][half], fade, part);
#pragma unroll
        for (int d = 0; d < kColumnTiles; ++d) {
          out[i][d][2 * half] *= fade;
          out[i][d][2 * half + 1] *= fade;
        }
      }
    }

#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      std::uint32_t a[kBands][4];
#pragma unroll
      for (int i = 0; i < kBands; ++i) {
        a[i][0] = pack_halves<T>(score[i][2 * k][0], score[i][2 * k][1]);
        a[i][1] = pack_halves<T>(score[i][2 * k][2], score[i][2 * k][3]);
        a[i][2] = pack_halves<T>(score[i][2 * k + 1][0], score[i][2 * k + 1][1]);
        a[i][3] = pack_halves<T>(score[i][2 * k + 1][2], score[i][2 * k + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
        std::uint32_t b[4];
        ldmatrix_x4_trans(b, Layout::pair_at(v_base, d) + k * 16 * Layout::kPitch);
#pragma unroll
        for (int i = 0; i < kBands; ++i) {
          multiply<T>(out[i][2 * d], a[i], b[0], b[1]);
          multiply<T>(out[i][2 * d + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  if (!active()) return;

#pragma unroll
  for (int i = 0; i < kBands; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[i][half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const float inverse = total == 0 ? 0.0f : 1.0f / total;  // 0: the row sees no key
      const int in_tile = warp_row + i * 16 + half * 8 + group, r = cta.row + in_tile;
      if (pair == 0 && r < cta.rows) {
        const float lse = maximum[i][half] * (kBias ? kLn2 : p.scale) + logf(total);
        cta.store_lse(p, plan, r, total == 0 ? (plan.splits > 1 ? minus_infinity() : p.empty_lse) : lse);
      }
      if (plan.splits > 1) {
        if (r < cta.rows) {
          float* to = plan.partial_out + cta.partial(p, r, pack) * p.value_width;
#pragma unroll
          for (int d = 0; d < kColumnTiles; ++d) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int column = d * 8 + 2 * pair + j;
              if (column < p.value_width) to[column] = out[i][d][2 * half + j] * inverse;
            }
          }
        }
      } else {
        // Through the warp's own query rows, which nobody else reads, into rows of 16-byte chunks.
#pragma unroll
        for (int d = 0; d < kColumnTiles; ++d) {
          *reinterpret_cast<std::uint32_t*>(memory + Layout::at(in_tile, d) + pair * 4) =
              pack_halves<T>(out[i][d][2 * half] * inverse, out[i][d][2 * half + 1] * inverse);
        }
      }
    }
  }
  if (plan.splits > 1) return;
  __syncwarp();
  auto* result = static_cast<T*>(p.out.data);
  for (int i = lane; i < 16 * kBands * Layout::kChunks; i += 32) {
    const int in_tile = warp_row + i / Layout::kChunks, chunk = i % Layout::kChunks, r = cta.row + in_tile;
    if (r >= cta.rows || chunk * 8 >= p.value_width) continue;
    const unsigned char* from = memory + Layout::at(in_tile, chunk);
    T* to = result + cta.offset(p.out, r, pack) + chunk * 8;
    if (plan.vector_out) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      const int count = min(8, p.value_width - chunk * 8);
      for (int j = 0; j < count; ++j) to[j] = reinterpret_cast<const T*>(from)[j];
    }
  }
}

template <class T, int D, int kRows, int kKeys, int kWarps, bool kBias>
int launch_attention_mma(const Attention& p, const AttentionPlan& plan, Stream stream) {
  constexpr int kBytes = (kRows + 2 * kKeys) * D * 2;
  const auto kernel = flash_attention_mma<T, D, kRows, kKeys, kWarps, kBias>;
  if constexpr (kBytes + sizeof(AttentionCta) + kRows * sizeof(std::int64_t) > 48 * 1024) {
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (code != cudaSuccess) return code;
  }
  const auto ctas = static_cast<unsigned>(p.batch) * static_cast<unsigned>(p.heads / plan.pack) *
                    static_cast<unsigned>(plan.row_blocks) * static_cast<unsigned>(plan.splits);
  kernel<<<ctas, kWarps * 32, kBytes, stream>>>(p, plan);
  return cudaGetLastError();
}

// Tiles of 64 query rows for short problems, of 128 otherwise; split_kv.cu's plan knows these sizes.
template <class T>
int launch_attention(const Attention& p, const AttentionPlan& plan, Stream stream) {
  const int width = p.width > p.value_width ? p.width : p.value_width;
  if (plan.narrow) {
    if (width <= 64) return launch_attention_mma<T, 64, 64, 64, 4, false>(p, plan, stream);
    if (width <= 128) return launch_attention_mma<T, 128, 64, 64, 4, false>(p, plan, stream);
    return launch_attention_mma<T, 256, 64, 64, 4, false>(p, plan, stream);
  }
  if (width <= 64) return launch_attention_mma<T, 64, 128, 64, 4, false>(p, plan, stream);
  if (width <= 96) return launch_attention_mma<T, 96, 128, 64, 4, false>(p, plan, stream);
  if (width <= 128) return launch_attention_mma<T, 128, 128, 64, 4, false>(p, plan, stream);
  if (width <= 192) return launch_attention_mma<T, 192, 128, 64, 8, false>(p, plan, stream);
  return launch_attention_mma<T, 256, 128, 64, 8, false>(p, plan, stream);
}
template <class T>
int launch_attention_bias(const Attention& p, const AttentionPlan& plan, Stream stream) {
  const int width = p.width > p.value_width ? p.width : p.value_width;
  if (plan.narrow) {
    if (width <= 64) return launch_attention_mma<T, 64, 64, 64, 4, true>(p, plan, stream);
    if (width <= 128) return launch_attention_mma<T, 128, 64, 64, 4, true>(p, plan, stream);
    return launch_attention_mma<T, 256, 64, 64, 4, true>(p, plan, stream);
  }
  if (width <= 64) return launch_attention_mma<T, 64, 128, 64, 4, true>(p, plan, stream);
  if (width <= 128) return launch_attention_mma<T, 128, 128, 64, 4, true>(p, plan, stream);
  return launch_attention_mma<T, 256, 128, 64, 8, true>(p, plan, stream);
}

}  // namespace
}  // namespace untorch::kernels::cuda
