// FlashAttention-3 forward for float16 and bfloat16 on sm_90a: warp-specialized, WGMMA and TMA, persistent CTAs.
//
// A CTA has one producer and two or three consumer warpgroups, a tile has 64 query rows a consumer.
//
//   producer     1 thread: TMA loads of Q, and of K and V tiles through two rings of stages (mbarriers full and empty)
//   consumer     S = Q·Kᵀ from shared memory; online softmax in registers, log2(e) · scale folded into the multiply-add
//                before the exponential; P, rounded to the half type, is the A operand of P·V in registers; V is
//                MN-major as it lies
//   overlap      within a warpgroup: Q·Kᵀ of the next tile and P·V of this one are issued, then comes the next softmax;
//                between warpgroups: named barriers let them issue in turn, so that one's softmax hides under the
//                other's WGMMAs
//   epilogue     a warp's rows go to shared memory of their own, from which TMA stores them during the next tile; where
//                there is none, or strides are not TMA's, a quad transposes its pairs into 16-byte stores
//   registers    setmaxnreg: 240 a consumer thread (three consumers: 160), 24 (32) a producer thread
//
//   shared memory: tiles of 64 columns with 128-byte swizzle, width / 64 of them; TMA pads other widths with zeros
//     Q    [width / 64][rows][64]
//     K, V [stages][width / 64][keys][64] each
//     O    [warps][width / 64][16][64]
//
// CTAs take row blocks of the same heads at a time, so that K and V come from L2. Causal ones come in pairs of a long
// and a short one; where the pairs leave too many CTAs idle, a CTA takes one row block, from the longest to the
// shortest.
//
// Roofline: 4 * queries * keys * width operations a head on tensor cores (causal: half of it), and queries * keys
// exponentials, 16 a cycle and SM: at width 64 these take as long as the WGMMAs.
#pragma once

#include "kernels/cuda/attention/wgmma_tile_sm90.cuh"
#include "kernels/cuda/common/divide.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"

