// The int4 layers of a decoder between one attention and the next, for one token: a persistent kernel (sm_90).
//
// A GEMV is bound by memory, and between two of them the memory is idle: a launch, the first addresses, the first
// bytes. Here one CTA an SM has a share of the outputs of all four layers, and four of its warps fill a ring in shared
// memory with their weights, one layer behind the other. They do not wait for what is multiplied: while the grid meets
// at a barrier between two layers, and while the kernel before this one ends, the next weights are on their way.
//
//   unit        16 outputs × 512 inputs, a stage of the ring: the first mma.sync operand (m16n8k32); x is the second,
//               two of whose 8 columns are used
//   outputs     2 × 8: neighbours, or 8 of gate and the same 8 of up
//   CTA         its units, one after another, from warp to warp, which leave 16 sums each in shared memory
//   grid        meets after o, gate_up and down: each CTA then reads all of their result
//
// Shared memory: x (the longest), a step and a sum of each of its groups, the sums of units, the ring.
//
// Roofline: memory; weights once, x from L2 once a CTA. Units are added up in a fixed order: results are deterministic.
// What costs is latency: decision 0067 has the clocks of its parts.
#include <algorithm>

#include "kernels/cuda/common/cooperative_launch.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/decoder/grid_barrier.cuh"
#include "kernels/cuda/gemm/bulk_ring.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/decoder_linears.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;  // that multiply
constexpr int kLoadingWarps = 4;
constexpr int kMaxStages = 48;
// Units of a loading warp that are on their way, of those that the ring has room for. More would make all else that
// goes through L2 wait: x, the barriers, instructions.
[[maybe_unused]] constexpr int kInFlight = 2;
constexpr int kMaxWidth = 8192;  // what the threads of a CTA keep in registers while they normalise it
constexpr int kOutputs = 16;     // of a unit
enum : int { kO, kGateUp, kDown, kNext, kLayers };
constexpr int kSpare = 24 * 1024;  // of an SM's shared memory, for the kernels beside this one

struct Layer {
  const char* weight = nullptr;
  const char* scales = nullptr;
  std::int64_t n = 0;
  int k = 0;
  int tiles = 0;  // of kOutputs
  int units = 0;  // of a tile
  // In tiles of 8 outputs: the first half of tile j is low_step · j, the other one high_step behind it.
  int low_step = 2, high_step = 1;
};

struct Problem {
  Layer layers[kLayers];
  int num_layers = kLayers;
  int group_bits = 0;
  const void *norm = nullptr, *next_norm = nullptr, *next_bias = nullptr, *x = nullptr, *residual = nullptr;
  void *hidden = nullptr, *activated = nullptr, *residual_out = nullptr, *out = nullptr;
  float eps = 0, next_eps = 0;
  int width = 0;
  // Shared memory, bytes.
  int steps_at = 0, partials_at = 0, ring_at = 0;
  int stages = 0, stage_bytes = 0;
  bool is_constant = false;
};

// One launch at a time is on the GPU: its shared memory leaves no room for a second one (shared_bytes_of).
[[maybe_unused]] __device__ GridBarrier grid_barrier;

