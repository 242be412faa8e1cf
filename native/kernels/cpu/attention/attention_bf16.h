// Blocks of attention in bfloat16: probabilities rounded, keys and values of pages packed, GEMMs by AMX or vdpbf16ps.
// Included by *.isa.cpp files only.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention/softmax.h"
#include "kernels/cpu/common/amx.h"
#include "kernels/cpu/gemm/gemm_half_micro.h"
#include "kernels/cpu/gemm/gemm_half_pack.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr std::int64_t kAmxPadding = 2 * kAmxMostWords;  // elements of a step: k is a multiple of it

#if defined(__AVX512F__)
// [rows, kKeyBlock] of `count`, a multiple of 16, to bfloat16, zeros up to `padded`. Subnormals become zero, as
// vdpbf16ps takes them.
UNTORCH_BF16 void round_probabilities(std::int64_t rows, std::int64_t count, std::int64_t padded, const float* from,
                                      std::uint16_t* to) {
  for (std::int64_t i = 0; i < rows; ++i, from += kKeyBlock, to += kKeyBlock) {
    for (std::int64_t x = 0; x < count; x += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + x), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + x)));
    }
    for (std::int64_t x = count; x < padded; ++x) to[x] = 0;
  }
}

// C [rows, 16·panels] = A·B, or C += A·B, from `count` pairs of each panel's `total`.
void multiply_pairs(bool amx, std::int64_t rows, std::int64_t panels, std::int64_t count, std::int64_t total,
                    const std::uint16_t* a, std::int64_t lda, const std::uint32_t* b, bool accumulate, float* c,
                    std::int64_t ldc) {
  if (amx) {
    const AmxOperands whole{.a = a,
                            .a_stride = lda * 2,
                            .b = b,
                            .panel_bytes = total * kAmxTileBytes,
                            .c = c,
                            .c_stride = ldc * 4,
                            .steps = count / kAmxMostWords,
                            .start = accumulate ? c : nullptr,
                            .start_stride = ldc * 4};
    return amx_gemm_blocks<AmxTiles, false>(whole, rows, panels);
  }
  const std::int64_t pieces = (rows + kMaxRows - 1) / kMaxRows;
  const auto tile_rows = static_cast<int>((rows + pieces - 1) / pieces);
  PairTile tile{};
  tile.pairs = count, tile.lda = lda, tile.panel_step = total * P, tile.ldc = ldc, tile.accumulate = accumulate;
  for (std::int64_t j = 0; j < panels;) {
    const int group = choose_panels(tile_rows, panels - j);
    tile.b = b + j * total * P;
    for (std::int64_t i = 0; i < rows; i += tile_rows) {
      const auto height = static_cast<int>(smaller(tile_rows, rows - i));
      tile.a = a + i * lda, tile.c = c + i * ldc + j * P;
      kDotBf16.kernel[height - 1][group - 1](tile);
    }
    j += group;
  }
}
#endif

// Keys or values of 16 positions each, at(x) from position x on, as B of the first or the second GEMM.
template <class At>
void pack_page_keys(std::int64_t cols, std::int64_t width, At&& at, std::uint32_t* to) {
  const std::int64_t pairs = round_up(width, kAmxPadding) / 2;
  for (std::int64_t x = 0; x < cols; x += P) pack_pairs(width, P, {at(x), 1, width}, to + x * pairs, pairs, pairs);
}
template <class At>
void pack_page_values(std::int64_t cols, std::int64_t width, At&& at, std::uint32_t* to) {
  const std::int64_t pairs = round_up(cols, kAmxPadding) / 2;
  for (std::int64_t x = 0; x < 2 * pairs; x += P) {
    const std::int64_t count = cols - x < P ? cols - x : P;
    const MatrixRef<const std::uint16_t> rows{count > 0 ? at(x) : nullptr, width, 1};
    pack_pairs(count > 0 ? count : 0, width, rows, to + x / 2 * P, P / 2, pairs);
  }
}

}  // namespace
}  // namespace untorch::kernels::UNTORCH_ISA
