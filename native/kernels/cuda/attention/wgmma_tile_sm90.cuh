// The WGMMA attention tile of sm_90a: shared memory and its rings, the online softmax, and a consumer's loop over tiles
// of keys. flash_wgmma_sm90.cuh says how a CTA works; the kernels differ in where rows and keys come from and go to.
#pragma once

#include "kernels/cuda/attention/flash_tile.cuh"
#include "kernels/cuda/common/half_pair.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/sm90/mbarrier.cuh"
#include "kernels/cuda/sm90/warps.cuh"
#include "kernels/cuda/sm90/wgmma_shared.cuh"

namespace untorch::kernels::cuda {
namespace {

// Stages: of the rings of keys and of values; QueryStages: with two, the next tile's Q comes during this one; HasOut:
// with shared memory for the result; ByGroups: 8 keys with all of their columns come before the next 8, so that one TMA
// load brings whole keys. Otherwise all keys with 64 columns come before the next 64 columns.
template <class T_, int Width, int Warpgroups, int Keys, int Stages, int QueryStages, bool HasOut = false,
          bool ByGroups = false>
struct WgmmaTile {
  using T = T_;
  static constexpr int kWidth = Width, kWarpgroups = Warpgroups, kKeys = Keys;
  static constexpr int kStages = Stages, kQueryStages = QueryStages;
  static constexpr bool kHasOut = HasOut, kByGroups = ByGroups;
  static constexpr int kRows = 64 * Warpgroups, kConsumerThreads = 128 * Warpgroups, kThreads = kConsumerThreads + 128;
  static constexpr int kBoxes = (Width + 63) / 64;
  static constexpr int kQueryBox = kRows * 128, kKeyBox = kKeys * 128;  // bytes
  static constexpr int kQueryBytes = kBoxes * kQueryBox, kKeyBytes = kBoxes * kKeyBox;
  // From 64 columns of keys and values to the next, and from 8 keys to the next.
  static constexpr int kColumnsBytes = ByGroups ? 1024 : kKeyBox, kGroupBytes = ByGroups ? kBoxes * 1024 : 1024;
  static constexpr int kWarpOutBox = 16 * 128, kWarpOutBytes = kBoxes * kWarpOutBox;
  static constexpr int kOutBytes = HasOut ? 4 * Warpgroups * kWarpOutBytes : 0;
  static constexpr int kBarriers = 2 * kQueryStages + 4 * kStages;
  static constexpr int kSharedBytes =
      kQueryStages * kQueryBytes + 2 * kStages * kKeyBytes + kOutBytes + kBarriers * 8 + 1024;  // 1024: to align
  static_assert(kKeys % 16 == 0 && kKeyBox % 1024 == 0 && kSharedBytes <= 232448);
  // Of a thread, after setmaxnreg. The CTA's registers at launch are all there are.
  static constexpr int kConsumerRegisters = Warpgroups == 2 ? 240 : 160;
  static constexpr int kProducerRegisters = Warpgroups == 2 ? 24 : 32;
  static_assert(kConsumerThreads * kConsumerRegisters + 128 * kProducerRegisters <=
                65536 / kThreads / 8 * 8 * kThreads);
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
  __device__ __forceinline__ std::uint32_t out(int warp) const {
    return key(2 * Tile::kStages) + warp * Tile::kWarpOutBytes;
  }
  __device__ __forceinline__ std::uint32_t key_full(int stage) const {
    return key(2 * Tile::kStages) + Tile::kOutBytes + stage * 8;
  }
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

// What a consumer thread has of its two rows, g and g + 8 of a warp's 16.
struct SoftmaxRows {
  float maximum[2], sum[2];       // sum: of this thread's columns
  int first_key[2], last_key[2];  // that the row sees, less the thread's first column; first_key for windows alone
};

// Makes scores into exponentials; fade: what earlier exponentials are to be multiplied with.
template <class Tile, bool Masked, bool HasWindow>
__device__ __forceinline__ void online_softmax(float (&score)[Tile::kKeys / 2], SoftmaxRows& rows, float (&fade)[2],
                                               float scale_log2, int first_key) {
  if constexpr (Masked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int limit = rows.last_key[half] - first_key, low = rows.first_key[half] - first_key;
#pragma unroll
      for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (n * 8 + j > limit || (HasWindow && n * 8 + j < low)) score[4 * n + 2 * half + j] = minus_infinity();
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

// Eight columns of a row of the result for each tile of 8: divided by the sum, rounded. Every lane of the warp calls
// it.
template <class Tile>
__device__ __forceinline__ void store_row(typename Tile::T* to, int half, bool inside, int width, bool vector,
                                          const float (&out)[Tile::kWidth / 2], float inverse) {
  using T = typename Tile::T;
  const int lane = static_cast<int>(threadIdx.x) & 31, pair = lane & 3;
#pragma unroll
  for (int i = 0; i < Tile::kWidth / 32; ++i) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int from = 4 * (4 * i + j) + 2 * half;
      pairs[j] = pack_halves<T>(out[from] * inverse, out[from + 1] * inverse);
    }
    transpose_in_quad(pairs, lane);
    const int column = (4 * i + pair) * 8;
    if (!inside || column >= width) continue;
    if (vector) {
      *reinterpret_cast<uint4*>(to + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const auto bits = static_cast<std::uint16_t>(pairs[j / 2] >> (j & 1) * 16);
        if (column + j < width) memcpy(to + column + j, &bits, 2);
      }
    }
  }
}

// Normalises and rounds a warp's 16 rows of O, and stages them in shared memory for TMA stores: tiles of 64 columns
// with 128-byte swizzle.
template <class Tile>
__device__ __forceinline__ void stage_rows(std::uint32_t to, const float (&out)[Tile::kWidth / 2],
                                           const float (&inverse)[2]) {
  using T = typename Tile::T;
  const int lane = static_cast<int>(threadIdx.x) & 31, row = lane & 15;
#pragma unroll
  for (int n = 0; n < Tile::kWidth / 8; n += 2) {
    std::uint32_t pairs[4];  // of 8 columns, rows 0 to 7 and 8 to 15; of the next 8 columns
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = 4 * (n + i / 2) + i % 2 * 2;
      pairs[i] = pack_halves<T>(out[from] * inverse[i % 2], out[from + 1] * inverse[i % 2]);
    }
    const int chunk = n % 8 + lane / 16;
    stmatrix_x4(to + n / 8 * Tile::kWarpOutBox + row * 128 + (chunk ^ (row & 7)) * 16, pairs);
  }
}

// The sum over all columns of the thread's row; its inverse is 0 where the row sees no key.
__device__ __forceinline__ float row_total(const SoftmaxRows& rows, int half) {
  float total = rows.sum[half];
  total += __shfl_xor_sync(0xffffffffu, total, 1);
  total += __shfl_xor_sync(0xffffffffu, total, 2);
  return total;
}

// Tiles of keys that a warpgroup's rows read, and those of them that every row sees whole. Between end and block_end
// lie tiles that other warpgroups of the row block read.
struct KeyTiles {
  int begin, end, full_begin, full_end, block_end = 0;
};

// Where a consumer warpgroup is in the rings, and its turn.
template <class Tile>
struct WgmmaConsumer {
  static constexpr int kTurnThreads = 256;

