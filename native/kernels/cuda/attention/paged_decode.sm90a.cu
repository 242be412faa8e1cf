// Decode attention over a paged KV cache on sm_90, in one launch: a token by the heads that share a KV head.
//
//   cluster   a token and a KV head. Its CTAs take tiles of keys in turn, and reduce their results over distributed
//             shared memory (DSMEM)
//   warp      tiles of 4 · 32 / lanes rows of K and V; a row is W / 8 lanes of 16 bytes, read once for all heads
//   lane      q and the accumulator of 8 columns for G heads in float32; the next K is loaded before this one is used
//
// Scores of a tile are summed over a row's lanes by a butterfly that halves them at each step, so that each lane ends
// with the scores of VPL pairs of a row and a head; P · V fetches them by shuffles.
//
// Roofline: memory-bound: keys and values are read once, 4 · W bytes a position, and a position takes about 12 (G = 4)
// or 22 (G = 8) of the 27 cycles in which an SM's share of the memory delivers it. Few positions take the latency of
// one chain of loads: lengths, page, keys.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cuda/attention/instances.h"
#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/half_pair.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/load_once.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kDecodeWarps = 8, kDecodeThreads = 32 * kDecodeWarps, kDecodeRows = 4;
constexpr unsigned kAllLanes = 0xffffffff;
constexpr float kLog2E = 1.4426950408889634f;

template <class T>
__device__ __forceinline__ float2 floats_of(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(pair_of_bits<T>(bits));
  } else {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
}

template <class T>
__device__ __forceinline__ void widen_row(const uint4& row, float (&out)[8]) {
  const std::uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = floats_of<T>(words[i]);
    out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
  }
}

// Sums x[0, N) over groups of 2 · Offset lanes. Lane l of a group is left with the sums of l · N / (2 · Offset) and
// those behind it, in x[0], ….
template <int Offset, int N, int All>
__device__ __forceinline__ void fold(float (&x)[All], int lane) {
  const bool upper = (lane & Offset) != 0;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float sent = upper ? x[i] : x[i + N / 2], kept = upper ? x[i + N / 2] : x[i];
    x[i] = kept + __shfl_xor_sync(kAllLanes, sent, Offset);
  }
  if constexpr (Offset > 1) fold<Offset / 2, N / 2>(x, lane);
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// What the exponents are relative to: 0 where no key was seen.
__device__ __forceinline__ float finite_peak(float peak) {
  return peak == -std::numeric_limits<float>::infinity() ? 0.f : peak;
}

// The last sequence that begins at or before the token, which is not behind the last one.
__device__ __forceinline__ int sequence_of(const std::int32_t* ends, int sequences, int token) {
  if (token < sequences && ends[token] <= token && token < ends[token + 1]) return token;
  int left = 0, right = sequences;
  while (left < right) {
    const int middle = (left + right) / 2;
    if (ends[middle + 1] <= token) {
      left = middle + 1;
    } else {
      right = middle;
    }
  }
  return left;
}