#if __CUDA_ARCH__ >= 900
// Eight elements as float.
template <class T>
__device__ __forceinline__ void widen8(uint4 from, float (&to)[8]) {
  T values[8];
  memcpy(values, &from, 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = widen(values[i]);
}
template <class T>
__device__ __forceinline__ float rounded(float value) {
  return widen(static_cast<T>(value));
}
template <class T>
__device__ __forceinline__ uint4 narrow8(const float (&from)[8]) {
  uint4 to;
  T values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = static_cast<T>(from[i]);
  memcpy(&to, values, 16);
  return to;
}
__device__ __forceinline__ uint4 shared_16(const unsigned char* from) { return *reinterpret_cast<const uint4*>(from); }
#endif

// Weights in int4, ScaleRows scales for 128 inputs, or one for a longer group.
//
// x is split: in a group of kGroup inputs it is (128 · high + low) · step for integers of 8 bits and a float32 step, 15
// bits of the largest one. Both parts are columns of one mma.sync m16n8k32, whose first operand takes four codes a word
// with one lop3: half the instructions of 16-bit operands. Sums of a group are exact.
template <class T, int ScaleRows>
struct Int4Weights {
  static constexpr int kUnitK = 512;
  static constexpr int kGroup = 128 / ScaleRows;
  static constexpr int kHalfBytes = kUnitK * 4;  // of 8 outputs in a stage; behind both halves the scales
  static constexpr int stage_bytes(int group_bits) { return 2 * kHalfBytes + (kUnitK >> group_bits) * kOutputs * 4; }

#if __CUDA_ARCH__ >= 900
  // By a warp: two bulk copies for the weights, and cp.async for the scales, whose pieces are small (bulk copies have a
  // rate of one in some 25 clocks an SM). The mbarrier counts 33 arrivals.
  __device__ static __forceinline__ void load(const Layer& layer, int group_bits, int low, int k0, int length,
                                              std::uint32_t stage, std::uint32_t mbarrier, int lane) {
    if (lane == 0) mbarrier_arrive_expect_tx(mbarrier, 2 * length * 4);
    __syncwarp();
    if (lane < 2) {
      const std::int64_t tile = low + lane * layer.high_step;
      bulk_load(stage + lane * kHalfBytes, layer.weight + (tile * layer.k + k0) * 4, length * 4, mbarrier);
    }
    // Four lanes have the scales of a group, 16 bytes each.
    const int rows = (length + (1 << group_bits) - 1) >> group_bits;
    const std::int64_t column = (low + lane / 2 % 2 * layer.high_step) * 8 + lane % 2 * 4;
    const char* scales = layer.scales + (std::int64_t{(k0 >> group_bits) + lane / 4} * layer.n + column) * 4;
    for (int row = lane / 4; row < rows; row += 8, scales += layer.n * 32) {
      cp_async_16(stage + 2 * kHalfBytes + (row * 4 + lane % 4) * 16, scales, 16);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
  }

  // Shared memory for x: 64 bytes for 32 inputs, the high parts, then the low ones, each 8 bytes for lane t in the
  // order of a word's codes: 2t, 2t + 16, 2t + 1, 2t + 17, then 8 more each. v: eight inputs of a chunk, over the step;
  // the lanes have neighbouring chunks. Chunk c of four has the bytes 0 and 2 (c < 2), or 1 and 3, of the words c % 2.
  __device__ static __forceinline__ void store_x(unsigned char* x, int chunk, const float (&v)[8]) {
    const int c = chunk % 4;
    std::uint32_t words[2][4];  // high and low of lanes t
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int first = __float2int_rn(v[2 * t]), second = __float2int_rn(v[2 * t + 1]);
      const int first_high = (first + 64) >> 7, second_high = (second + 64) >> 7;
      words[0][t] = (first_high & 0xff) | (second_high & 0xff) << 16;
      words[1][t] = (first - (first_high << 7) & 0xff) | (second - (second_high << 7) & 0xff) << 16;
    }
    auto* const to = reinterpret_cast<std::uint32_t*>(x + chunk / 4 * 64) + c % 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const std::uint32_t own = words[half][t] << c / 2 * 8, both = own | __shfl_xor_sync(0xffffffffu, own, 2);
        if (half == c / 2) to[half * 8 + t * 2] = both;
      }
    }
  }

  // Outputs g and g + 8 of lane (g, t), in the lanes with t = 0. steps: of a group, its step and its Σ x.
  __device__ static __forceinline__ float2 multiply(const unsigned char* stage, int group_bits, int k0, int length,
                                                    const unsigned char* x, const float2* steps, int g, int t) {
    const unsigned char *const from = stage + (g * 4 + t) * 16, *const scales = stage + 2 * kHalfBytes + g * 4;
    x += k0 * 2 + g * 32 + t * 8;
    steps += k0 / kGroup;
    float2 acc{0, 0};
    if (length >= kUnitK) {
#pragma unroll
      for (int block = 0; block < kUnitK / 128; ++block)
        multiply_block(from, scales, group_bits, block, x, steps, g, acc);
    } else {
#pragma unroll 1
      for (int block = 0; block * 128 < length; ++block)
        multiply_block(from, scales, group_bits, block, x, steps, g, acc);
    }
    return acc;
  }

 private:
  __device__ static __forceinline__ void multiply_block(const unsigned char* from, const unsigned char* scales,
                                                        int group_bits, int block, const unsigned char* x,
                                                        const float2* steps, int g, float2& acc) {
    constexpr int kWords = 4 / ScaleRows;
    const uint4 low = shared_16(from + block * 512), high = shared_16(from + kHalfBytes + block * 512);
    const std::uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
    uint2 b[4];
    if (g < 2) {  // the lanes whose columns are used
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = *reinterpret_cast<const uint2*>(x + block * 256 + j * 64);
    }
#pragma unroll
    for (int q = 0; q < ScaleRows; ++q) {
      int sums[4] = {};
#pragma unroll
      for (int j = q * kWords; j < (q + 1) * kWords; ++j) {
        constexpr std::uint32_t kMask = 0x0f0f0f0fu;
        mma_u8s8(sums, words[0][j] & kMask, words[1][j] & kMask, words[0][j] >> 4 & kMask, words[1][j] >> 4 & kMask,
                 b[j].x, b[j].y);
      }
      const int inside = block * 128 + q * kGroup;
      const unsigned char* const at = scales + (inside >> group_bits) * (kOutputs * 4);
      const float2 of_x = steps[inside / kGroup];
      acc.x = add_group(acc.x, sums[0], sums[1], *reinterpret_cast<const std::uint32_t*>(at), of_x);
      acc.y = add_group(acc.y, sums[2], sums[3], *reinterpret_cast<const std::uint32_t*>(at + 32), of_x);
    }
  }
  // acc + Σ ((q - 8) · scale + zero) · x, of Σ q · high and Σ q · low.
  __device__ static __forceinline__ float add_group(float acc, int high, int low, std::uint32_t scale_and_zero,
                                                    float2 of_x) {
    T two[2];
    memcpy(two, &scale_and_zero, 4);
    const float scale = widen(two[0]), products = __int2float_rn(high * 128 + low) * of_x.x;
    return fmaf(scale, fmaf(-8.0f, of_x.y, products), fmaf(widen(two[1]), of_x.y, acc));
  }
  // d (16 × 8) += a (16 × 32) · b (32 × 8): fragments as of mma, four bytes along k where that has two halves.
  __device__ static __forceinline__ void mma_u8s8(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                                  unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#endif
};

