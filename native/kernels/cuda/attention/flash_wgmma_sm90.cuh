// FlashAttention-3 forward for float16 and bfloat16 on sm_90a: warp-specialized, WGMMA and TMA, persistent CTAs.
//
// A CTA has one producer and two or three consumer warpgroups, a tile has 64 query rows a consumer.
//
//   producer     1 thread: TMA loads of Q, and of K and V tiles through two rings of stages (mbarriers full and empty)
//   consumer     S = Q·Kᵀ from shared memory; online softmax in registers, log2(e) · scale folded into the
//   exponential's
//                multiply-add; P, rounded to the half type, is the A operand of P·V in registers; V is MN-major as it
//                lies
//   overlap      within a warpgroup: Q·Kᵀ of the next tile and P·V of this one are issued, then comes the next softmax;
//                between warpgroups: named barriers let them issue in turn, so that one's softmax hides under the
//                other's WGMMAs
//   epilogue     a quad transposes its pairs into 16-byte stores: shared memory stays the next tile's
//   registers    setmaxnreg: 240 a consumer thread (three consumers: 160), 24 (32) a producer thread
//
//   shared memory, boxes of 64 columns, 128-byte swizzle; widths between those of the templates are padded by TMA
//     Q [boxes][rows][64]     K [stages][boxes][keys][64]     V [stages][boxes][keys][64]
//
// CTAs take row blocks of the same heads at a time, so that K and V come from L2. Causal ones come in pairs of a long
// and a short one; where the pairs leave too many CTAs idle, a CTA takes one row block, from the longest to the
// shortest.
//
// Roofline: 4 * queries * keys * width operations a head on tensor cores (causal: half of it), and queries * keys
// exponentials, 16 a cycle and SM: at width 64 these take as long as the WGMMAs.
#pragma once

#include "kernels/cuda/attention/flash_tile.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/sm90/mbarrier.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/sm90/wgmma_shared.cuh"

namespace untorch::kernels::cuda {
namespace {

// Stages: of the rings of keys and of values; QueryStages: with two, the next tile's Q comes during this one.
template <class T_, int Width, int Warpgroups, int Keys, int Stages, int QueryStages>
struct WgmmaTile {
  using T = T_;
  static constexpr int kWidth = Width, kWarpgroups = Warpgroups, kKeys = Keys;
  static constexpr int kStages = Stages, kQueryStages = QueryStages;
  static constexpr int kRows = 64 * Warpgroups, kConsumerThreads = 128 * Warpgroups, kThreads = kConsumerThreads + 128;
  static constexpr int kBoxes = (Width + 63) / 64;
  static constexpr int kQueryBox = kRows * 128, kKeyBox = kKeys * 128;  // bytes
  static constexpr int kQueryBytes = kBoxes * kQueryBox, kKeyBytes = kBoxes * kKeyBox;
  static constexpr int kBarriers = 2 * kQueryStages + 4 * kStages;
  static constexpr int kSharedBytes =
      kQueryStages * kQueryBytes + 2 * kStages * kKeyBytes + kBarriers * 8 + 1024;  // 1024: to align
  static_assert(kKeys % 16 == 0 && kKeyBox % 1024 == 0 && kSharedBytes <= 232448);
  // Of a thread, after setmaxnreg. The CTA's registers at launch are all there are.
  static constexpr int kConsumerRegisters = Warpgroups == 2 ? 240 : 160;
  static constexpr int kProducerRegisters = Warpgroups == 2 ? 24 : 32;
  static_assert(kConsumerThreads * kConsumerRegisters + 128 * kProducerRegisters <=
                65536 / kThreads / 8 * 8 * kThreads);
};

// query, key and value: boxes of 64 columns. The numbers are the steps of the maps' coordinates: 0 where all batches or
// heads are the same memory.
struct WgmmaOperands {
  TensorMap query, key, value;
  int query_batch, query_head, key_batch, key_head, value_batch, value_head;
};

// Shared-memory addresses.
template <class Tile>
struct WgmmaShared {
  std::uint32_t base;