  WgmmaShared<Tile> shared;
  int warpgroup;
  float scale_log2;
  RingPosition<Tile::kStages> keys, values;
  RingPosition<Tile::kQueryStages> queries;

  __device__ __forceinline__ void take_turns() const {
    if (warpgroup == Tile::kWarpgroups - 1) named_barrier_arrive(1, kTurnThreads);
  }
  // The last turn, which nobody takes.
  __device__ __forceinline__ void end_turns() const {
    if (warpgroup == 0) named_barrier_sync(1, kTurnThreads);
  }

  // In the place of attend(), for a row block that sees no key.
  __device__ __forceinline__ void skip() {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared.query_empty(queries.stage));
    queries.advance();
  }

  // In the place of attend(), for a warpgroup that sees none of the row block's tiles.
  __device__ __forceinline__ void skip(int tiles) {
    for (int tile = 0; tile < tiles; ++tile) skip_tile(tile > 0);
    skip();
  }

  // A tile that the warpgroup does not see. A row block has a turn less than tiles.
  __device__ __forceinline__ void skip_tile(bool has_turn) {
    const bool arrives = (threadIdx.x & 31) == 0;
    mbarrier_wait(shared.key_full(keys.stage), keys.parity);
    if (arrives) mbarrier_arrive(shared.key_empty(keys.stage));
    keys.advance();
    if (has_turn) {
      named_barrier_sync(my_turn(), kTurnThreads);
      named_barrier_arrive(next_turn(), kTurnThreads);
    }
    mbarrier_wait(shared.value_full(values.stage), values.parity);
    if (arrives) mbarrier_arrive(shared.value_empty(values.stage));
    values.advance();
  }

