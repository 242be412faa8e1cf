// Stage loads and epilogues of the NVFP4 MoE grouped GEMMs, for mma.sync and WGMMA alike.
//
// A stage: x, rows of 128 bytes for 64 k, 16-byte chunks XOR-swizzled by row; the weight's bytes, 32 a row for 64 k,
// swizzled by row; block scales, 4 bytes a row. In gate_up's GEMM 8 of 16 weight rows of a tile are the gate's and 8
// the same of up, interleaved, so that the epilogue has both accumulators of a column for SwiGLU.
#pragma once

#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/moe/nvfp4_mainloop.cuh"
#include "kernels/cuda/moe/nvfp4_moe.h"

namespace untorch::kernels::cuda {

// The weight of gate_up (w13) or down (w2).
template <bool GateUp>
struct MoeWeight {
  // An expert's matrix is [num_rows, k].
  __device__ static std::int64_t num_rows(const Nvfp4Moe& p) { return GateUp ? 2 * p.intermediate : p.k; }
  __device__ static std::int64_t k(const Nvfp4Moe& p) { return GateUp ? p.k : p.intermediate; }
  __device__ static const std::uint8_t* codes(const Nvfp4Moe& p) { return GateUp ? p.w13 : p.w2; }
  __device__ static const std::uint8_t* scales(const Nvfp4Moe& p) { return GateUp ? p.w13_scale : p.w2_scale; }
  // The weight's row that is row `row` of the tile with first output column n0; -1: out of bounds.
  __device__ static __forceinline__ std::int64_t weight_row(const Nvfp4Moe& p, int n0, int row) {
    if constexpr (GateUp) {
      const int at = n0 + row / 16 * 8 + row % 8;
      return at < p.intermediate ? at + (row & 8 ? p.intermediate : 0) : -1;
    } else {
      return n0 + row < p.k ? n0 + row : -1;
    }
  }
};

// A thread's cp.async loads of the stages, in the order of k.
template <class Config, bool GateUp>
class MoeStageLoader {
  using Weight = MoeWeight<GateUp>;
  static constexpr int kRowChunks = 2 * Config::kKGroups, kRowStep = Config::kThreads / kRowChunks,
                       kXChunks = 8 * Config::kKGroups, kXStep = Config::kThreads / kXChunks,
                       kXCopies = Config::kTileM / kXStep;
  static constexpr int kStageK = Config::kKGroups * kMoeKGroup, kCodeCopies = Config::kTileN / kRowStep,
                       kScaleThreads = Config::kTileN * Config::kKGroups;
  static constexpr unsigned kHasScales = 1, kHasCodes = 2, kHasX = 8;  // the latter two shifted by the copy
  static_assert(kCodeCopies <= 2 && kRowStep % 16 == 0 && kScaleThreads <= Config::kThreads);