  __device__ __forceinline__ std::uint32_t query(int stage) const { return base + stage * Tile::kQueryBytes; }
  __device__ __forceinline__ std::uint32_t key(int stage) const {
    return query(Tile::kQueryStages) + stage * Tile::kKeyBytes;
  }
  __device__ __forceinline__ std::uint32_t value(int stage) const { return key(Tile::kStages + stage); }
  __device__ __forceinline__ std::uint32_t key_full(int stage) const { return key(2 * Tile::kStages) + stage * 8; }
  __device__ __forceinline__ std::uint32_t key_empty(int stage) const { return key_full(Tile::kStages + stage); }
  __device__ __forceinline__ std::uint32_t value_full(int stage) const { return key_full(2 * Tile::kStages + stage); }
  __device__ __forceinline__ std::uint32_t value_empty(int stage) const { return key_full(3 * Tile::kStages + stage); }
  __device__ __forceinline__ std::uint32_t query_full(int stage) const { return key_full(4 * Tile::kStages + stage); }
  __device__ __forceinline__ std::uint32_t query_empty(int stage) const {
    return query_full(Tile::kQueryStages + stage);
  }

  __device__ __forceinline__ void init() const {
    constexpr int kWarps = 4 * Tile::kWarpgroups;  // an arrival each
    for (int stage = 0; stage < Tile::kQueryStages; ++stage) {
      mbarrier_init(query_full(stage), 1), mbarrier_init(query_empty(stage), kWarps);
    }
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      mbarrier_init(key_full(stage), 1), mbarrier_init(value_full(stage), 1);
      mbarrier_init(key_empty(stage), kWarps), mbarrier_init(value_empty(stage), kWarps);
    }
    fence_mbarrier_init();
  }
};

// A stage of a ring, and the parity of the phase that its user waits for.
template <int Stages>
struct RingPosition {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    stage = stage == Stages - 1 ? 0 : stage + 1;
    parity ^= stage == 0 ? 1 : 0;
  }
  // Tells the compiler that both are warp-uniform: descriptors are then computed in uniform registers.
  __device__ __forceinline__ void make_uniform() {
    stage = __shfl_sync(0xffffffffu, stage, 0), parity = __shfl_sync(0xffffffffu, parity, 0);
  }
};

// A row block of a head.
struct WgmmaWork {
  int batch, head, row;
  int tiles;       // of keys, from 0 on
  int full_tiles;  // those that every row sees whole
};

