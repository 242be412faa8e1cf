// Attention of prompts over a paged KV cache on sm_90a, as flash_wgmma_sm90.cuh but that keys lie in pages.
//
// A row block has 128 rows (192 with heads of 64), which are row_tokens tokens of a sequence by the heads that share a
// KV head. Its sequence is found by a search in cu_seqlens_q, so that grids depend on shapes alone. CTAs are persistent
// and count row blocks in memory: from the last ones of a sequence, which see the most keys, to the first.
//
//   producer     1 warp: finds the row blocks, which reach the consumers with Q, while these work on the one before. A
//                lane issues one TMA load, box_rows keys of a page. Loads of 2 KiB are what bounds the kernel with
//                pages of 16 keys, so they bring whole keys where the width allows it; pages are looked up a tile
//                ahead. The pool is one matrix of rows of `width` elements to TMA; the producer computes row numbers.
//                Keys that no row sees are loaded from outside of it, which gives zeros
//   consumers    wgmma_tile_sm90.cuh. Values behind the sequence's end within its last page may be anything: they are
//                overwritten with zeros in shared memory, as 0 · NaN is NaN
//
// Roofline: as flash_wgmma_sm90.cuh. Keys come from L2 once for all heads of a KV head.
#pragma once

#include "kernels/cuda/attention/wgmma_tile_sm90.cuh"
#include "kernels/cuda/common/divide.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/sm90/warps.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kOutside = -1024;  // a row of no matrix

// A row block. sequence -1: there is none left.
struct PagedWork {
  int sequence;
  int begin, count;          // of the sequence's tokens: the first in q, how many
  int first;                 // token of the row block, within the sequence
  int length;                // keys
  int kv_head, head, heads;  // head: the first of q; heads: of the row block
  int low, high;             // keys that some row sees: [low, high)
  KeyTiles tiles;
};

// How many of `count` values satisfy the condition, which no value does after one that does not. By a whole warp.
template <class Condition>
__device__ __forceinline__ int partition_point(int count, Condition&& condition) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int low = 0, high = count;
  while (low < high) {
    const int step = (high - low + 31) / 32, at = low + lane * step;
    const int passed = __popc(__ballot_sync(0xffffffffu, at < high && condition(at)));
    if (passed == 0) break;
    const int next = low + (passed - 1) * step;
    low = next + 1, high = min(high, next + step);
  }
  return low;
}

// False for a number that is no row block of a prompt. By a whole warp.
template <class Tile>
__device__ __forceinline__ bool locate(const PagedPrefill& p, const PagedPrefillPlan& plan, int item, PagedWork& work) {
  const int round = divided(item, plan.by_pairs), pair = item - round * p.kv_heads * plan.head_tiles;
  const int block = plan.row_blocks - 1 - round;
  // A sequence's row blocks begin at ends / row_tokens + its number, which leaves room for those before it.
  const int before = partition_point(static_cast<int>(p.sequences), [&](int sequence) {
    return divided(p.cu_seqlens_q[sequence], plan.by_row_tokens) + sequence <= block;
  });
  work.sequence = max(before - 1, 0);
  work.begin = p.cu_seqlens_q[work.sequence];
  work.count = p.cu_seqlens_q[work.sequence + 1] - work.begin;
  work.first = (block - divided(work.begin, plan.by_row_tokens) - work.sequence) * plan.row_tokens;
  if (work.count <= p.few || work.first < 0 || work.first >= work.count) return false;
  work.length = min(p.seqlens_k[work.sequence], static_cast<int>(p.table_columns) * p.block);
  work.kv_head = divided(pair, plan.by_head_tiles);
  const int tile = pair - work.kv_head * plan.head_tiles;
  work.head = work.kv_head * plan.group + tile * plan.row_heads;
  work.heads = min(plan.row_heads, plan.group - tile * plan.row_heads);
  const int past = work.length - work.count;
  const int first = past + work.first, last = past + min(work.first + plan.row_tokens, work.count) - 1;
  int low = 0, whole_low = 0;
  if (p.window > 0) low = max(first - p.window + 1, 0), whole_low = max(last - p.window + 1, 0);
  if (p.chunk > 0) low = max(low, first / p.chunk * p.chunk), whole_low = max(whole_low, last / p.chunk * p.chunk);
  work.low = low, work.high = min(last + 1, work.length);
  const int whole_high = min(first + 1, work.length);
  work.tiles.begin = low / Tile::kKeys;
  work.tiles.end = work.high <= low ? work.tiles.begin : (work.high + Tile::kKeys - 1) / Tile::kKeys;
  work.tiles.full_begin = (whole_low + Tile::kKeys - 1) / Tile::kKeys;
  work.tiles.full_end = max(whole_high, 0) / Tile::kKeys;
  return true;
}