#if __CUDA_ARCH__ >= 900
// A CTA's share of a layer: `tiles` tiles from the first one on.
struct Share {
  int first, tiles;
};
__device__ __forceinline__ Share share_of(const Layer& layer) {
  const std::int64_t tiles = layer.tiles;
  const auto first = static_cast<int>(tiles * blockIdx.x / gridDim.x);
  return {first, static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x) - first};
}

// A CTA's loads of all layers, one behind the other, by kLoadingWarps warps in turn.
template <class Weights>
__device__ __forceinline__ void load_units(const Problem& p, int warp, int lane, std::uint32_t ring, std::uint32_t full,
                                           std::uint32_t empty) {
  int stage = warp, parity = 1;  // a first wait returns at once
  int unit = warp;               // in its layer
  int behind = warp, behind_parity = 0, issued = 0;
  for (int layer = 0; layer < p.num_layers; ++layer) {
    const Layer own = p.layers[layer];
    const Share share = share_of(own);
    const int units = own.units, count = share.tiles * units;
    int part = unit % units, low = (share.first + unit / units) * own.low_step;
    for (; unit < count; unit += kLoadingWarps) {
      const int k0 = part * Weights::kUnitK, left = own.k - k0;
      if (issued++ >= kInFlight) {
        mbarrier_wait(full + behind * 8, behind_parity);
        behind += kLoadingWarps;
        if (behind >= p.stages) behind -= p.stages, behind_parity ^= 1;
      }
      mbarrier_wait(empty + stage * 8, parity);
      Weights::load(own, p.group_bits, low, k0, left < Weights::kUnitK ? left : Weights::kUnitK,
                    ring + stage * p.stage_bytes, full + stage * 8, lane);
      stage += kLoadingWarps;
      if (stage >= p.stages) stage -= p.stages, parity ^= 1;
      part += kLoadingWarps;
      while (part >= units) part -= units, low += own.low_step;
    }
    unit -= count;
  }
}

// Of the threads that multiply.
__device__ __forceinline__ void sync_multiplying() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }
#endif

