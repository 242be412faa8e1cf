// Stage loads and epilogues of the MoE grouped GEMMs, for mma.sync and WGMMA alike.
//
// A stage: x, rows of 128 bytes for 64 k, 16-byte chunks XOR-swizzled by row; then the weight and its scales, as
// `Format` has them (nvfp4_format.cuh, int4_format.cuh). In gate_up's GEMM 8 of 16 weight rows of a tile are the gate's
// and 8 the same of up, interleaved, so that the epilogue has both accumulators of a column for SwiGLU.
#pragma once

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/moe/moe_weight.cuh"
#include "kernels/cuda/moe/swiglu.cuh"

namespace untorch::kernels::cuda {

// A thread's cp.async loads of the stages, in the order of k.
template <class Format, class Config, bool GateUp>
class MoeStageLoader {
  static constexpr int kXChunks = 8 * Config::kKGroups, kXStep = Config::kThreads / kXChunks,
                       kXCopies = Config::kTileM / kXStep, kStageK = Config::kKGroups * kMoeKGroup;

 public:
  __device__ __forceinline__ MoeStageLoader(const typename Format::Moe& p, const ExpertTile& tile, int n0)
      : weights_(p, tile, n0, has_) {
    const int thread = static_cast<int>(threadIdx.x);
    left_ = static_cast<int>(Format::template weight_k<GateUp>(p)), groups_ = (left_ + kMoeKGroup - 1) / kMoeKGroup;
    const int x_row = thread / kXChunks, x_chunk = thread % kXChunks;
    x_to_ = x_chunk / 8 * Config::kTileM * 128 + x_row * 128 + ((x_chunk ^ x_row) & 7) * 16;
    x_ = static_cast<const char*>(GateUp ? p.copied_x : p.act);
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
    if (left_ >= weights_.whole()) [[likely]] {
      weights_.load_whole(to, has_);
      load_x<M>(to, true);
    } else {
      weights_.load_partial(memory, to, has_, left_);
      load_x<M>(to, static_cast<int>(threadIdx.x) % kXChunks / 8 * kMoeKGroup < left_);
    }
    left_ -= kStageK, x_ += kStageK * 2;
    weights_.advance();
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

  unsigned has_ = 0;  // what is in bounds: kHas…
  typename Format::template WeightLoader<Config, GateUp> weights_;
  const char* x_;
  std::uint32_t x_rows_[kXCopies];  // in 16 bytes
  int left_;                        // k that are not loaded yet
  int groups_, x_to_;
};

// Epilogue of gate_up, kTileN / 2 columns: global scales, biases, SwiGLU, rounding, act in the order of x. sums: the
// accumulators, [kWarpSplitK][kTileM][kAccStride] in shared memory.
template <class Format, class T, class Config>
__device__ __forceinline__ void epilogue_gate_up(const typename Format::Moe& p, const ExpertTile& tile, int n0,
                                                 const float* sums) {
  constexpr int kColumns = Config::kTileN / 2, kSpan = kColumns < kMoeKGroup ? kColumns : kMoeKGroup;
  constexpr int kPart = kSpan / 8, kParts = kColumns / kPart;  // contiguous in act, one store; of a row
  struct alignas(2 * kPart) Part {
    T values[kPart];
  };
  float gate_scale = 1.0f, up_scale = 1.0f;
  if constexpr (Format::kHasGlobalScale) {
    const float2 scales = Format::template gate_up_scales<T>(p, tile.expert);
    gate_scale = scales.x, up_scale = scales.y;
  }
  const std::int64_t row_bytes = p.act_stride * 2;
  // Of a part in its eight positions, or in its 64 k.
  constexpr bool kPermutesK = Format::Moe::kPermutesK;
  const int offset = kPermutesK ? n0 % kMoeKGroup / 16 * 2 : n0 % kMoeKGroup;
  char* const out = static_cast<char*>(p.act) + tile.begin * row_bytes + (n0 / kMoeKGroup * kMoeKGroup + offset) * 2;
  const float* const bias = p.w13_bias == nullptr ? nullptr : p.w13_bias + tile.expert * 2 * p.intermediate + n0;
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows * kParts; i += Config::kThreads) {
    const int row = i / kParts, group = i % kParts / 8, chunk = i % 8;
    if (n0 + group * kMoeKGroup >= p.act_stride) continue;
    Part part;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const int c =
          group * kMoeKGroup + (kPermutesK ? permuted_k(chunk * 8 + offset + j) - n0 % kMoeKGroup : chunk * kPart + j);
      const float* const gate = sums + row * Config::kAccStride + c / 8 * 16 + c % 8;
      float gate_sum = gate[0], up_sum = gate[8];
      if constexpr (Config::kWarpSplitK == 2)
        gate_sum += gate[Config::kAccPlane], up_sum += gate[Config::kAccPlane + 8];
      if constexpr (Format::kHasGlobalScale) gate_sum *= gate_scale, up_sum *= up_scale;
      if (bias != nullptr && n0 + c < p.intermediate) gate_sum += bias[c], up_sum += bias[c + p.intermediate];
      part.values[j] = narrow<T>(swiglu(p.swiglu, gate_sum, up_sum));
    }
    *reinterpret_cast<Part*>(out + row * row_bytes + group * (2 * kMoeKGroup) + chunk * (kPermutesK ? 16 : 2 * kPart)) =
        part;
  }
}

// Epilogue of down, kTileN columns: global scale, bias, the pair's router weight; float32.
template <class Format, class T, class Config>
__device__ __forceinline__ void epilogue_down(const typename Format::Moe& p, const ExpertTile& tile, int n0,
                                              const float* sums) {
  constexpr int kQuads = Config::kTileN / 4;
  float scale = 1.0f;
  if constexpr (Format::kHasGlobalScale) scale = Format::template down_scale<T>(p, tile.expert);
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

template <class Format, class Config, bool GateUp, class Kernel>
int launch_moe_gemm(Kernel* kernel, const typename Format::Moe& p, Stream stream) {
  // act has zeros up to act_stride.
  const std::int64_t k = Format::template weight_k<GateUp>(p), columns = GateUp ? p.act_stride : p.k,
                     step = GateUp ? Config::kTileN / 2 : Config::kTileN;
  const std::int64_t tiles_n = (columns + step - 1) / step,
                     chunks = GateUp ? p.tokens * p.copied_stride : p.pairs() * p.act_stride;
  if (tiles_n * p.num_tiles > 0x7fffffff || k > kMoeMaxK || chunks / 8 > 0xffffffff) return kNoKernel;
  // With a small K fewer stages are used, which leaves room for more CTAs an SM.
  constexpr int kStageK = Config::kKGroups * kMoeKGroup;
  const std::int64_t steps = (k + kStageK - 1) / kStageK;
  const int stages = steps < Config::kStages ? static_cast<int>(steps) : Config::kStages;
  const int used = stages * Config::kStageBytes > Config::kAccumulatorBytes ? stages * Config::kStageBytes
                                                                            : Config::kAccumulatorBytes;
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(tiles_n * p.num_tiles)), how.threads = Config::kThreads;
  how.shared_bytes = used + Config::kAlign, how.max_shared_bytes = Config::kSharedBytes;
  how.pdl = p.pdl;
  return launch_kernel(kernel, how, stream, p, static_cast<int>(tiles_n));
}

}  // namespace untorch::kernels::cuda