namespace untorch::kernels::cuda {
namespace {

// The tensor maps load and store 64 columns at a time. The integers are the steps of a map's batch and head
// coordinates: 0 where all batches or heads share memory.
struct WgmmaOperands {
  TensorMap query, key, value, out;
  int query_batch, query_head, key_batch, key_head, value_batch, value_head, out_batch, out_head;
};

// A row block of a head.
struct WgmmaWork {
  int batch, head, row;
  int tiles;  // of keys, from 0 on
};

// Rows [first, last] see keys from 0 on: so many tiles, and so many that every row sees whole.
template <class Tile>
__device__ __forceinline__ KeyTiles key_tiles(const Attention& p, int first, int last) {
  const int shift = p.bottom_right ? p.keys - p.queries : 0;
  const int end = p.right < 0 ? p.keys : min(p.keys, last + shift + p.right + 1);
  const int whole = p.right < 0 ? p.keys : min(p.keys, first + shift + p.right + 1);
  return {0, (max(0, end) + Tile::kKeys - 1) / Tile::kKeys, 0, max(0, whole) / Tile::kKeys, 0};
}

// Row block `step` of the CTA; false when there is none left. Paired items are a long and a short row block of a head,
// so that causal items cost the same. work.head -1: the middle block, which has no partner.
template <class Tile>
__device__ __forceinline__ bool locate_work(const Attention& p, const WgmmaAttentionPlan& plan, int step,
                                            WgmmaWork& work) {
  // A row block in the middle costs half of a pair: a CTA has another place of the heads in every round.
  const int ctas = static_cast<int>(gridDim.x), round = plan.paired ? step / 2 : step;
  const bool rotates = plan.paired && plan.row_blocks % 2 != 0;
  int place = static_cast<int>(blockIdx.x) + (rotates ? round : 0);
  if (plan.alternates && round % 2 != 0) place = ctas - 1 - place;
  const int item = round * ctas + place - divided(place, plan.by_ctas) * ctas;
  if (item >= plan.items) return false;
  int slot, block;
  if (plan.paired) {
    const int pairs = (plan.row_blocks + 1) / 2;
    slot = divided(item, plan.by_blocks);
    const int first = item - slot * pairs;
    block = step & 1 ? plan.row_blocks - 1 - first : first;
    if ((step & 1) && block == first) {
      work.head = -1;
      return true;
    }
  } else {
    const int which = divided(item, plan.by_blocks), rest = item - which * plan.section * plan.row_blocks;
    const int in_section = min(plan.section, p.batch * p.heads - which * plan.section);
    block = in_section == 1 ? rest : rest / in_section, slot = which * plan.section + rest - block * in_section;
  }
  work.batch = divided(slot, plan.by_heads), work.head = slot - work.batch * p.heads;
  work.row = plan.first_row + (plan.row_blocks - 1 - block) * Tile::kRows;
  work.tiles = key_tiles<Tile>(p, work.row, min(work.row + Tile::kRows, p.queries) - 1).end;
  return true;
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
    if (work.head < 0) continue;
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

// The warp's rows [first, first + 16) to memory: divided by the sum, rounded, with the log-sum-exp.
template <class Tile>
__device__ __forceinline__ void store_rows(const Attention& p, const WgmmaAttentionPlan& plan,
                                           const WgmmaOperands& operands, WgmmaShared<Tile> shared,
                                           const WgmmaWork& work, int first, const float (&out)[Tile::kWidth / 2],
                                           const SoftmaxRows& rows) {
  using T = typename Tile::T;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const float total[2] = {row_total(rows, 0), row_total(rows, 1)};
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) inverse[half] = total[half] == 0 ? 0.0f : __fdividef(1.0f, total[half]);
  if (p.lse != nullptr && lane % 4 < 2) {
    const bool second = lane % 4 == 1;
    const int at = first + lane / 4 + (second ? 8 : 0);
    const float sum = second ? total[1] : total[0], maximum = second ? rows.maximum[1] : rows.maximum[0];
    float* const lse = p.lse + work.batch * p.lse_batch + work.head * p.lse_head + at;
    if (at < p.queries) {
      *lse = sum == 0 ? p.empty_lse : fmaf(maximum, p.scale, __logf(sum));  // 0: the row sees no key
    } else if (at < p.lse_rows) {
      *lse = INFINITY;
    }
  }
  if (Tile::kHasOut && plan.vector_out) {
    const std::uint32_t staged = shared.out(static_cast<int>(threadIdx.x) / 32);
    if (lane == 0) tma_store_wait_read();
    __syncwarp();
    stage_rows<Tile>(staged, out, inverse);
    fence_before_tma_store();
    __syncwarp();
    if (lane == 0 && first < p.queries) {
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        tma_store_4d(staged + box * Tile::kWarpOutBox, operands.out, box * 64, first, work.head * operands.out_head,
                     work.batch * operands.out_batch);
      }
      tma_store_commit();
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = first + lane / 4 + half * 8;
    T* const to = static_cast<T*>(p.out.data) + work.batch * p.out.batch + work.head * p.out.head +
                  static_cast<std::int64_t>(at) * p.out.row;
    store_row<Tile>(to, half, at < p.queries, p.value_width, !Tile::kHasOut && plan.vector_out, out, inverse[half]);
  }
}

// A consumer warpgroup.
template <class Tile>
__device__ __forceinline__ void consume_tiles(const Attention& p, const WgmmaAttentionPlan& plan,
                                              const WgmmaOperands& operands, WgmmaShared<Tile> shared, int warpgroup) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  WgmmaConsumer<Tile> consumer{.shared = shared, .warpgroup = warpgroup, .scale_log2 = p.scale * kLog2e};
  float out[Tile::kWidth / 2];
  consumer.take_turns();
  WgmmaWork work;
  for (int step = 0; locate_work<Tile>(p, plan, step, work); ++step) {
    if (work.head < 0) continue;
    const int first_row = work.row + warpgroup * 64 + warp * 16, row = first_row + lane / 4;
    SoftmaxRows rows{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.maximum[half] = minus_infinity();
      const int at = row + half * 8 + (p.bottom_right ? p.keys - p.queries : 0);
      rows.last_key[half] = (p.right < 0 ? p.keys - 1 : min(p.keys - 1, at + p.right)) - 2 * (lane & 3);
    }
#pragma unroll
    for (int i = 0; i < Tile::kWidth / 2; ++i) out[i] = 0;
    if (work.tiles > 0) {
      // Where a row block is longer than a tile, a warpgroup's rows may see fewer tiles, or there are none.
      constexpr bool apart = Tile::kRows > Tile::kKeys;
      const int first = work.row + (apart ? warpgroup * 64 : 0);
      const int last = min(first + (apart ? 64 : Tile::kRows), p.queries) - 1;
      KeyTiles tiles = key_tiles<Tile>(p, first, last);
      if (apart) tiles.block_end = work.tiles;
      if (apart && (first < 0 || first > last || tiles.end == 0)) {
        consumer.skip(work.tiles);
      } else {
        consumer.template attend<false>(tiles, rows, out, [] {});
      }
    }
    if (first_row >= 0) store_rows<Tile>(p, plan, operands, shared, work, first_row, out, rows);
  }
  consumer.end_turns();
  if (Tile::kHasOut && lane == 0) tma_store_wait_read();
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
    setmaxnreg_dec<Tile::kProducerRegisters>();
    if (threadIdx.x == Tile::kConsumerThreads) produce_tiles<Tile>(p, plan, operands, shared);
  } else {
    setmaxnreg_inc<Tile::kConsumerRegisters>();
    consume_tiles<Tile>(p, plan, operands, shared, warpgroup);
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
  if (Tile::kHasOut && plan.vector_out) {
    if (const int code = encode_heads(p.out, p.batch, p.heads, p.queries, p.value_width, 16, operands.out,
                                      operands.out_batch, operands.out_head)) {
      return code;
    }
  }
  return launch_kernel(
      flash_attention_wgmma<Tile>,
      {.blocks = dim3(static_cast<unsigned>(plan.ctas)), .threads = Tile::kThreads, .shared_bytes = Tile::kSharedBytes},
      stream, p, plan, operands);
}

template <class T>
int launch_attention_wgmma(const Attention& p, const WgmmaAttentionPlan& plan, Stream stream) {
  if (plan.width == 64) {
    if (plan.warpgroups == 3) return launch_wgmma<WgmmaTile<T, 64, 3, 128, 2, 2, true>>(p, plan, stream);
    return launch_wgmma<WgmmaTile<T, 64, 2, 128, 3, 2, true>>(p, plan, stream);
  }
  if (plan.width == 96) return launch_wgmma<WgmmaTile<T, 96, 2, 128, 2, 2, true>>(p, plan, stream);
  if (plan.width == 128) return launch_wgmma<WgmmaTile<T, 128, 2, 128, 2, 2, true>>(p, plan, stream);
  if (plan.width == 192) return launch_wgmma<WgmmaTile<T, 192, 2, 112, 2, 1>>(p, plan, stream);
  return launch_wgmma<WgmmaTile<T, 256, 2, 80, 2, 1>>(p, plan, stream);
}

}  // namespace
}  // namespace untorch::kernels::cuda