template <class T, class Weights>
__global__ void __launch_bounds__(kThreads + 32 * kLoadingWarps, 1) decoder_linears_kernel(Problem p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kChunk = 8;  // elements in 16 bytes
  constexpr int kChunks = kMaxWidth / kChunk / kThreads;
  extern __shared__ __align__(128) unsigned char decoder_memory[];
  __shared__ std::uint64_t full_mbarriers[kMaxStages], empty_mbarriers[kMaxStages];
  __shared__ float warp_sums[kWarps];
  griddepcontrol_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const auto full = static_cast<std::uint32_t>(__cvta_generic_to_shared(full_mbarriers));
  const auto empty = static_cast<std::uint32_t>(__cvta_generic_to_shared(empty_mbarriers));
  if (thread < p.stages) {
    mbarrier_init(full + thread * 8, 33);
    mbarrier_init(empty + thread * 8, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warp >= kWarps) {
    if (!p.is_constant) griddepcontrol_wait();
    load_units<Weights>(p, warp - kWarps, lane,
                        static_cast<std::uint32_t>(__cvta_generic_to_shared(decoder_memory + p.ring_at)), full, empty);
    return;
  }
  unsigned char* const x = decoder_memory;
  auto* const steps = reinterpret_cast<float2*>(decoder_memory + p.steps_at);
  auto* const partials = reinterpret_cast<float*>(decoder_memory + p.partials_at);
  if (p.is_constant && blockIdx.x < 2 && thread * 64 < p.width) {  // 128 bytes each
    const void* const weight = blockIdx.x == 0 ? p.norm : p.next_norm;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const T*>(weight) + thread * 64));
  }
  griddepcontrol_wait();
  GridMeetings meetings(grid_barrier);  // of thread 0

  // x of a layer to shared memory, and its sums. The threads have neighbouring chunks of 8 elements.
  const auto put = [&](int chunk, float(&v)[8]) {
    constexpr int kGroupChunks = Weights::kGroup / kChunk;
    float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    float largest = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(v[e]));