// Row block `step` of the CTA; false when there is none left. Paired items are a long and a short row block of a head,
// so that causal items cost the same. work.row -1: the middle block, which has no partner.
template <class Tile>
__device__ __forceinline__ bool locate_work(const Attention& p, const WgmmaAttentionPlan& plan, int step,
                                            WgmmaWork& work) {
  const int round = plan.paired ? step / 2 : step;
  const int item = round * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  if (item >= plan.items) return false;
  int slot, block;
  if (plan.paired) {
    const int pairs = (plan.row_blocks + 1) / 2;
    slot = item / pairs;
    const int first = item - slot * pairs;
    block = step & 1 ? plan.row_blocks - 1 - first : first;
    if ((step & 1) && block == first) {
      work.row = -1;
      return true;
    }
  } else {
    const int per_section = plan.section * plan.row_blocks;
    const int which = item / per_section, rest = item - which * per_section;
    const int in_section = min(plan.section, p.batch * p.heads - which * plan.section);
    block = rest / in_section, slot = which * plan.section + rest - block * in_section;
  }
  work.batch = slot / p.heads, work.head = slot - work.batch * p.heads;
  work.row = (plan.row_blocks - 1 - block) * Tile::kRows;
  const int shift = p.bottom_right ? p.keys - p.queries : 0;
  const int first = work.row + shift, last = min(work.row + Tile::kRows, p.queries) - 1 + shift;
  const int end = p.right < 0 ? p.keys : min(p.keys, last + p.right + 1);
  const int whole = p.right < 0 ? p.keys : min(p.keys, first + p.right + 1);
  work.tiles = (max(0, end) + Tile::kKeys - 1) / Tile::kKeys;
  work.full_tiles = max(0, whole) / Tile::kKeys;
  return true;
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The producer, one thread.
template <class Tile>
__device__ __forceinline__ void produce_tiles(const Attention& p, const WgmmaAttentionPlan& plan,
                                              const WgmmaOperands& operands, WgmmaShared<Tile> shared) {
  prefetch_tensor_map(operands.query), prefetch_tensor_map(operands.key), prefetch_tensor_map(operands.value);
  const int group = p.heads / p.kv_heads;
  RingPosition<Tile::kStages> keys, values;
  RingPosition<Tile::kQueryStages> queries;
  queries.parity = keys.parity = values.parity = 1;  // all stages are empty
  WgmmaWork work;
  for (int step = 0; locate_work<Tile>(p, plan, step, work); ++step) {
    if (work.row < 0) continue;
    if (work.tiles == 0) continue;
    const int kv_head = work.head / group;
    const auto load = [&](const TensorMap& map, std::uint32_t to, int box_bytes, int row, int head, int batch,
                          std::uint32_t full) {
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        tma_load_4d(to + box * box_bytes, map, box * 64, row, head, batch, full);
      }
    };
    const auto load_key = [&](int tile) {
      mbarrier_wait(shared.key_empty(keys.stage), keys.parity);
      mbarrier_arrive_expect_tx(shared.key_full(keys.stage), Tile::kKeyBytes);
      load(operands.key, shared.key(keys.stage), Tile::kKeyBox, tile * Tile::kKeys, kv_head * operands.key_head,
           work.batch * operands.key_batch, shared.key_full(keys.stage));
      keys.advance();
    };
    mbarrier_wait(shared.query_empty(queries.stage), queries.parity);
    mbarrier_arrive_expect_tx(shared.query_full(queries.stage), Tile::kQueryBytes);
    load(operands.query, shared.query(queries.stage), Tile::kQueryBox, work.row, work.head * operands.query_head,
         work.batch * operands.query_batch, shared.query_full(queries.stage));
    queries.advance();
    load_key(work.tiles - 1);
    for (int tile = work.tiles - 1; tile >= 0; --tile) {
      if (tile > 0) load_key(tile - 1);
      mbarrier_wait(shared.value_empty(values.stage), values.parity);
      mbarrier_arrive_expect_tx(shared.value_full(values.stage), Tile::kKeyBytes);
      load(operands.value, shared.value(values.stage), Tile::kKeyBox, tile * Tile::kKeys, kv_head * operands.value_head,
           work.batch * operands.value_batch, shared.value_full(values.stage));
      values.advance();
    }
  }
}

template <class T>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  std::uint32_t r;
  if constexpr (std::is_same_v<T, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// What a consumer thread has of its two rows, g and g + 8 of a warp's 16.
struct SoftmaxRows {
  float maximum[2], sum[2];  // sum: of this thread's columns
  int last_key[2];           // the last key that the row sees
};

// Makes scores into exponentials; fade: what earlier exponentials are to be multiplied with.
template <class Tile, bool Masked>
__device__ __forceinline__ void online_softmax(float (&score)[Tile::kKeys / 2], SoftmaxRows& rows, float (&fade)[2],
                                               float scale_log2, int first_key) {
  if constexpr (Masked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int limit = rows.last_key[half] - first_key;
#pragma unroll
      for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (n * 8 + j > limit) score[4 * n + 2 * half + j] = minus_infinity();
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Two chains each, for latency.
    float top[2] = {rows.maximum[half], score[2 * half]};
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 8; ++n) {
      top[0] = fmaxf(top[0], score[4 * n + 2 * half + 1]);
      if (n > 0) top[1] = fmaxf(top[1], score[4 * n + 2 * half]);
    }
    top[0] = fmaxf(top[0], top[1]);
    top[0] = fmaxf(top[0], __shfl_xor_sync(0xffffffffu, top[0], 1));
    top[0] = fmaxf(top[0], __shfl_xor_sync(0xffffffffu, top[0], 2));
    const float base = top[0] == minus_infinity() ? 0.0f : top[0];  // nothing seen yet: all exponentials are 0
    const float offset = base * scale_log2;
    fade[half] = exp2_fast(fmaf(rows.maximum[half], scale_log2, -offset));
    rows.maximum[half] = top[0];
    float part[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& s = score[4 * n + 2 * half + j];
        s = exp2_fast(fmaf(s, scale_log2, -offset));
        part[j] += s;
      }
    }
    rows.sum[half] = fmaf(rows.sum[half], fade[half], part[0] + part[1]);
  }
}