 public:
  __device__ __forceinline__ MoeStageLoader(const Nvfp4Moe& p, const ExpertTile& tile, int n0) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t k = Weight::k(p);
    left_ = static_cast<int>(k), groups_ = (left_ + kMoeKGroup - 1) / kMoeKGroup;
    whole_ = k % kMoeKGroup == 0 ? kStageK : left_ + 1;  // otherwise scales are not aligned
    const std::int64_t matrix = tile.expert * Weight::num_rows(p) * k;
    const int tile_row = thread / kRowChunks, chunk = thread % kRowChunks;
    const std::int64_t row = Weight::weight_row(p, n0, tile_row);
    has_ = (row >= 0 ? kHasCodes : 0) | (Weight::weight_row(p, n0, tile_row + kRowStep) >= 0 ? 2 * kHasCodes : 0);
    codes_ = Weight::codes(p) + (matrix + (row >= 0 ? row : 0) * k) / 2 + chunk * 16;
    row_step_bytes_ = static_cast<std::uint32_t>(k) / 2 * (kRowStep / (GateUp ? 2 : 1));
    codes_to_ = Config::kXBytes + tile_row * (Config::kKGroups * 32) +
                ((chunk / 2 ^ moe_swizzle<Config::kKGroups>(tile_row)) * 2 + chunk % 2) * 16;
    const std::int64_t scale_row = thread < kScaleThreads ? Weight::weight_row(p, n0, thread / Config::kKGroups) : -1;
    has_ |= scale_row >= 0 ? kHasScales : 0;
    scales_ = Weight::scales(p) + (matrix + (scale_row >= 0 ? scale_row : 0) * k) / 16 + thread % Config::kKGroups * 4;
    const int x_row = thread / kXChunks, x_chunk = thread % kXChunks;
    x_to_ = x_chunk / 8 * Config::kTileM * 128 + x_row * 128 + ((x_chunk ^ x_row) & 7) * 16;
    x_ = static_cast<const char*>(GateUp ? p.permuted_x : p.act);
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) {
      const int at = x_row + i * kXStep;
      has_ |= at < tile.rows ? kHasX << i : 0;
      const int position = tile.begin + (at < tile.rows ? at : 0);
      const int from = GateUp ? p.sorted_pairs[position] / static_cast<int>(p.top_k) : position;
      x_rows_[i] = static_cast<std::uint32_t>(from) * (groups_ * 8) + x_chunk;
    }
  }

  __device__ __forceinline__ int steps() const { return (groups_ + Config::kKGroups - 1) / Config::kKGroups; }

  // The next stage to shared memory at `to`, with the first M rows of x; zeros out of bounds.
  template <int M = Config::kTileM>
  __device__ __forceinline__ void load(unsigned char* memory, std::uint32_t to) {
    if (left_ >= whole_) [[likely]] {
#pragma unroll
      for (int i = 0; i < kCodeCopies; ++i) {
        cp_async_16_l2_128(to + codes_to_ + i * (kRowStep * Config::kKGroups * 32), codes_ + i * row_step_bytes_,
                           has_ & kHasCodes << i ? 16 : 0);
      }
      if (kScaleThreads == Config::kThreads || threadIdx.x < kScaleThreads) {
        cp_async_4(to + Config::kXBytes + Config::kWeightBytes + threadIdx.x * 4, scales_, has_ & kHasScales ? 4 : 0);
      }
      load_x<M>(to, true);
    } else {
      load_unaligned(memory, to);
      load_x<M>(to, static_cast<int>(threadIdx.x) % kXChunks / 8 * kMoeKGroup < left_);
    }
    left_ -= kStageK, codes_ += kStageK / 2, scales_ += kStageK / 16, x_ += kStageK * 2;
  }

 private:
  template <int M>
  __device__ __forceinline__ void load_x(std::uint32_t to, bool has_group) const {
#pragma unroll
    for (int i = 0; i < M / kXStep; ++i) {
      cp_async_16(to + x_to_ + i * kXStep * 128, x_ + std::uint64_t{x_rows_[i]} * 16,
                  has_group && has_ & kHasX << i ? 16 : 0);
    }
  }

  // Where k ends within the stage, or is no multiple of 64: weight rows are 8-byte aligned, scales not at all.
  __device__ __forceinline__ void load_unaligned(unsigned char* memory, std::uint32_t to) const {
    const int thread = static_cast<int>(threadIdx.x), left = left_ - thread % kRowChunks * 32;
#pragma unroll
    for (int i = 0; i < kCodeCopies; ++i) {
      const std::uint8_t* const from = codes_ + i * row_step_bytes_;
      const std::uint32_t at = to + codes_to_ + i * (kRowStep * Config::kKGroups * 32);
      cp_async_8(at, from, left > 0 && has_ & kHasCodes << i ? 8 : 0);
      cp_async_8(at + 8, from + 8, left > 16 && has_ & kHasCodes << i ? 8 : 0);
    }
    if (thread >= kScaleThreads) return;
    const int scales_left = has_ & kHasScales ? left_ / 16 - thread % Config::kKGroups * 4 : 0;
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < scales_left) word |= std::uint32_t{scales_[i]} << 8 * i;
    }
    *reinterpret_cast<std::uint32_t*>(memory + Config::kXBytes + Config::kWeightBytes + thread * 4) = word;
  }

  const std::uint8_t *codes_, *scales_;
  const char* x_;
  std::uint32_t row_step_bytes_;    // from a weight row to that of the second load
  std::uint32_t x_rows_[kXCopies];  // in 16 bytes
  int left_, whole_;                // k that are not loaded yet; from how many on a stage is aligned
  int groups_, codes_to_, x_to_;
  unsigned has_;  // what is in bounds: kHas…
};