// The producer, one warp.
template <class Tile>
struct PageProducer {
  const PagedPrefill& p;
  const PagedPrefillPlan& plan;
  const TensorMap &query, &pool;
  WgmmaShared<Tile> shared;
  PagedWork* works;  // one a stage of Q
  RingPosition<Tile::kStages> keys, values;
  RingPosition<Tile::kQueryStages> queries;
  unsigned taken = 0;  // of lane 0

  __device__ __forceinline__ void run() {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int first_row = static_cast<int>(*p.offset / p.width);
    queries.parity = keys.parity = values.parity = 1;  // all stages are empty
    for (int item = static_cast<int>(blockIdx.x); item < plan.items; item = next_item()) {
      PagedWork work;
      if (!locate<Tile>(p, plan, item, work)) {
        take_item();
        continue;
      }
      mbarrier_wait(shared.query_empty(queries.stage), queries.parity);
      if (lane == 0) {
        works[queries.stage] = work;
        load_query(work);
      }
      __syncwarp();
      queries.advance();
      if (work.tiles.end > work.tiles.begin) {
        load_tiles(work, first_row + work.kv_head * p.block);
      } else {
        take_item();
      }
    }
    mbarrier_wait(shared.query_empty(queries.stage), queries.parity);
    if (lane == 0) {
      works[queries.stage].sequence = -1;
      mbarrier_arrive(shared.query_full(queries.stage));
    }
  }

 private:
  // The next row block's number. It is taken before it is needed, but not so early that another CTA could have begun
  // it.
  __device__ __forceinline__ void take_item() {
    if ((threadIdx.x & 31) == 0) taken = gridDim.x + atomicAdd(p.counter, 1u);
  }
  __device__ __forceinline__ int next_item() const { return warp_uniform(static_cast<int>(taken)); }

