// Weights in NVFP4 on the CPU: made dense, for products in float32.
//
// A weight is e2m1 · block_scale · global_scale. The codes e2m1 are four bits: a sign, then 0, 0.5, 1, 1.5, 2, 3, 4 or
// 6. They are bytes [n, k/2], the even k in the lower half, or int32 [n/8][k/(16·t)][32][t/2] as in int4.h. 16
// neighbours in k share a block_scale, float8_e4m3fn [n, k/16].
#pragma once

#include <cstdint>

namespace untorch::kernels {

struct Nvfp4Weight {
  std::int64_t k = 0;
  const void* codes = nullptr;
  int inner_k_tiles = 0;  // 0: bytes
  const std::uint8_t* block_scales = nullptr;
  const float* global_scales = nullptr;
  bool row_scales = false;  // one for each row, else one
};

// Rows [row, row_end) as floats [row_end - row, k]. A code times its scales is rounded once, in the last product.
void nvfp4_dequantize(const Nvfp4Weight& weight, std::int64_t row, std::int64_t row_end, float* to);

}  // namespace untorch::kernels