  __device__ __forceinline__ int my_turn() const { return 1 + warpgroup; }
  __device__ __forceinline__ int next_turn() const {
    return 1 + (warpgroup == Tile::kWarpgroups - 1 ? 0 : warpgroup + 1);
  }

  // Attends over the tiles, of which there is one at least, from the last to the first: the unnormalised result goes to
  // out, which is 0 before. prepare(): before the values of the last tile are read.
  template <bool HasWindow, class Prepare>
  __device__ __forceinline__ void attend(const KeyTiles& tiles, SoftmaxRows& rows, float (&out)[Tile::kWidth / 2],
                                         Prepare&& prepare) {
    using T = typename Tile::T;
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int begin = HasWindow ? tiles.begin : 0, full_begin = HasWindow ? tiles.full_begin : 0;
    float score[Tile::kKeys / 2];
    std::uint32_t weights[Tile::kKeys / 4];
    const auto release = [&](std::uint32_t empty) {
      if (lane == 0) mbarrier_arrive(empty);
    };
    const auto issue_scores = [&] {
      const std::uint32_t query = smem_descriptor(shared.query(queries.stage) + warpgroup * 64 * 128);
      const std::uint32_t key = smem_descriptor(shared.key(keys.stage));
#pragma unroll
      for (int k = 0; k < Tile::kWidth / 16; ++k) {
        const std::uint32_t a = query + (k / 4 * Tile::kQueryBox + k % 4 * 32) / 16;
        const std::uint32_t b = key + (k / 4 * Tile::kColumnsBytes + k % 4 * 32) / 16;
        if (k == 0) {
          wgmma_shared<T, false, Tile::kGroupBytes>(score, a, b);
        } else {
          wgmma_shared<T, true, Tile::kGroupBytes>(score, a, b);
        }
      }
      wgmma_commit_group();
    };
    const auto issue_output = [&] {
      const std::uint32_t value = mn_major_descriptor(shared.value(values.stage), Tile::kColumnsBytes);
#pragma unroll
      for (int k = 0; k < Tile::kKeys / 16; ++k) {
        wgmma_mn_major<T, Tile::kGroupBytes>(out, weights + 4 * k, value + k * 2 * Tile::kGroupBytes / 16);
      }
      wgmma_commit_group();
    };
    const auto round_weights = [&] {
#pragma unroll
      for (int i = 0; i < Tile::kKeys / 4; ++i) weights[i] = pack_halves<T>(score[2 * i], score[2 * i + 1]);
    };

    float fade[2];
#pragma unroll 1
    for (int tile = tiles.block_end; tile > tiles.end; --tile) skip_tile(true);
    queries.make_uniform();
    mbarrier_wait(shared.query_full(queries.stage), queries.parity);
    mbarrier_wait(shared.key_full(keys.stage), keys.parity);
    wgmma_fence();
    issue_scores();
    wgmma_wait_group<0>();
    fence_registers(score);
    release(shared.key_empty(keys.stage));
    keys.advance();
    int tile = tiles.end - 1;
    if (tile >= tiles.full_end || HasWindow) {
      online_softmax<Tile, true, HasWindow>(score, rows, fade, scale_log2, tile * Tile::kKeys);
    } else {
      online_softmax<Tile, false, HasWindow>(score, rows, fade, scale_log2, tile * Tile::kKeys);
    }
    round_weights();
    prepare();

    // Scores of tile - 1, output of tile.
    const auto step = [&]<bool Masked>() {
      mbarrier_wait(shared.key_full(keys.stage), keys.parity);
      fence_registers(out);
      fence_registers(weights);
      named_barrier_sync(my_turn(), kTurnThreads);
      wgmma_fence();
      issue_scores();
      mbarrier_wait(shared.value_full(values.stage), values.parity);
      wgmma_fence();
      issue_output();
      named_barrier_arrive(next_turn(), kTurnThreads);
      wgmma_wait_group<1>();
      fence_registers(score);
      release(shared.key_empty(keys.stage));
      keys.advance();
      online_softmax<Tile, Masked, HasWindow>(score, rows, fade, scale_log2, (tile - 1) * Tile::kKeys);
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
    for (; tile > tiles.full_end && tile > begin; --tile) step.template operator()<true>();
    keys.make_uniform(), values.make_uniform();
#pragma unroll 1
    for (; tile > full_begin && tile > begin; --tile) step.template operator()<false>();
    if constexpr (HasWindow) {
#pragma unroll 1
      for (; tile > begin; --tile) step.template operator()<true>();
    }
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
};

}  // namespace
}  // namespace untorch::kernels::cuda
