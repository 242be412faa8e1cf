// W8A16 GEMV with 8-bit weights, M up to 8.
//
// sm_90 and newer: rings of shared memory (bulk_ring.cuh). 64 of K are a step: lane (g, t) has 16 weights of column g,
// from 16t on. x is converted in registers, a chunk at a time, while weights arrive.
//
//   int8     mma.sync m16n8k32 on the weights as they lie; a row of x is two rows of 8 bits, high and low: 16 rows
//            for M up to 8
//   FP8      mma.sync m16n8k16 on float16: half an instruction a weight (cvt.rn.f16x2.e4m3x2) converts
//
// Elsewhere, and for float32: x as it is, a warp a column, 16 weights a lane.
//
// Roofline: memory; the weight is read once.
#include "kernels/cuda/gemm/bulk_ring.cuh"
#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/w8a8/w8_values.cuh"
#include "kernels/cuda/w8a8/w8a8.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kStepK = 64, kMaxChunk = 512, kLaneK = 16;
constexpr int kBlock = static_cast<int>(kW8ScaleBlock);
static_assert(kBlock == 2 * kStepK);

template <class T>
__device__ __forceinline__ void write_output(const W8Gemm& p, std::int64_t m, std::int64_t n, float sum) {
  if (p.scales_row == 0) sum *= p.scales[n];
  if (p.bias != nullptr) sum += widen(static_cast<const T*>(p.bias)[n]);
  static_cast<T*>(p.out)[m * p.n + n] = narrow<T>(sum);
}

#if __CUDA_ARCH__ >= 900
// Steps of a chunk, of kStepK: lane (g, t) has kLaneK of row g, and as many weights of column g.
constexpr int kSteps = kMaxChunk / kStepK;

// A lane's part of a chunk of x, as it lies.
template <class T>
struct XChunk {
  const T* row;  // of this lane
  int width;     // 0 for rows behind M
  std::uint32_t words[kSteps][8];

  // The largest absolute value among the four lanes of the row. Absolute values compare as their bits do.
  __device__ __forceinline__ std::uint32_t load(int k0, int length, int t) {
    const int end = min(width, k0 + length);
    std::uint32_t largest = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = k0 + s * kStepK + t * kLaneK + half * 8;
        const uint4 eight = k < end ? *reinterpret_cast<const uint4*>(row + k) : uint4{0, 0, 0, 0};
        memcpy(words[s] + half * 4, &eight, 16);
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = __vmaxu2(largest, words[s][i] & 0x7fff7fffu);
    }
    largest = max(largest & 0xffffu, largest >> 16);
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    return max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  }
};

template <class T>
__device__ __forceinline__ float value_of(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  } else {
    return __uint_as_float(bits << 16);
  }
}
template <class T>
__device__ __forceinline__ float2 values_of(std::uint32_t pair) {
  return {value_of<T>(pair & 0xffffu), value_of<T>(pair >> 16)};
}
template <class T>
inline constexpr std::uint32_t kInfinity = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
// The reciprocal of a smaller one would overflow float32.
constexpr float kMinAbsMax = 0x1p-110f;

// int8: x = (256 · high + low) · scale, with a scale for a chunk of a row: max|x| / 32512, NaN where x is not finite.
template <class T>
struct Int8Math {
  static constexpr float kMax = 127.0f * 256.0f;
  XChunk<T> x;  // its words become high and low
  int t;
  float scale;

