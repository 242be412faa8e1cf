// Products with weights of four bits, packed for tensor cores: what int4 and NVFP4 share.
//
// The weight is int32 [n/8][k/(16·t)][32][t/2] with t, inner_k_tiles, 2, 4 or 8: for every tile of 8 columns and 128
// k's 512 bytes in a row. Of 32 k's a lane has one word; the lane (g, t) = (lane / 4, lane % 4) holds column g, and in
// the nibbles p and p + 4 the k's 8·p + 2·t and the one after it. Sums run in float32, in a fixed order.
#pragma once

#include <cstddef>

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

inline constexpr int kW4A16BlockK = 128;  // k's of a block of weights, 512 bytes a tile of 8 columns

struct W4A16Gemm {
  DType dtype = DType::kBFloat16;    // of x, bias and out: bfloat16 or float16
  std::int64_t m = 0, n = 0, k = 0;  // k is the weight's, n a multiple of 8
  const void* x = nullptr;           // [m, x_width], rows x_row apart; 16-byte aligned, both multiples of 8
  std::int64_t x_row = 0, x_width = 0;
  const void* weight = nullptr;  // 16-byte aligned
  int inner_k_tiles = 8;
  const void* bias = nullptr;  // dense [n], or null
  void* out = nullptr;         // dense [m, n]
  float* workspace = nullptr;  // of as many bytes as the kernel's function for that says
  int num_sms = 1;
  int tile_rows = 0;          // of packed_stream; 0: tile_heuristic.h chooses
  int max_shared_bytes = 0;   // a block may have
  bool has_clusters = false;  // sm_90 and newer
  bool has_wgmma = false;     // sm_90 alone
  bool early = false;         // kernels may begin early: Launch::early
};

// Adds up what `parts` blocks left of each tile in the workspace, [part][m][n].
int w4a16_reduce_split_k(const W4A16Gemm& product, int parts, Stream stream);

// x [m, width] of 2-byte elements, rows `row` apart, as [m, to_width], dense, zeros behind `width`.
int w4a16_pad_activations(const void* x, std::int64_t m, std::int64_t width, std::int64_t row, void* to,
                          std::int64_t to_width, Stream stream);

}  // namespace untorch::kernels::cuda