  __device__ __forceinline__ void load_query(const PagedWork& work) const {
    const std::uint32_t full = shared.query_full(queries.stage);
    mbarrier_arrive_expect_tx(full, Tile::kBoxes * plan.row_heads * plan.row_tokens * 128);
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) {
      tma_load_4d(shared.query(queries.stage) + box * Tile::kQueryBox, query, box * 64, work.head,
                  work.begin + work.first, 0, full);
    }
  }

  // first_row: of the head's keys in page 0.
  __device__ __forceinline__ void load_tiles(const PagedWork& work, int first_row) {
    constexpr int kLoads = Tile::kByGroups ? 1 : Tile::kBoxes;  // of the same keys
    static_assert(Tile::kKeys / 16 * kLoads <= 32);
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int loads = Tile::kKeys / plan.box_rows * kLoads, box = lane % kLoads;
    const int key = lane / kLoads * plan.box_rows;  // of this lane's TMA load, within a tile
    const int row_of_page = static_cast<int>(p.pool_block / p.width), to_values = p.kv_heads * p.block;
    const std::int32_t* const table = p.block_table + work.sequence * p.table_columns;
    // The row of this lane's keys in a tile.
    const auto find_row = [&](int tile) {
      const int position = tile * Tile::kKeys + key;
      if (lane >= loads || position >= work.high || position + plan.box_rows <= work.low) return kOutside;
      const int column = divided(position, plan.by_block), page = table[column];
      return (page >= 0 && page < p.blocks ? page : 0) * row_of_page + first_row + position - column * p.block;
    };
    const auto load = [&](std::uint32_t to, std::uint32_t full, int row) {
      if (lane == 0) mbarrier_arrive_expect_tx(full, Tile::kKeyBytes);
      __syncwarp();
      if (lane >= loads) return;
      if constexpr (Tile::kByGroups) {
        tma_load_4d(to + key / 8 * Tile::kGroupBytes, pool, 0, row, 0, 0, full);
      } else {
        tma_load_2d(to + box * Tile::kKeyBox + key * 128, pool, box * 64, row, full);
      }
    };
    const auto load_keys = [&](int row) {
      mbarrier_wait(shared.key_empty(keys.stage), keys.parity);
      load(shared.key(keys.stage), shared.key_full(keys.stage), row);
      keys.advance();
    };
    int row = find_row(work.tiles.end - 1);
    load_keys(row);
    for (int tile = work.tiles.end - 1; tile >= work.tiles.begin; --tile) {
      if (tile == work.tiles.begin) take_item();
      const int next = tile > work.tiles.begin ? find_row(tile - 1) : kOutside;
      if (tile > work.tiles.begin) load_keys(next);
      mbarrier_wait(shared.value_empty(values.stage), values.parity);
      load(shared.value(values.stage), shared.value_full(values.stage), row < 0 ? row : row + to_values);
      values.advance();
      row = next;
    }
  }
};

// Zeros in the rows of the last tile's values that lie behind the sequence's end, within its last page.
template <class Tile>
__device__ __forceinline__ void clear_values(const PagedPrefillPlan& plan, const PagedWork& work,
                                             const WgmmaConsumer<Tile>& consumer) {
  constexpr int kBarrier = 5, kRowWords = 128 / 16;
  const int used = work.length - (work.tiles.end - 1) * Tile::kKeys;
  if (used >= Tile::kKeys || used % plan.box_rows == 0) return;
  const int rows = plan.box_rows - used % plan.box_rows;
  mbarrier_wait(consumer.shared.value_full(consumer.values.stage), consumer.values.parity);
  const std::uint32_t tile = consumer.shared.value(consumer.values.stage);
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kBoxes * rows * kRowWords; i += Tile::kConsumerThreads) {
    const int word = i % kRowWords, box = i / kRowWords % Tile::kBoxes, row = used + i / kRowWords / Tile::kBoxes;
    const std::uint32_t to = tile + row / 8 * Tile::kGroupBytes + row % 8 * 128 + box * Tile::kColumnsBytes + word * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  named_barrier_sync(kBarrier, Tile::kConsumerThreads);
}

// A row of the row block: of q and of the result.
struct PagedRow {
  int token, head;
  bool inside;
};

__device__ __forceinline__ PagedRow row_of(const PagedPrefill& p, const PagedPrefillPlan& plan, const PagedWork& work,
                                           int row) {
  const int local = divided(row, plan.by_row_heads), head = row - local * plan.row_heads;
  const int token = work.first + local;
  return {work.begin + token, work.head + head,
          local < plan.row_tokens && head < work.heads && token < work.count && work.begin + token < p.tokens};
}

template <class T>
__device__ __forceinline__ T* address_of(const PagedPrefill& p, const PagedRow& row) {
  return static_cast<T*>(p.out) + (std::int64_t{row.token} * p.heads + row.head) * p.width;
}