// A quad's four lanes have pairs of four 8-column tiles; afterwards lane t has the eight columns of tile t.
__device__ __forceinline__ void transpose_in_quad(std::uint32_t (&pairs)[4], int lane) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const std::uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? pairs[i] : pairs[i + distance], distance);
      (upper ? pairs[i] : pairs[i + distance]) = got;
    }
  }
}

// Rows 0 to 15 of the warp to memory: divided by the sum, rounded, with the log-sum-exp.
template <class Tile>
__device__ __forceinline__ void store_rows(const Attention& p, const WgmmaAttentionPlan& plan, const WgmmaWork& work,
                                           int row, float (&out)[Tile::kWidth / 2], const SoftmaxRows& rows) {
  using T = typename Tile::T;
  const int lane = static_cast<int>(threadIdx.x) & 31, pair = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = rows.sum[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float inverse = total == 0 ? 0.0f : 1.0f / total;  // 0: the row sees no key
    const int at = row + half * 8;
    if (pair == 0 && p.lse != nullptr) {
      float* lse = p.lse + work.batch * p.lse_batch + work.head * p.lse_head + at;
      if (at < p.queries) {
        *lse = total == 0 ? p.empty_lse : rows.maximum[half] * p.scale + logf(total);
      } else if (at < p.lse_rows) {
        *lse = INFINITY;
      }
    }
    T* to = static_cast<T*>(p.out.data) + work.batch * p.out.batch + work.head * p.out.head +
            static_cast<std::int64_t>(at) * p.out.row;
#pragma unroll
    for (int i = 0; i < Tile::kWidth / 32; ++i) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int from = 4 * (4 * i + j) + 2 * half;
        pairs[j] = pack_pair<T>(out[from] * inverse, out[from + 1] * inverse);
      }
      transpose_in_quad(pairs, lane);
      const int column = (4 * i + pair) * 8;
      if (at >= p.queries || column >= p.value_width) continue;
      if (plan.vector_out) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const auto bits = static_cast<std::uint16_t>(pairs[j / 2] >> (j & 1) * 16);
          if (column + j < p.value_width) memcpy(to + column + j, &bits, 2);
        }
      }
    }
  }
}