template <class T, int W, int G>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    paged_decode_kernel(const PagedPrefill p, const int cluster_bits, const int each) {
  constexpr int kLanes = W / 8, kAtOnce = 32 / kLanes, kTile = kDecodeRows * kAtOnce, kScores = kDecodeRows * G;
  constexpr int kOwn = kScores / kLanes, kHeadLanes = G / kOwn;  // scores of a lane; lanes that hold those of a row
  static_assert(kScores % kLanes == 0 && G % kOwn == 0 && kHeadLanes * kDecodeRows == kLanes && 16 % kTile == 0);
  __shared__ __align__(16) float warp_sums[kDecodeWarps][G][W];
  __shared__ float warp_peaks[kDecodeWarps][G], warp_totals[kDecodeWarps][G], warp_weights[kDecodeWarps][G];
  __shared__ float sums[G][W], peaks[G], totals[G];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int ctas = 1 << cluster_bits, rank = static_cast<int>(blockIdx.x) & (ctas - 1);
  const int unit = static_cast<int>(blockIdx.x) >> cluster_bits, head = unit % p.kv_heads, slot = unit / p.kv_heads;
  const int tokens = static_cast<int>(p.tokens), sequences = static_cast<int>(p.sequences);
  const int group = p.heads / p.kv_heads;
  T* const out = static_cast<T*>(p.out);

  // Of every CTA of the cluster alike: all of them go on, or none does.
  const bool is_decode = tokens <= sequences;  // of one token a slot
  const int last = p.cu_seqlens_q[sequences];
  int sequence = slot / each, local = slot % each;
  const bool is_behind = is_decode ? slot >= last : sequence == sequences;
  if (is_behind) {  // no sequence's: zeros
    if (rank != 0) return;
    for (std::int64_t token = is_decode ? slot : last + local; token < tokens; token += is_decode ? tokens : each) {
      for (int i = static_cast<int>(threadIdx.x); i < group * W; i += kDecodeThreads) {
        out[(token * p.heads + head * group) * W + i] = narrow<T>(0.f);
      }
    }
    return;
  }
  if (is_decode) sequence = sequence_of(p.cu_seqlens_q, sequences, slot);
  const int begin = p.cu_seqlens_q[sequence], count = p.cu_seqlens_q[sequence + 1] - begin;
  int stop = count < tokens - begin ? count : tokens - begin;
  if (is_decode) {
    local = slot - begin, stop = local + 1;
  } else if (count > p.few) {
    return;
  }
  const int most = static_cast<int>(p.table_columns) * p.block, given = p.seqlens_k[sequence];
  const int length = given < most ? given : most;
  const std::int32_t* const table = p.block_table + sequence * p.table_columns;
  const int part = lane % kLanes, row = lane / kLanes;
  const float nothing = -std::numeric_limits<float>::infinity();
  const std::int64_t layer = *p.offset;
  const T* const keys =
      static_cast<const T*>(p.pool) + layer + (static_cast<std::int64_t>(head) * p.block + row) * W + part * 8;
  const std::int64_t to_values = static_cast<std::int64_t>(p.kv_heads) * p.block * W;
  for (; local < stop; local += each) {
    const std::int64_t first_row = (static_cast<std::int64_t>(begin) + local) * p.heads + head * group;
    const int at = length - count + local;
    int low = 0;
    if (p.window > 0 && at - p.window + 1 > low) low = at - p.window + 1;
    if (p.chunk > 0 && at / p.chunk * p.chunk > low) low = at / p.chunk * p.chunk;
    const int high = at + 1 < length ? at + 1 : length;
    float q[G][8];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (g < group) {
        const T* const from = static_cast<const T*>(p.q) + (first_row + g) * W + part * 8;
        widen_row<T>(*reinterpret_cast<const uint4*>(from), q[g]);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) q[g][c] = g < group ? q[g][c] * (p.scale * kLog2E) : 0.f;
    }

    const auto rows_of = [&](int tile, int page) {
      const bool is_page = page >= 0 && page < p.blocks;
      return keys + (is_page ? page : 0) * p.pool_block + static_cast<std::int64_t>(tile * kTile % p.block) * W;
    };
    const auto load = [&](const T* from, int tile, uint4(&into)[kDecodeRows]) {
#pragma unroll
      for (int u = 0; u < kDecodeRows; ++u) {
        const int position = tile * kTile + u * kAtOnce + row;
        into[u] = make_uint4(0, 0, 0, 0);
        if (position >= low && position < high) into[u] = load_once(from + u * kAtOnce * W);
      }
    };

    float acc[G][8] = {}, peak[kOwn], total[kOwn] = {};
#pragma unroll
    for (int j = 0; j < kOwn; ++j) peak[j] = nothing;
    const int turn = ctas * kDecodeWarps;
    int tile = low / kTile + rank * kDecodeWarps + warp;
    uint4 key_rows[kDecodeRows], next_keys[kDecodeRows], value_rows[kDecodeRows];
    const T* place = keys;
    if (tile * kTile < high) {
      place = rows_of(tile, table[tile * kTile / p.block]);
      load(place, tile, key_rows);
    }
    for (; tile * kTile < high; tile += turn) {
      load(place + to_values, tile, value_rows);
      const int next = tile + turn;
      if (next * kTile < high) {
        place = rows_of(next, table[next * kTile / p.block]);
        load(place, next, next_keys);
      }
      float scores[kScores];
#pragma unroll
      for (int u = 0; u < kDecodeRows; ++u) {
        float k[8];
        widen_row<T>(key_rows[u], k);
#pragma unroll
        for (int g = 0; g < G; ++g) {
          float sum = 0;
#pragma unroll
          for (int c = 0; c < 8; ++c) sum = fmaf(q[g][c], k[c], sum);
          scores[u * G + g] = sum;
        }
      }
      fold<kLanes / 2, kScores>(scores, lane);

      const int position = tile * kTile + part / kHeadLanes * kAtOnce + row;
      const bool seen = position >= low && position < high;
      float decay[kOwn];
      bool changed = false;
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const float score = seen ? scores[j] : nothing;
        float most_here = score;
#pragma unroll
        for (int o = kHeadLanes; o < 32; o <<= 1)
          most_here = fmaxf(most_here, __shfl_xor_sync(kAllLanes, most_here, o));
        const float now = fmaxf(peak[j], most_here), shift = finite_peak(now);
        changed |= now != peak[j];
        decay[j] = exp2_of(peak[j] - shift);
        peak[j] = now;
        scores[j] = exp2_of(score - shift);
        total[j] = total[j] * decay[j] + scores[j];
      }
      if (__any_sync(kAllLanes, changed)) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
          const float factor = __shfl_sync(kAllLanes, decay[g % kOwn], g / kOwn);
#pragma unroll
          for (int c = 0; c < 8; ++c) acc[g][c] *= factor;
        }
      }