// The warp's 16 rows of the result, staged in shared memory, to memory: 16 bytes a lane, whole rows at a time.
template <class Tile>
__device__ __forceinline__ void store_staged(const PagedPrefill& p, const PagedPrefillPlan& plan, const PagedWork& work,
                                             std::uint32_t staged, int first) {
  constexpr int kChunks = Tile::kBoxes * 8, kRowsAtOnce = 32 / kChunks;
  const int lane = static_cast<int>(threadIdx.x) & 31, chunk = lane % kChunks;
  const std::uint32_t from = staged + chunk / 8 * Tile::kWarpOutBox;
#pragma unroll
  for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
    const int row = i * kRowsAtOnce + lane / kChunks;
    const PagedRow at = row_of(p, plan, work, first + row);
    const uint4 value = SharedWords{from + row * 128 + (chunk % 8 ^ row % 8) * 16}.four(0);
    if (at.inside && chunk * 8 < p.width) {
      reinterpret_cast<uint4*>(address_of<typename Tile::T>(p, at))[chunk] = value;
    }
  }
}

// A consumer warpgroup's share of a row block.
template <class Tile>
__device__ __forceinline__ void attend_row_block(const PagedPrefill& p, const PagedPrefillPlan& plan,
                                                 const PagedWork& work, WgmmaConsumer<Tile>& consumer) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  float out[Tile::kWidth / 2];
  SoftmaxRows rows{};
  PagedRow own[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    own[half] = row_of(p, plan, work, warp * 16 + lane / 4 + half * 8);
    const int position = work.length - work.count + min(own[half].token - work.begin, work.count - 1);
    int low = 0;
    if (p.window > 0) low = position - p.window + 1;
    if (p.chunk > 0) low = max(low, position / p.chunk * p.chunk);
    rows.first_key[half] = low - 2 * (lane & 3);
    rows.last_key[half] = min(position, work.length - 1) - 2 * (lane & 3);
    rows.maximum[half] = minus_infinity();
    if (p.sinks != nullptr && own[half].inside) {
      rows.maximum[half] = p.sinks[own[half].head] / p.scale;
      // In one of the quad's four lanes, whose sums are added up.
      rows.sum[half] = (lane & 3) == 0 && rows.maximum[half] > minus_infinity() ? 1.0f : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < Tile::kWidth / 2; ++i) out[i] = 0;
  const auto prepare = [&] { clear_values<Tile>(plan, work, consumer); };
  if (work.tiles.end <= work.tiles.begin) {
    consumer.skip();
  } else if (p.window > 0 || p.chunk > 0) {
    consumer.template attend<true>(work.tiles, rows, out, prepare);
  } else {
    consumer.template attend<false>(work.tiles, rows, out, prepare);
  }
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = row_total(rows, half);
    inverse[half] = total == 0 ? 0.0f : __fdividef(1.0f, total);
  }
  if constexpr (Tile::kHasOut) {
    const std::uint32_t staged = consumer.shared.out(warp);
    __syncwarp();
    stage_rows<Tile>(staged, out, inverse);
    __syncwarp();
    store_staged<Tile>(p, plan, work, staged, warp * 16);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_row<Tile>(address_of<typename Tile::T>(p, own[half]), half, own[half].inside, p.width, true, out,
                      inverse[half]);
    }
  }
}

