// Dequantizes packed 4-bit weights to a dense matrix, for cuBLASLt at large M.
//
// A warp dequantizes an 8-column tile's k block, 8 × 128 weights, 512 bytes. Of 32 k the four lanes of a column have
// four pairs each, every fourth of the 16; a 4 × 4 transpose by shuffles gives each lane 16 contiguous bytes, and a
// column's 32 k are one store of 64 bytes:
//
//   lane t before   pairs t, 4 + t, 8 + t, 12 + t          after   pairs 4t, 4t + 1, 4t + 2, 4t + 3
//
// Bytes: 0.5 a weight read (and 4 / group for int4, 1/16 for NVFP4), 2 written, 4 for float32; the caller dequantizes a
// chunk of columns, then multiplies: heuristic.h. Operations: 15 instructions for 256 weights (45 for NVFP4, with its
// global scale) and 12 for the transpose. On an H200 the GEMM of M = 4096 with dequantization takes 160 to 200 µs more
// than bfloat16's 2400, of 8192 × 28672, whose 595 MB read and written take 130.
#pragma once

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/w4a16/problem.h"
#include "kernels/cuda/w4a16/weight_layout.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// A 4 × 4 transpose over four lanes: lane t gets element t of lanes 0 to 3.
__device__ __forceinline__ uint4 transposed(const std::uint32_t (&v)[4], int t) {
  // First within 2 × 2 k_blocks, then between them.
  const bool odd = (t & 1) != 0, high = (t & 2) != 0;
  const std::uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 1),
                      b = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 1);
  const std::uint32_t p0 = odd ? a : v[0], p1 = odd ? v[1] : a, p2 = odd ? b : v[2], p3 = odd ? v[3] : b;
  const std::uint32_t c = __shfl_xor_sync(0xffffffffu, high ? p0 : p2, 2),
                      d = __shfl_xor_sync(0xffffffffu, high ? p1 : p3, 2);
  return high ? uint4{c, d, p2, p3} : uint4{p0, p1, c, d};
}

// The same of pairs of bytes, each in bytes 1 and 3 of a word.
__device__ __forceinline__ uint2 transposed_bytes(const std::uint32_t (&v)[4], int t) {
  const bool odd = (t & 1) != 0, high = (t & 2) != 0;
  const std::uint32_t low_places = __byte_perm(v[0], v[1], 0x7531), high_places = __byte_perm(v[2], v[3], 0x7531);
  // First between pairs of lanes, then between neighbours: elements of this pair, of lane t & 1 and of that and 2.
  const std::uint32_t other = __shfl_xor_sync(0xffffffffu, high ? low_places : high_places, 2);
  const std::uint32_t first = high ? other : low_places, second = high ? high_places : other;
  const std::uint32_t even_places = __byte_perm(first, second, 0x5410), odd_places = __byte_perm(first, second, 0x7632);
  const std::uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? even_places : odd_places, 1);
  const std::uint32_t lower = odd ? got : even_places, upper = odd ? odd_places : got;
  return uint2{__byte_perm(lower, upper, 0x5410), __byte_perm(lower, upper, 0x7632)};
}

// Two neighbours along k: a pair of T in 32 bits, or float2. FP8: bytes 1 and 3 of a word.
template <class T>
using PairOf = std::conditional_t<std::is_same_v<T, float>, float2, std::uint32_t>;

// Format: constructed from the problem; `dequantize(k, column, word, pairs)` gives the four pairs of a lane's word.
template <class Format, class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_tiles_kernel(typename Format::Gemm p, std::int64_t n0, std::int64_t n, T* __restrict__ to) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4, lane_words = p.inner_k_tiles / 2;
  const int k_end = static_cast<int>(p.k);
  const Format format(p);
  const int k_blocks = (k_end + kW4A16BlockK - 1) / kW4A16BlockK;
  const std::int64_t count = n / 8 * k_blocks, step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count; i += step) {
    const std::int64_t column = i / k_blocks * 8;
    const int k0 = static_cast<int>(i % k_blocks) * kW4A16BlockK;
    const std::uint32_t* const words = static_cast<const std::uint32_t*>(p.weight) + (n0 + column) / 8 * p.k + k0;
    std::uint32_t word[4];
    if (lane_words == 4) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(words) + lane);
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) word[j] = k0 + 32 * j < k_end ? __ldg(words + word_index(lane_words, j, lane)) : 0u;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int k = k0 + 32 * j;
      if (k >= k_end) break;  // warp-uniform
      T* const row = to + (column + g) * p.k + k;
      PairOf<T> pairs[4];
      format.template dequantize<T>(k, n0 + column + g, word[j], pairs);
      if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (int q = 0; q < 4; ++q) *reinterpret_cast<float2*>(row + 8 * q + 2 * t) = pairs[q];
      } else if constexpr (sizeof(T) == 1) {
        *reinterpret_cast<uint2*>(row + 8 * t) = transposed_bytes(pairs, t);
      } else {
        *reinterpret_cast<uint4*>(row + 8 * t) = transposed(pairs, t);
      }
    }
  }
}

// body(Type<T>{}) for the dtypes that weights are dequantized to.
template <class Body>
int dispatch_dequantized(DType dtype, Body&& body) {
  if (dtype == DType::kFloat32) return body(Type<float>{});
  if (dtype == DType::kFloat16) return body(Type<__half>{});
  return dtype == DType::kBFloat16 ? body(Type<__nv_bfloat16>{}) : kNoKernel;
}

template <class Format, class T>
int dequantize_tiles_as(const typename Format::Gemm& p, std::int64_t n0, std::int64_t n, T* to, Stream stream) {
  const std::int64_t count = n / 8 * ((p.k + kW4A16BlockK - 1) / kW4A16BlockK);
  if (count == 0) return 0;
  dequantize_tiles_kernel<Format, T><<<blocks_for(count, kWarps), kThreads, 0, stream>>>(p, n0, n, to);
  return cudaGetLastError();
}

template <class Format>
int dequantize_tiles(const typename Format::Gemm& p, std::int64_t n0, std::int64_t n, void* to, Stream stream) {
  return dispatch_dequantized(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    return dequantize_tiles_as<Format, T>(p, n0, n, static_cast<T*>(to), stream);
  });
}

}  // namespace
}  // namespace untorch::kernels::cuda