#pragma unroll
      for (int u = 0; u < kDecodeRows; ++u) {
        float v[8];
        widen_row<T>(value_rows[u], v);
#pragma unroll
        for (int g = 0; g < G; ++g) {
          constexpr int kOwnScores = kOwn;
          const int index = u * G + g;
          const float weight =
              __shfl_sync(kAllLanes, scores[index % kOwnScores], (lane & ~(kLanes - 1)) + index / kOwnScores);
#pragma unroll
          for (int c = 0; c < 8; ++c) acc[g][c] = fmaf(weight, v[c], acc[g][c]);
        }
      }
#pragma unroll
      for (int u = 0; u < kDecodeRows; ++u) key_rows[u] = next_keys[u];
    }

    // The warp's rows, the CTA's warps, the cluster's CTAs.
#pragma unroll
    for (int o = kLanes; o < 32; o <<= 1) {
#pragma unroll
      for (int g = 0; g < G; ++g) {
#pragma unroll
        for (int c = 0; c < 8; ++c) acc[g][c] += __shfl_xor_sync(kAllLanes, acc[g][c], o);
      }
    }
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
#pragma unroll
      for (int o = kHeadLanes; o < 32; o <<= 1) total[j] += __shfl_xor_sync(kAllLanes, total[j], o);
    }
    if (row == 0) {
#pragma unroll
      for (int g = 0; g < G; ++g) {
        float4* const into = reinterpret_cast<float4*>(&warp_sums[warp][g][part * 8]);
        into[0] = make_float4(acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
        into[1] = make_float4(acc[g][4], acc[g][5], acc[g][6], acc[g][7]);
      }
    }
    if (lane < kHeadLanes) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        warp_peaks[warp][lane * kOwn + j] = peak[j];
        warp_totals[warp][lane * kOwn + j] = total[j];
      }
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < kDecodeWarps * G) {
      const int w = static_cast<int>(threadIdx.x) / G, g = static_cast<int>(threadIdx.x) % G;
      float most_here = warp_peaks[0][g];
#pragma unroll
      for (int i = 1; i < kDecodeWarps; ++i) most_here = fmaxf(most_here, warp_peaks[i][g]);
      const float shift = finite_peak(most_here);
      warp_weights[w][g] = exp2_of(warp_peaks[w][g] - shift);
      if (w == 0) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kDecodeWarps; ++i) sum += warp_totals[i][g] * exp2_of(warp_peaks[i][g] - shift);
        peaks[g] = most_here, totals[g] = sum;
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < G * W; i += kDecodeThreads) {
      const int g = i / W, c = i % W;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kDecodeWarps; ++w) sum = fmaf(warp_weights[w][g], warp_sums[w][g][c], sum);
      sums[g][c] = sum;
    }
    if (ctas > 1) {
      wait_for_cluster();
    } else {
      __syncthreads();
    }
    const int share = G * W >> cluster_bits;
    for (int i = static_cast<int>(threadIdx.x); i < share; i += kDecodeThreads) {
      const int g = (rank * share + i) / W, c = (rank * share + i) % W;
      if (g >= group) continue;
      float most_here = peaks[g], sum = sums[g][c], all = totals[g];
      if (ctas > 1) {
        most_here = nothing;
        for (int r = 0; r < ctas; ++r) most_here = fmaxf(most_here, at_rank(&peaks[g], r));
        const float shift = finite_peak(most_here);
        sum = all = 0;
        for (int r = 0; r < ctas; ++r) {
          const float weight = exp2_of(at_rank(&peaks[g], r) - shift);
          sum = fmaf(weight, at_rank(&sums[g][c], r), sum);
          all = fmaf(weight, at_rank(&totals[g], r), all);
        }
      }
      if (p.sinks != nullptr) {
        const float sink = p.sinks[head * group + g] * kLog2E, now = fmaxf(most_here, sink), shift = finite_peak(now);
        const float factor = exp2_of(most_here - shift);
        sum *= factor;
        all = all * factor + exp2_of(sink - shift);
      }
      out[(first_row + g) * W + c] = narrow<T>(all == 0.f ? 0.f : sum / all);
    }
    // What others still read must not go away, nor be written for the next token.
    if (ctas > 1) {
      wait_for_cluster();
    } else {
      __syncthreads();
    }
  }
}

