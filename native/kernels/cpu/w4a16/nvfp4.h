// NVFP4 W4A16 linear layers on the CPU: dequantize a chunk of columns to float32, GEMM, chunk after chunk.
//
// A weight is e2m1 · block_scale · global_scale. The codes e2m1 are four bits: a sign, then 0, 0.5, 1, 1.5, 2, 3, 4 or
// 6. They are bytes [n, k/2], the even k in the lower half, or int32 [n/8][k/(16·t)][32][t/2] as in int4.h. 16
// neighbours in k share a block_scale, float8_e4m3fn [n, k/16].
#pragma once

#include <cstdint>
#include <vector>

namespace untorch::kernels::cpu {

inline constexpr std::int64_t kNvfp4Block = 16;  // weights of a block scale

struct Nvfp4Weight {
  std::int64_t k = 0;
  const void* codes = nullptr;
  int inner_k_tiles = 0;  // 0: bytes
  const std::uint8_t* block_scales = nullptr;
  const float* global_scales = nullptr;
  bool row_scales = false;  // one for each row, else one
};

// Rows [row, row_end) as floats [row_end - row, k]. Code, block scale and global scale are multiplied and rounded once.
void nvfp4_dequantize(const Nvfp4Weight& weight, std::int64_t row, std::int64_t row_end, float* to);

struct Nvfp4Linear {
  std::int64_t m = 0, n = 0;
  const float* x = nullptr;  // [m, x_width], rows x_stride apart, x_width <= weight.k
  std::int64_t x_width = 0, x_stride = 0;
  Nvfp4Weight weight;
  float* out = nullptr;  // [m, n], dense
};

// out += x · weightᵀ. `scratch` is kept between calls, to allocate it once.
void nvfp4_linear(const Nvfp4Linear& p, std::vector<float>& scratch);

}  // namespace untorch::kernels::cpu
