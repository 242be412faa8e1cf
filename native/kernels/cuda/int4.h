// Products with weights of four bits, packed for tensor cores.
//
// The weight is int32 [n/8][k/(16·t)][32][t/2] with t, inner_k_tiles, 2, 4 or 8: for every tile of 8 columns and 128
// k's 512 bytes in a row. Of 32 k's a lane has one word; the lane (g, t) = (lane / 4, lane % 4) holds column g, and in
// the nibbles p and p + 4 the k's 8·p + 2·t and the one after it. A weight is (q - 8)·scale + zero, rounded once to x's
// dtype; sums run in float32, in a fixed order.
#pragma once

#include <cstddef>

#include "kernels/cuda/scalar.h"

namespace untorch::kernels::cuda {

struct Int4Gemm {
  Scalar dtype = Scalar::kBFloat16;  // of x, scales, bias and out: bfloat16 or float16
  std::int64_t m = 0, n = 0, k = 0;  // k is the weight's, n a multiple of 8
  const void* x = nullptr;           // [m, x_width], rows x_row apart; 16-byte aligned, both multiples of 8
  std::int64_t x_row = 0, x_width = 0;
  const void* weight = nullptr;  // 16-byte aligned
  int inner_k_tiles = 8;
  const void* scales = nullptr;  // [k / group][n][2]: scale, zero; 16-byte aligned
  std::int64_t group = 32;
  const void* bias = nullptr;  // dense [n], or null
  void* out = nullptr;         // dense [m, n]
  float* workspace = nullptr;  // of int4_mma_workspace(p) or int4_stream_workspace(p) bytes, for them
  int multiprocessors = 1;
  int max_shared_bytes = 0;   // a block may have
  bool has_clusters = false;  // sm_90 and newer
  bool has_wgmma = false;     // sm_90 alone
};

// out = x · weightᵀ + bias. For at most 8 rows.
int int4_narrow(const Int4Gemm& product, Stream stream);

// The same for any number of rows.
std::size_t int4_mma_workspace(const Int4Gemm& product);
int int4_mma(const Int4Gemm& product, Stream stream);
// Adds up what `parts` blocks left of each tile in the workspace, [part][m][n].
int int4_add_parts(const Int4Gemm& product, int parts, Stream stream);

// The same for any number of rows, with the tensor instructions of sm_90, for inner_k_tiles 8. It needs no workspace.
int int4_wgmma(const Int4Gemm& product, Stream stream);

// The same as int4_wgmma, for any number of rows and best for those from 9 to some hundreds; with a workspace.
std::size_t int4_stream_workspace(const Int4Gemm& product);
int int4_stream(const Int4Gemm& product, Stream stream);

// Columns [first, first + columns), multiples of 8, of the weight as a dense matrix [columns, k] of p.dtype, which may
// be float32 here (the scales are too, then). x and out are not looked at.
int int4_unpack(const Int4Gemm& p, std::int64_t first, std::int64_t columns, void* to, Stream stream);

// x [m, width] of 2-byte elements, rows `row` apart, as [m, to_width], dense, zeros behind `width`.
int int4_pad_rows(const void* x, std::int64_t m, std::int64_t width, std::int64_t row, void* to, std::int64_t to_width,
                  Stream stream);

}  // namespace untorch::kernels::cuda
