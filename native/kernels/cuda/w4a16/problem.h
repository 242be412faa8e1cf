// W4A16 GEMM: out [m, n] = x [m, k] · weightᵀ + bias, x in 16 bits, the weight in four. What int4 and NVFP4 share.
//
// The weight is int32 [n/8][k/(16·t)][32][t/2] with t, inner_k_tiles, 2, 4 or 8: the layout of PyTorch's
// _convert_weight_to_int4pack, in the order of mma.m16n8k16's fragments. With t = 8 a tile of 8 columns (n) and 128 k
// is 512 contiguous bytes, 4 words a lane:
//
//   lane (g, t) = (lane / 4, lane % 4), column n = 8·tile + g; word j = k 32·j to 32·j + 31:
//   nibble     0         4         1         5         2          6          3          7
//   k of 32    2t        2t+1      2t+8      2t+9      2t+16      2t+17      2t+24      2t+25
//              └ pair 0 ─────┘     └ pair 1 ─────┘     └ pair 2 ──────┘      └ pair 3 ───────┘
//
// Accumulation is in float32, in a fixed order: results are deterministic.
#pragma once

#include <cstddef>

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

inline constexpr int kW4A16BlockK = 128;  // K of a stage ("a k block"): 512 bytes of weights for 8 columns

struct W4A16Gemm {
  DType dtype = DType::kBFloat16;          // of x, bias and out: bfloat16 or float16
  std::int64_t m = 0, n = 0, k = 0;        // k is the weight's, n a multiple of 8
  const void* x = nullptr;                 // [m, x_width], x_width <= k; 16-byte aligned
  std::int64_t x_stride = 0, x_width = 0;  // elements between rows, and in one; multiples of 8
  const void* weight = nullptr;            // 16-byte aligned
  int inner_k_tiles = 8;
  const void* bias = nullptr;  // dense [n], or null
  void* out = nullptr;         // dense [m, n]
  float* workspace = nullptr;  // of the bytes that the kernel's ..._workspace function returns
  int num_sms = 1;
  int tile_m = 0;             // of the sm_90 GEMM; 0: tile_heuristic.h chooses
  int max_shared_bytes = 0;   // of a CTA
  bool has_clusters = false;  // sm_90 and newer
  bool has_wgmma = false;     // sm_90 alone
  bool pdl = false;           // launch with programmatic stream serialization: Launch::pdl
  // No kernel writes weight and scales: with PDL they are read before the kernel before this one has ended.
  bool is_constant = false;
};

// Split-K reduction: out = the sum over workspace [split][m][n] + bias.
int w4a16_reduce_split_k(const W4A16Gemm& p, int splits, Stream stream);

// Pads activations along K: x [m, width] of 2-byte elements, rows `stride` apart, to dense [m, padded_width] with
// zeros.
int w4a16_pad_activations(const void* x, std::int64_t m, std::int64_t width, std::int64_t stride, void* padded,
                          std::int64_t padded_width, Stream stream);

}  // namespace untorch::kernels::cuda