// A consumer warpgroup.
template <class Tile>
__device__ __forceinline__ void consume_tiles(const Attention& p, const WgmmaAttentionPlan& plan,
                                              WgmmaShared<Tile> shared, int warpgroup) {
  using T = typename Tile::T;
  constexpr int kTurnThreads = 256;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int my_turn = 1 + warpgroup, next_turn = 1 + (warpgroup == Tile::kWarpgroups - 1 ? 0 : warpgroup + 1);
  const float scale_log2 = p.scale * kLog2e;

  float out[Tile::kWidth / 2], score[Tile::kKeys / 2];
  std::uint32_t weights[Tile::kKeys / 4];
  RingPosition<Tile::kStages> keys, values;
  RingPosition<Tile::kQueryStages> queries;

  const auto release = [&](std::uint32_t empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  const auto issue_scores = [&] {
    const std::uint32_t query = smem_descriptor(shared.query(queries.stage) + warpgroup * 64 * 128);
    const std::uint32_t key = smem_descriptor(shared.key(keys.stage));
#pragma unroll
    for (int k = 0; k < Tile::kWidth / 16; ++k) {
      const std::uint32_t a = query + (k / 4 * Tile::kQueryBox + k % 4 * 32) / 16;
      const std::uint32_t b = key + (k / 4 * Tile::kKeyBox + k % 4 * 32) / 16;
      if (k == 0) {
        wgmma_shared<T, false>(score, a, b);
      } else {
        wgmma_shared<T, true>(score, a, b);
      }
    }
    wgmma_commit_group();
  };
  const auto issue_output = [&] {
    const std::uint32_t value = mn_major_descriptor(shared.value(values.stage), Tile::kKeyBox);
#pragma unroll
    for (int k = 0; k < Tile::kKeys / 16; ++k) {
      wgmma_mn_major<T>(out, weights + 4 * k, value + k * 2048 / 16);
    }
    wgmma_commit_group();
  };
  const auto round_weights = [&] {
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 4; ++i) weights[i] = pack_pair<T>(score[2 * i], score[2 * i + 1]);
  };

  if (warpgroup == Tile::kWarpgroups - 1) named_barrier_arrive(1, kTurnThreads);
  WgmmaWork work;
  for (int step = 0; locate_work<Tile>(p, plan, step, work); ++step) {
    if (work.row < 0) continue;
    const int row = work.row + warpgroup * 64 + warp * 16 + lane / 4;
    SoftmaxRows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.maximum[half] = minus_infinity(), rows.sum[half] = 0;
      const int at = row + half * 8 + (p.bottom_right ? p.keys - p.queries : 0);
      // Less the first column of this thread.
      rows.last_key[half] = (p.right < 0 ? p.keys - 1 : min(p.keys - 1, at + p.right)) - 2 * (lane & 3);
    }
#pragma unroll
    for (int i = 0; i < Tile::kWidth / 2; ++i) out[i] = 0;
    if (work.tiles > 0) {
      float fade[2];
      queries.make_uniform();
      mbarrier_wait(shared.query_full(queries.stage), queries.parity);
      mbarrier_wait(shared.key_full(keys.stage), keys.parity);
      wgmma_fence();
      issue_scores();
      wgmma_wait_group<0>();
      fence_registers(score);
      release(shared.key_empty(keys.stage));
      keys.advance();
      int tile = work.tiles - 1;
      online_softmax<Tile, true>(score, rows, fade, scale_log2, tile * Tile::kKeys);
      round_weights();

      // Scores of tile - 1, output of tile.
      const auto step = [&]<bool Masked>() {
        mbarrier_wait(shared.key_full(keys.stage), keys.parity);
        fence_registers(out);
        fence_registers(weights);
        named_barrier_sync(my_turn, kTurnThreads);
        wgmma_fence();
        issue_scores();
        mbarrier_wait(shared.value_full(values.stage), values.parity);
        wgmma_fence();
        issue_output();
        named_barrier_arrive(next_turn, kTurnThreads);
        wgmma_wait_group<1>();
        fence_registers(score);
        release(shared.key_empty(keys.stage));
        keys.advance();
        online_softmax<Tile, Masked>(score, rows, fade, scale_log2, (tile - 1) * Tile::kKeys);
        wgmma_wait_group<0>();
        fence_registers(out);
        fence_registers(weights);
        release(shared.value_empty(values.stage));
        values.advance();
        // Most tiles have no new maximum.
        if (__any_sync(0xffffffffu, fade[0] != 1 || fade[1] != 1)) {
#pragma unroll
          for (int i = 0; i < Tile::kWidth / 2; ++i) out[i] *= fade[i / 2 % 2];
        }
        round_weights();
      };
#pragma unroll 1
      for (; tile > work.full_tiles && tile > 0; --tile) step.template operator()<true>();
      keys.make_uniform(), values.make_uniform();
#pragma unroll 1
      for (; tile > 0; --tile) step.template operator()<false>();
      release(shared.query_empty(queries.stage));
      queries.advance();

      mbarrier_wait(shared.value_full(values.stage), values.parity);
      fence_registers(out);
      fence_registers(weights);
      wgmma_fence();
      issue_output();
      wgmma_wait_group<0>();
      fence_registers(out);
      release(shared.value_empty(values.stage));
      values.advance();
    }
    store_rows<Tile>(p, plan, work, row, out, rows);
  }
  if (warpgroup == 0) named_barrier_sync(1, kTurnThreads);  // the last turn, which nobody takes
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    flash_attention_wgmma(const __grid_constant__ Attention p, const __grid_constant__ WgmmaAttentionPlan plan,
                          const __grid_constant__ WgmmaOperands operands) {
  extern __shared__ __align__(128) unsigned char memory[];
  const WgmmaShared<Tile> shared{(shared_address(memory) + 1023) / 1024 * 1024};
  clear_random_state(p);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == Tile::kWarpgroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kProducerRegisters));
    if (threadIdx.x == Tile::kConsumerThreads) produce_tiles<Tile>(p, plan, operands, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kConsumerRegisters));
    consume_tiles<Tile>(p, plan, shared, warpgroup);
  }
}