  __device__ __forceinline__ void load(int k0, int length) {
    const std::uint32_t largest = x.load(k0, length, t);
    const bool finite = largest < kInfinity<T>;
    const float absmax = fmaxf(finite ? value_of<T>(largest) : 1.0f, kMinAbsMax), inverse = kMax / absmax;
    scale = finite ? absmax * (1.0f / kMax) : __uint_as_float(0x7fc00000u);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      std::uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 first = values_of<T>(x.words[s][2 * i]), second = values_of<T>(x.words[s][2 * i + 1]);
        // 1.5 · 2^23: the sum's low 16 bits are the rounded value, in two's complement.
        const auto whole = [&](float value) { return __float_as_uint(fmaf(value, inverse, 12582912.0f)); };
        const std::uint32_t a = whole(first.x), b = whole(first.y), c = whole(second.x), d = whole(second.y);
        low[i] = __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
        // Low bytes are signed: what is above 127 belongs to the next high one.
        high[i] = __byte_perm(__byte_perm(a + 128u, b + 128u, 0x0051), __byte_perm(c + 128u, d + 128u, 0x0051), 0x5410);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) x.words[s][i] = high[i], x.words[s][4 + i] = low[i];
    }
  }
  __device__ __forceinline__ void multiply(std::uint32_t from, std::int64_t, int, int length, float (&acc)[2]) const {
    int sums[2][4] = {};  // two, so that no mma waits for the one before it
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = s * kStepK;
      if (at < length) {
        uint4 w = load_shared_16(from + at + t * kLaneK);
        // Behind K there is what the stage held before; x is 0.
        const std::uint32_t(&v)[8] = x.words[s];
        mma_8bit<Int8Weight>(sums[0], v[0], v[4], v[1], v[5], w.x, w.y);
        mma_8bit<Int8Weight>(sums[1], v[2], v[6], v[3], v[7], w.z, w.w);
      }
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int high = sums[0][v] + sums[1][v], low = sums[0][v + 2] + sums[1][v + 2];
      acc[v] += (static_cast<float>(high) * 256.0f + static_cast<float>(low)) * scale;
    }
  }
};

// Two E4M3 values, the lower two bytes, as float16.
__device__ __forceinline__ std::uint32_t halves_of_e4m3(std::uint32_t bytes) {
  std::uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(bytes)));
  return halves;
}

// FP8: weights become float16 in registers, which is exact. (mma.sync of E4M3 would convert both operands on sm_90.)
// float16 x is as it is. bfloat16 x is float16 times a power of two for a chunk of a row, with which the largest value
// is from 2^14 to 2^15: 8 significant bits, as many as bfloat16 has, down to 2^-31 of it, and no error above 2^-40 of
// it.
template <class T, bool HasBlocks>
struct Fp8Math {
  XChunk<T> x;  // its words become float16
  const float* scales;
  std::int64_t scales_row;
  int t;
  float scale;

  __device__ __forceinline__ void load(int k0, int length) {
    const std::uint32_t largest = x.load(k0, length, t);
    const bool finite = largest < kInfinity<T>;
    scale = finite ? 1.0f : __uint_as_float(0x7fc00000u);
    if constexpr (std::is_same_v<T, __half>) return;
    const float absmax = fmaxf(finite ? value_of<T>(largest) : 1.0f, kMinAbsMax);
    const std::uint32_t exponent = __float_as_uint(absmax) & 0x7f800000u;
    scale *= __uint_as_float(exponent - (14u << 23));
    const float inverse = __uint_as_float((254u << 23) + (14u << 23) - exponent);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 pair = values_of<T>(x.words[s][i]);
        const __half2 halves = __floats2half2_rn(pair.x * inverse, pair.y * inverse);
        memcpy(&x.words[s][i], &halves, 4);
      }
    }
  }
  __device__ __forceinline__ void multiply(std::uint32_t from, std::int64_t n, int k0, int length,
                                           float (&acc)[2]) const {
    const float* const of_blocks = HasBlocks ? scales + n / kBlock * scales_row + k0 / kBlock : nullptr;
    float sums[4][4] = {};  // four, so that no mma waits for the one before it
    float part[2] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int at = s * kStepK;
      if (at < length) {
        // Behind K, where x is 0, the last weights: what else the stage holds may be NaN.
        const uint4 four = load_shared_16(from + min(at + t * kLaneK, length - kLaneK));
        const std::uint32_t w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mma<__half>(sums[i], x.words[s][2 * i], 0u, x.words[s][2 * i + 1], 0u, halves_of_e4m3(w[i]),
                      halves_of_e4m3(w[i] >> 16));
        }
        if constexpr (HasBlocks) {
          if (s % 2 == 1 || at + kStepK >= length) {
            const float block = of_blocks[at / kBlock];
#pragma unroll
            for (int v = 0; v < 2; ++v) {
              part[v] += ((sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v])) * block;
#pragma unroll
              for (int i = 0; i < 4; ++i) sums[i][v] = 0.0f;
            }
          }
        }
      }
    }
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float sum = HasBlocks ? part[v] : (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
      acc[v] += sum * scale;
    }
  }
};
#endif