#pragma unroll
    for (int step = 1; step < kGroupChunks; step *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, step);
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    // kLargest is 127 · 128 + 63. What is not finite makes the group's sum, and so the result, not finite.
    constexpr float kLargest = 16319.0f;
    const float bounded = fmaxf(largest, 1e-30f), step = bounded * (1.0f / kLargest),
                factor = kLargest * __frcp_rn(bounded);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] *= factor;
    Weights::store_x(x, chunk, v);
    if (chunk % kGroupChunks == 0) steps[chunk / kGroupChunks] = float2{step, sum};
  };
  const auto put_vector = [&](const void* from, int k) {
    const auto* const chunks = static_cast<const uint4*>(from);
    constexpr int kBatch = 4;
    for (int chunk = thread; chunk < k / kChunk; chunk += kBatch * kThreads) {  // whole warps: k is a multiple of 256
      uint4 packed[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (chunk + i * kThreads < k / kChunk) packed[i] = __ldcg(chunks + chunk + i * kThreads);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (chunk + i * kThreads >= k / kChunk) break;
        float v[8];
        widen8<T>(packed[i], v);
        put(chunk + i * kThreads, v);
      }
    }
  };
  const auto normalise = [&](const void* from, const void* weight, float eps, auto&& write) {
    const auto* const chunks = static_cast<const uint4*>(from);
    const int count = p.width / kChunk;
    uint4 packed[kChunks], weights[kChunks];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = i * kThreads + thread;
      if (chunk < count) {
        packed[i] = __ldcg(chunks + chunk);
        weights[i] = static_cast<const uint4*>(weight)[chunk];
      }
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (i * kThreads + thread < count) {
        float v[8];
        widen8<T>(packed[i], v);
#pragma unroll
        for (int e = 0; e < 8; ++e) squares = fmaf(v[e], v[e], squares);
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
    if (lane == 0) warp_sums[warp] = squares;
    sync_multiplying();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += warp_sums[w];
    const float factor = rsqrtf(sum / static_cast<float>(p.width) + eps);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = i * kThreads + thread;
      if (chunk < count) {
        float v[8], w[8];
        widen8<T>(packed[i], v);
        widen8<T>(weights[i], w);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = rounded<T>(rounded<T>(v[e] * factor) * w[e]);
        write(chunk, v);
      }
    }
  };

  int stage = warp, parity = 0;  // of this warp's next unit
  while (stage >= p.stages) stage -= p.stages, parity ^= 1;
  int unit = warp;  // in its layer
  for (int layer = 0; layer < p.num_layers; ++layer) {
    const Layer& own = p.layers[layer];
    const Share share = share_of(own);
    const int units = own.units, k = own.k, count = share.tiles * units;
    const bool pairs = layer == kGateUp;
    const int tile_bits = pairs ? 3 : 4, outputs = share.tiles << tile_bits;
    const std::int64_t n0 = std::int64_t{share.first} << tile_bits;
    // One call of each: code that is run for the first time waits for L2 as well.
    if (layer == kGateUp || layer == kNext) {
      const bool first = layer == kGateUp;
      normalise(first ? p.hidden : p.residual_out, first ? p.norm : p.next_norm, first ? p.eps : p.next_eps, put);
    } else {
      put_vector(layer == kDown ? p.activated : p.x, k);
    }
    // What this thread adds to its first output.
    const void* const addend = layer == kO      ? p.residual
                               : layer == kDown ? p.hidden
                               : layer == kNext ? p.next_bias
                                                : nullptr;
    const auto load_addend = [&](int i) {
      if (addend == nullptr || i >= outputs) return 0.0f;
      unsigned short bits;  // volatile: it stays in front of the products
      asm volatile("ld.global.cg.u16 %0, [%1];"
                   : "=h"(bits)
                   : "l"(static_cast<const unsigned short*>(addend) + n0 + i));
      T value;
      memcpy(&value, &bits, 2);
      return widen(value);
    };
    const float first_addend = load_addend(thread);
    sync_multiplying();

    int part = unit % units;
    for (; unit < count; unit += kWarps) {
      const int k0 = part * Weights::kUnitK, left = k - k0;
      const unsigned char* const from = decoder_memory + p.ring_at + stage * p.stage_bytes;
      mbarrier_wait(full + stage * 8, parity);
      const float2 sums = Weights::multiply(from, p.group_bits, k0, left, x, steps, lane / 4, lane % 4);
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) mbarrier_arrive(empty + stage * 8);
      if (lane % 4 == 0) {
        float* const to = partials + unit * kOutputs + lane / 4;
        to[0] = sums.x, to[8] = sums.y;
      }
      stage += kWarps;
      while (stage >= p.stages) stage -= p.stages, parity ^= 1;
      part += kWarps;
      while (part >= units) part -= units;
    }
    unit -= count;
    sync_multiplying();
    for (int i = thread; i < outputs; i += kThreads) {
      const float* const from = partials + (i >> tile_bits) * units * kOutputs + (i & ((1 << tile_bits) - 1));
      float sum = 0, up = 0;
#pragma unroll 8
      for (int u = 0; u < units; ++u) {
        sum += from[u * kOutputs];
        if (pairs) up += from[u * kOutputs + 8];
      }
      const float add = i == thread ? first_addend : load_addend(i);
      float value;
      if (pairs) {
        const float gate = rounded<T>(sum);
        value = rounded<T>(gate / (1.0f + __expf(-gate))) * rounded<T>(up);
      } else if (layer == kNext) {
        value = sum + add;
      } else {
        value = add + rounded<T>(sum);
      }
      void* const to = layer == kO ? p.hidden : pairs ? p.activated : layer == kDown ? p.residual_out : p.out;
      static_cast<T*>(to)[n0 + i] = static_cast<T>(value);
    }
    if (layer == kNext) break;
    sync_multiplying();
    if (thread == 0) {
      meetings.arrive();
      meetings.wait();
    }
    sync_multiplying();
  }
  if (p.num_layers == kNext) {
    normalise(p.residual_out, p.next_norm, p.next_eps, [&](int chunk, const float(&v)[8]) {
      if (chunk % gridDim.x == blockIdx.x) static_cast<uint4*>(p.out)[chunk] = narrow8<T>(v);
    });
  }
#endif
}