template <class T, int W, int G>
int launch_decode(const PagedPrefill& p, const PagedDecodePlan& plan, Stream stream) {
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(plan.units << plan.cluster_bits));
  how.threads = kDecodeThreads;
  how.cluster = 1 << plan.cluster_bits;
  how.pdl = plan.pdl;
  return launch_kernel(paged_decode_kernel<T, W, G>, how, stream, p, plan.cluster_bits, plan.each);
}

template <class T>
int decode_of(const PagedPrefill& p, const PagedDecodePlan& plan, Stream stream) {
  const bool narrow_heads = p.width == 64;
  if (plan.heads == 4) {
    return narrow_heads ? launch_decode<T, 64, 4>(p, plan, stream) : launch_decode<T, 128, 4>(p, plan, stream);
  }
  return narrow_heads ? launch_decode<T, 64, 8>(p, plan, stream) : launch_decode<T, 128, 8>(p, plan, stream);
}

}  // namespace

int paged_decode_sm90(const PagedPrefill& problem, const PagedDecodePlan& plan, Stream stream) {
  return problem.dtype == DType::kFloat16 ? decode_of<__half>(problem, plan, stream)
                                          : decode_of<__nv_bfloat16>(problem, plan, stream);
}

}  // namespace untorch::kernels::cuda