// The tensor map of heads, in boxes of `box_rows` rows. A dimension that repeats (stride 0) or has one element becomes
// one of size 1, and its coordinate 0.
inline int encode_heads(const Heads& heads, int batch, int count, int rows, int width, int box_rows, TensorMap& map,
                        int& batch_step, int& head_step) {
  batch_step = batch > 1 && heads.batch != 0, head_step = count > 1 && heads.head != 0;
  const auto bytes = [](std::int64_t stride) { return stride == 0 ? std::int64_t{16} : stride * 2; };
  return encode_tensor_map(TensorMap4dSpec{.base = heads.data,
                                           .outer = batch_step != 0 ? batch : 1,
                                           .middle = head_step != 0 ? count : 1,
                                           .rows = rows,
                                           .columns = width,
                                           .outer_bytes = bytes(heads.batch),
                                           .middle_bytes = bytes(heads.head),
                                           .row_bytes = bytes(heads.row),
                                           .box_rows = box_rows},
                           map);
}

template <class Tile>
int launch_wgmma(const Attention& p, const WgmmaAttentionPlan& plan, Stream stream) {
  WgmmaOperands operands{};
  if (const int code = encode_heads(p.query, p.batch, p.heads, p.queries, p.width, Tile::kRows, operands.query,
                                    operands.query_batch, operands.query_head)) {
    return code;
  }
  if (const int code = encode_heads(p.key, p.batch, p.kv_heads, p.keys, p.width, Tile::kKeys, operands.key,
                                    operands.key_batch, operands.key_head)) {
    return code;
  }
  if (const int code = encode_heads(p.value, p.batch, p.kv_heads, p.keys, p.value_width, Tile::kKeys, operands.value,
                                    operands.value_batch, operands.value_head)) {
    return code;
  }
  return launch_kernel(
      flash_attention_wgmma<Tile>,
      {.blocks = dim3(static_cast<unsigned>(plan.ctas)), .threads = Tile::kThreads, .shared_bytes = Tile::kSharedBytes},
      stream, p, plan, operands);
}

template <class T>
int launch_attention_wgmma(const Attention& p, const WgmmaAttentionPlan& plan, Stream stream) {
  if (plan.width == 64) {
    if (plan.warpgroups == 3) return launch_wgmma<WgmmaTile<T, 64, 3, 128, 2, 2>>(p, plan, stream);
    return launch_wgmma<WgmmaTile<T, 64, 2, 128, 3, 2>>(p, plan, stream);
  }
  if (plan.width == 96) return launch_wgmma<WgmmaTile<T, 96, 2, 128, 2, 1>>(p, plan, stream);
  if (plan.width == 128) {
    // The diagonal costs less with narrow tiles.
    if (p.right >= 0) return launch_wgmma<WgmmaTile<T, 128, 2, 128, 2, 2>>(p, plan, stream);
    return launch_wgmma<WgmmaTile<T, 128, 2, 176, 2, 1>>(p, plan, stream);
  }
  if (plan.width == 192) return launch_wgmma<WgmmaTile<T, 192, 2, 112, 2, 1>>(p, plan, stream);
  return launch_wgmma<WgmmaTile<T, 256, 2, 80, 2, 1>>(p, plan, stream);
}

}  // namespace
}  // namespace untorch::kernels::cuda
