// Int4 weights as a dense matrix, for products of many rows by cuBLASLt; and rows with zeros behind them.
//
// Layout: a warp unpacks a block, 8 columns by 128 k's, 512 bytes. Of 32 k's the four lanes of a column have four pairs
// each, every fourth of the 16; they trade them, so that each has 16 bytes that follow each other and a column's 32 k's
// are one run of 64 bytes.
//
// Bytes: 0.5 a weight read (and 4/group), 2 written, 4 for float32; the caller unpacks as many columns at a time as the
// second-level cache holds, and multiplies with them from there. Operations: 15 instructions for 256 weights and 12 to
// trade: a fifth of the time of the product at 256 rows, a hundredth at 4096. Not measured yet.
#include "kernels/cuda/int4_weights.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Lane t of four gets what lanes 0 to 3 have in place t.
__device__ __forceinline__ uint4 transposed(const std::uint32_t (&v)[4], int t) {
  // First between neighbours in pairs of places, then between pairs.
  const bool odd = (t & 1) != 0, high = (t & 2) != 0;
  const std::uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 1),
                      b = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 1);
  const std::uint32_t p0 = odd ? a : v[0], p1 = odd ? v[1] : a, p2 = odd ? b : v[2], p3 = odd ? v[3] : b;
  const std::uint32_t c = __shfl_xor_sync(0xffffffffu, high ? p0 : p2, 2),
                      d = __shfl_xor_sync(0xffffffffu, high ? p1 : p3, 2);
  return high ? uint4{c, d, p2, p3} : uint4{p0, p1, c, d};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    unpack_columns(Int4Gemm p, std::int64_t first, std::int64_t columns, T* __restrict__ to) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4, lane_words = p.inner_k_tiles / 2;
  const int group_bits = __ffs(static_cast<int>(p.group)) - 1, depth = static_cast<int>(p.k);
  const int blocks = (depth + kInt4BlockK - 1) / kInt4BlockK;
  const std::int64_t count = columns / 8 * blocks, step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count; i += step) {
    const std::int64_t column = i / blocks * 8;
    const int k0 = static_cast<int>(i % blocks) * kInt4BlockK;
    const std::uint32_t* const words = static_cast<const std::uint32_t*>(p.weight) + (first + column) / 8 * p.k + k0;
    std::uint32_t word[4];
    if (lane_words == 4) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(words) + lane);
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) word[j] = k0 + 32 * j < depth ? __ldg(words + word_at(lane_words, j, lane)) : 0u;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int k = k0 + 32 * j;
      if (k >= depth) break;  // the whole warp agrees
      const std::int64_t scale = std::int64_t{k >> group_bits} * p.n + first + column + g;
      T* const row = to + (column + g) * p.k + k;
      if constexpr (std::is_same_v<T, float>) {
        const float2 by = __ldg(static_cast<const float2*>(p.scales) + scale);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const auto value = [&](int nibble) {
            return fmaf(static_cast<float>(static_cast<int>(word[j] >> (4 * nibble) & 15u) - 8), by.x, by.y);
          };
          *reinterpret_cast<float2*>(row + 8 * q + 2 * t) = float2{value(q), value(q + 4)};
        }
      } else {
        std::uint32_t pairs[4];
        unpack<T>(word[j], scale_pair(__ldg(static_cast<const std::uint32_t*>(p.scales) + scale)), pairs);
        *reinterpret_cast<uint4*>(row + 8 * t) = transposed(pairs, t);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    pad_rows(const std::uint16_t* __restrict__ x, std::int64_t numel, std::int64_t width, std::int64_t row,
             std::uint16_t* __restrict__ to, std::int64_t to_width) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    const std::int64_t m = i / to_width, k = i - m * to_width;
    to[i] = k < width ? x[m * row + k] : std::uint16_t{0};
  }
}

}  // namespace

int int4_unpack(const Int4Gemm& p, std::int64_t first, std::int64_t columns, void* to, Stream stream) {
  if (columns == 0) return 0;
  if (p.dtype == Scalar::kFloat64) return kNoKernel;
  const std::int64_t count = columns / 8 * ((p.k + kInt4BlockK - 1) / kInt4BlockK);
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      return kNoKernel;
    } else {
      unpack_columns<T><<<blocks_for(count, kWarps), kThreads, 0, stream>>>(p, first, columns, static_cast<T*>(to));
      return cudaGetLastError();
    }
  });
}

int int4_pad_rows(const void* x, std::int64_t m, std::int64_t width, std::int64_t row, void* to, std::int64_t to_width,
                  Stream stream) {
  const std::int64_t numel = m * to_width;
  if (numel == 0) return 0;
  pad_rows<<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(static_cast<const std::uint16_t*>(x), numel, width,
                                                                 row, static_cast<std::uint16_t*>(to), to_width);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