template <class Weights>
Problem problem_of(const DecoderLinears& p) {
  Problem out;
  const DecoderLinear* const given[] = {&p.o, &p.gate_up, &p.down, &p.next};
  out.num_layers = p.next.n == 0 ? kNext : kLayers;
  int longest = 0, partials = 0;
  for (int i = 0; i < out.num_layers; ++i) {
    Layer& layer = out.layers[i];
    layer.weight = static_cast<const char*>(given[i]->weight);
    layer.scales = static_cast<const char*>(given[i]->scales);
    layer.n = given[i]->n, layer.k = static_cast<int>(given[i]->k);
    layer.tiles = static_cast<int>(layer.n / kOutputs);
    layer.units = (layer.k + Weights::kUnitK - 1) / Weights::kUnitK;
    if (i == kGateUp) layer.low_step = 1, layer.high_step = layer.tiles;
    longest = std::max(longest, layer.k);
    partials = std::max(partials, (layer.tiles + p.num_sms - 1) / p.num_sms * layer.units);
  }
  out.width = static_cast<int>(p.o.n);
  while (p.group >> out.group_bits > 1) ++out.group_bits;
  const auto aligned = [](int bytes) { return (bytes + 127) / 128 * 128; };
  out.steps_at = longest * 2;
  out.partials_at = aligned(out.steps_at + longest / Weights::kGroup * 8);
  out.ring_at = aligned(out.partials_at + partials * kOutputs * 4);
  out.stage_bytes = Weights::stage_bytes(out.group_bits);
  out.stages = std::min(kMaxStages, (p.max_shared_bytes - kSpare - out.ring_at) / out.stage_bytes);
  out.stages = out.stages / kLoadingWarps * kLoadingWarps;
  return out;
}

// At least half of an SM's, for one CTA an SM.
int shared_bytes_of(const Problem& problem, int max_shared_bytes) {
  return std::max(problem.ring_at + problem.stages * problem.stage_bytes, max_shared_bytes / 2 + 1024);
}

template <class Body>
int dispatch_weights(const DecoderLinears& p, Body&& body) {
  const auto of = [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if (p.group == 32) return body.template operator()<T, Int4Weights<T, 4>>();
    if (p.group == 64) return body.template operator()<T, Int4Weights<T, 2>>();
    return body.template operator()<T, Int4Weights<T, 1>>();
  };
  if (p.dtype == DType::kFloat16) return of(Type<__half>{});
  return p.dtype == DType::kBFloat16 ? of(Type<__nv_bfloat16>{}) : kNoKernel;
}

}  // namespace

bool serves_decoder_linears(const DecoderLinears& p) {
  if (p.num_sms <= 0 || (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16)) return false;
  const auto k_fits = [](std::int64_t k) { return k > 0 && k % 256 == 0 && k <= 65536; };
  const std::int64_t width = p.o.n;
  const bool agree =
      p.gate_up.k == width && p.down.n == width && p.down.k * 2 == p.gate_up.n && (p.next.n == 0 || p.next.k == width);
  if (!agree || width > kMaxWidth || !k_fits(width) || !k_fits(p.o.k) || !k_fits(p.down.k)) return false;
  if (p.next.n % kOutputs != 0) return false;
  if (p.group != 32 && p.group != 64 && p.group != 128 && p.group != 256) return false;
  return dispatch_weights(p, [&]<class T, class Weights>() -> int { return problem_of<Weights>(p).stages; }) >= kWarps;
}

int decoder_linears(const DecoderLinears& p, Stream stream) {
  return dispatch_weights(p, [&]<class T, class Weights>() -> int {
    Problem problem = problem_of<Weights>(p);
    problem.norm = p.norm, problem.next_norm = p.next_norm, problem.next_bias = p.next_bias;
    problem.x = p.x, problem.residual = p.residual;
    problem.hidden = p.hidden, problem.activated = p.activated;
    problem.residual_out = p.residual_out, problem.out = p.out;
    problem.eps = p.eps, problem.next_eps = p.next_eps;
    problem.is_constant = p.is_constant;
    return launch_cooperative(decoder_linears_kernel<T, Weights>, p.num_sms, kThreads + 32 * kLoadingWarps,
                              shared_bytes_of(problem, p.max_shared_bytes), p.pdl, stream, problem);
  });
}

}  // namespace untorch::kernels::cuda
