// Dequantizes int4 weights to a dense matrix: dequantize.cuh.
#include "kernels/cuda/w4a16/dequantize.cuh"
#include "kernels/cuda/w4a16/int4_scales.cuh"

namespace untorch::kernels::cuda {
namespace {

class Int4Dequantize {
 public:
  using Gemm = Int4Gemm;
  __device__ __forceinline__ explicit Int4Dequantize(const Int4Gemm& p)
      : scales_(p.scales), n_(p.n), group_bits_(log2_group(p)) {}

  template <class T>
  __device__ __forceinline__ void dequantize(int k, std::int64_t column, std::uint32_t word,
                                             PairOf<T> (&pairs)[4]) const {
    const std::int64_t scale = std::int64_t{k >> group_bits_} * n_ + column;
    if constexpr (std::is_same_v<T, float>) {
      const float2 by = __ldg(static_cast<const float2*>(scales_) + scale);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const auto value = [&](int nibble) {
          return fmaf(static_cast<float>(static_cast<int>(word >> (4 * nibble) & 15u) - 8), by.x, by.y);
        };
        pairs[q] = float2{value(q), value(q + 4)};
      }
    } else {
      dequantize_pairs<T>(word, scale_pair<T>(__ldg(static_cast<const std::uint32_t*>(scales_) + scale)), pairs);
    }
  }

 private:
  const void* scales_;
  std::int64_t n_;
  int group_bits_;
};

}  // namespace

int int4_dequantize(const Int4Gemm& p, std::int64_t n0, std::int64_t n, void* to, Stream stream) {
  return dequantize_tiles<Int4Dequantize>(p, n0, n, to, stream);
}

}  // namespace untorch::kernels::cuda