// A consumer warpgroup.
template <class Tile>
__device__ __forceinline__ void consume_pages(const PagedPrefill& p, const PagedPrefillPlan& plan,
                                              const PagedWork* works, WgmmaShared<Tile> shared, int warpgroup) {
  WgmmaConsumer<Tile> consumer{.shared = shared, .warpgroup = warpgroup, .scale_log2 = p.scale * kLog2e};
  consumer.take_turns();
  while (true) {
    mbarrier_wait(shared.query_full(consumer.queries.stage), consumer.queries.parity);
    const PagedWork work = works[consumer.queries.stage];
    if (work.sequence < 0) break;
    attend_row_block<Tile>(p, plan, work, consumer);
  }
  consumer.end_turns();
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    paged_prefill_wgmma(const __grid_constant__ PagedPrefill p, const __grid_constant__ PagedPrefillPlan plan,
                        const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap pool) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ PagedWork works[Tile::kQueryStages];
  const WgmmaShared<Tile> shared{(shared_address(memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(query), prefetch_tensor_map(pool);
    shared.init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == Tile::kWarpgroups) {
    setmaxnreg_dec<Tile::kProducerRegisters>();
    if (threadIdx.x < Tile::kConsumerThreads + 32) {
      PageProducer<Tile>{.p = p, .plan = plan, .query = query, .pool = pool, .shared = shared, .works = works}.run();
    }
  } else {
    setmaxnreg_inc<Tile::kConsumerRegisters>();
    consume_pages<Tile>(p, plan, works, shared, warpgroup);
  }
}

template <class Tile>
int launch_pages(const PagedPrefill& p, const PagedPrefillPlan& plan, Stream stream) {
  static_assert(Tile::kKeys == paged_keys(Tile::kWidth) && Tile::kRows == paged_rows(Tile::kWidth));
  TensorMap query, pool;
  const std::int64_t row_bytes = std::int64_t{p.width} * 2;
  if (const int code = encode_tensor_map(TensorMap4dSpec{.base = p.q,
                                                         .middle = p.tokens,
                                                         .rows = p.heads,
                                                         .columns = p.width,
                                                         .outer_bytes = p.tokens * p.heads * row_bytes,
                                                         .middle_bytes = p.heads * row_bytes,
                                                         .row_bytes = row_bytes,
                                                         .box_rows = plan.row_heads,
                                                         .box_middle = plan.row_tokens},
                                         query)) {
    return code;
  }
  const std::int64_t pool_rows = p.blocks * (p.pool_block / p.width);
  const int code = Tile::kByGroups ? encode_tensor_map(TensorMap4dSpec{.base = p.pool,
                                                                       .outer = plan.box_rows / 8,
                                                                       .middle = p.width / 64,
                                                                       .rows = pool_rows,
                                                                       .columns = 64,
                                                                       .outer_bytes = 8 * row_bytes,
                                                                       .middle_bytes = 128,
                                                                       .row_bytes = row_bytes,
                                                                       .box_rows = 8,
                                                                       .box_middle = Tile::kBoxes,
                                                                       .box_outer = plan.box_rows / 8},
                                                       pool)
                                   : encode_tensor_map(TensorMapSpec{.base = p.pool,
                                                                     .rows = pool_rows,
                                                                     .columns = p.width,
                                                                     .row_bytes = row_bytes,
                                                                     .box_rows = plan.box_rows,
                                                                     .box_columns = 64,
                                                                     .swizzle = true},
                                                       pool);
  if (code != 0) return code;
  return launch_kernel(
      paged_prefill_wgmma<Tile>,
      {.blocks = dim3(static_cast<unsigned>(plan.ctas)), .threads = Tile::kThreads, .shared_bytes = Tile::kSharedBytes},
      stream, p, plan, query, pool);
}

template <class T>
int launch_paged_prefill(const PagedPrefill& p, const PagedPrefillPlan& plan, Stream stream) {
  if (plan.width == 64) return launch_pages<WgmmaTile<T, 64, 3, 128, 2, 2, true>>(p, plan, stream);
  if (plan.width == 96) return launch_pages<WgmmaTile<T, 96, 2, 128, 2, 2, true>>(p, plan, stream);
  if (p.width == 128) return launch_pages<WgmmaTile<T, 128, 2, 128, 2, 2, true, true>>(p, plan, stream);
  if (plan.width == 128) return launch_pages<WgmmaTile<T, 128, 2, 128, 2, 2, true>>(p, plan, stream);
  if (p.width % 64 == 0) return launch_pages<WgmmaTile<T, 256, 2, 80, 2, 1, false, true>>(p, plan, stream);
  return launch_pages<WgmmaTile<T, 256, 2, 80, 2, 1>>(p, plan, stream);
}

}  // namespace
}  // namespace untorch::kernels::cuda