// Rows: 1, or 8 for M up to 8.
template <class T, class W, int Rows, bool HasBlocks>
__global__ void __launch_bounds__(kGemmThreads, 1) w8_rows_bulk(W8Gemm p, BulkPlan plan) {
#if __CUDA_ARCH__ >= 900
  griddepcontrol_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
  std::conditional_t<std::is_same_v<W, E4m3Weight>, Fp8Math<T, HasBlocks>, Int8Math<T>> math;
  math.x.row = static_cast<const T*>(p.x) + (g < p.m ? g : 0) * p.x_stride;
  math.x.width = g < p.m ? static_cast<int>(p.x_width) : 0;
  math.t = lane % 4;
  if constexpr (std::is_same_v<W, E4m3Weight>) math.scales = p.scales, math.scales_row = p.scales_row;
  bulk_gemv<Rows, 1>({p.weight, p.k, p.n, static_cast<int>(p.k)}, plan, math,
                     [&](std::int64_t m, std::int64_t n, float sum) {
                       if (m < p.m) write_output<T>(p, m, n, sum);
                     });
#endif
}

// A warp a column.
template <class T, class W, int Rows, bool HasBlocks>
__global__ void __launch_bounds__(kGemmThreads) w8_rows(W8Gemm p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t n = std::int64_t{blockIdx.x} * kGemmWarps + threadIdx.x / 32;
  if (n >= p.n) return;  // the whole warp agrees
  const auto* const column = static_cast<const std::uint8_t*>(p.weight) + n * p.k;
  const T* const x = static_cast<const T*>(p.x);
  float acc[Rows] = {};
  for (std::int64_t k = lane * kLaneK; k < p.x_width; k += 32 * kLaneK) {
    const uint4 w = load_once(column + k);
    const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
    const float scale = HasBlocks ? p.scales[n / kBlock * p.scales_row + k / kBlock] : 1.0f;
    const int count = p.x_width - k < kLaneK ? static_cast<int>(p.x_width - k) : kLaneK;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (r >= p.m) break;
      const T* const from = x + r * p.x_stride + k;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kLaneK; ++j) {
        if (j < count) sum += widen(from[j]) * weight_value<W>(words[j / 4] >> 8 * (j % 4) & 0xffu);
      }
      acc[r] += sum * scale;
    }
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) acc[r] += __shfl_xor_sync(0xffffffffu, acc[r], offset);
    if (lane == 0 && r < p.m) write_output<T>(p, r, n, acc[r]);
  }
}

template <class T, class W, int Rows, bool HasBlocks>
int launch(const W8Gemm& p, Stream stream) {
  if constexpr (is_half_type<T>) {
    if (p.has_clusters) {
      BulkPlan plan =
          bulk_plan(static_cast<int>(p.k), 1, HasBlocks ? kBlock : kStepK, kMaxChunk, p.pdl && p.is_constant);
      const Launch how = bulk_launch<Rows>(plan, p.n, p.num_sms, p.max_shared_bytes, p.pdl);
      return launch_kernel(w8_rows_bulk<T, W, Rows, HasBlocks>, how, stream, p, plan);
    }
  }
  Launch how;
  how.blocks = dim3(static_cast<unsigned>((p.n + kGemmWarps - 1) / kGemmWarps));
  how.threads = kGemmThreads;
  how.pdl = p.pdl;
  return launch_kernel(w8_rows<T, W, Rows, HasBlocks>, how, stream, p);
}

template <class T, class W, int Rows>
int by_scales(const W8Gemm& p, Stream stream) {
  if constexpr (std::is_same_v<W, E4m3Weight>) {
    if (p.scales_row != 0) return launch<T, W, Rows, true>(p, stream);
  }
  return launch<T, W, Rows, false>(p, stream);
}

}  // namespace

int w8_gemv(const W8Gemm& p, Stream stream) {
  if (p.m > kW8GemvMaxM || p.n > 0x7fffffff || p.k > kW8GemvMaxK) return kNoKernel;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      return kNoKernel;
    } else {
      return dispatch_weight(p.weight_dtype, [&](auto weight) -> int {
        using W = decltype(weight);
        return p.m == 1 ? by_scales<T, W, 1>(p, stream) : by_scales<T, W, 8>(p, stream);
      });
    }
  });
}

}  // namespace untorch::kernels::cuda