// Epilogue of gate_up, kTileN / 2 columns: global scales, biases, SwiGLU, rounding, act in permuted order. sums: the
// accumulators, [kWarpSplitK][kTileM][kAccStride] in shared memory.
template <class T, class Config>
__device__ __forceinline__ void epilogue_gate_up(const Nvfp4Moe& p, const ExpertTile& tile, int n0, const float* sums) {
  constexpr int kColumns = Config::kTileN / 2, kSpan = kColumns < kMoeKGroup ? kColumns : kMoeKGroup;
  constexpr int kPart = kSpan / 8, kParts = kColumns / kPart;  // contiguous in act, one store; of a row
  struct alignas(2 * kPart) Part {
    T values[kPart];
  };
  const float* const global = p.w13_global + (p.two_scales ? 2 : 1) * tile.expert;
  const float gate_scale = global[0] * Nvfp4Values<T>::kUnshift,
              up_scale = global[p.two_scales ? 1 : 0] * Nvfp4Values<T>::kUnshift;
  const std::int64_t row_bytes = p.act_stride * 2;
  const int offset = n0 % kMoeKGroup / 16 * 2;  // of a part in its eight positions
  char* const out = static_cast<char*>(p.act) + tile.begin * row_bytes + (n0 / kMoeKGroup * kMoeKGroup + offset) * 2;
  const float* const bias = p.w13_bias == nullptr ? nullptr : p.w13_bias + tile.expert * 2 * p.intermediate + n0;
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows * kParts; i += Config::kThreads) {
    const int row = i / kParts, group = i % kParts / 8, chunk = i % 8;
    if (n0 + group * kMoeKGroup >= p.act_stride) continue;
    Part part;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const int c = group * kMoeKGroup + permuted_k(chunk * 8 + offset + j) - n0 % kMoeKGroup;
      const float* const gate = sums + row * Config::kAccStride + c / 8 * 16 + c % 8;
      float gate_sum = gate[0], up_sum = gate[8];
      if constexpr (Config::kWarpSplitK == 2)
        gate_sum += gate[Config::kAccPlane], up_sum += gate[Config::kAccPlane + 8];
      gate_sum *= gate_scale, up_sum *= up_scale;
      if (bias != nullptr && n0 + c < p.intermediate) gate_sum += bias[c], up_sum += bias[c + p.intermediate];
      part.values[j] = narrow<T>(swiglu(p.swiglu, gate_sum, up_sum));
    }
    *reinterpret_cast<Part*>(out + row * row_bytes + group * (2 * kMoeKGroup) + chunk * 16) = part;
  }
}

// Epilogue of down, kTileN columns: global scale, bias, the pair's router weight; float32.
template <class T, class Config>
__device__ __forceinline__ void epilogue_down(const Nvfp4Moe& p, const ExpertTile& tile, int n0, const float* sums) {
  constexpr int kQuads = Config::kTileN / 4;
  const float scale = p.w2_global[tile.expert] * Nvfp4Values<T>::kUnshift;
  static_assert(Config::kThreads % kQuads == 0);
  const int quad = static_cast<int>(threadIdx.x) % kQuads;
  if (n0 + quad * 4 >= p.k) return;
  float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (p.w2_bias != nullptr) {
    bias = *reinterpret_cast<const float4*>(p.w2_bias + tile.expert * p.k + n0 + quad * 4);
  }
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows * kQuads; i += Config::kThreads) {
    const int row = i / kQuads, pair = p.sorted_pairs[tile.begin + row];
    const float factor = p.topk_weights[pair];
    const float* const own = sums + row * Config::kAccStride + quad * 4;
    float4 sum = *reinterpret_cast<const float4*>(own);
    if constexpr (Config::kWarpSplitK == 2) {
      const float4 other = *reinterpret_cast<const float4*>(own + Config::kAccPlane);
      sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
    *reinterpret_cast<float4*>(p.pair_out + pair * p.k + n0 + quad * 4) =
        make_float4((sum.x * scale + bias.x) * factor, (sum.y * scale + bias.y) * factor,
                    (sum.z * scale + bias.z) * factor, (sum.w * scale + bias.w) * factor);
  }
}

inline constexpr std::int64_t kMoeMaxK = 1 << 24;  // so that 128 weight rows are less than 4 GiB apart

template <class Config, bool GateUp, class Kernel>
int launch_moe_gemm(Kernel* kernel, const Nvfp4Moe& p, Stream stream) {
  // act has zeros up to whole groups of 64.
  const std::int64_t k = GateUp ? p.k : p.intermediate, columns = GateUp ? p.act_stride : p.k,
                     step = GateUp ? Config::kTileN / 2 : Config::kTileN;
  const std::int64_t tiles_n = (columns + step - 1) / step,
                     chunks = GateUp ? p.tokens * p.permuted_stride : p.pairs() * p.act_stride;
  if (tiles_n * p.num_tiles > 0x7fffffff || k > kMoeMaxK || chunks / 8 > 0xffffffff) return kNoKernel;
  // With a small K fewer stages are used, which leaves room for more CTAs an SM.
  constexpr int kStageK = Config::kKGroups * kMoeKGroup;
  const std::int64_t steps = (k + kStageK - 1) / kStageK;
  const int stages = steps < Config::kStages ? static_cast<int>(steps) : Config::kStages;
  const int used = stages * Config::kStageBytes > Config::kAccumulatorBytes ? stages * Config::kStageBytes
                                                                            : Config::kAccumulatorBytes;
  if (Config::kSharedBytes > 48 * 1024) {
    const cudaError_t code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
    if (code != cudaSuccess) return code;
  }
  kernel<<<static_cast<unsigned>(tiles_n * p.num_tiles), Config::kThreads, static_cast<unsigned>(used + Config::kAlign),
           stream>>>(p, static_cast<int>(tiles_n));
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
