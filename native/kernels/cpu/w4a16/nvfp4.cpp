// NVFP4 dequantization to float32, parallel over rows, and the chunked GEMM. Bytes: 0.5625 a weight, once for any M.
#include "kernels/cpu/w4a16/nvfp4.h"

#include <algorithm>
#include <array>
#include <bit>

#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels::cpu {
namespace {

constexpr int kBlock = kNvfp4Block;
constexpr std::int64_t kChunkFloats = 1 << 18;  // dequantized weights of a chunk: they stay in L2
constexpr std::array<float, 16> kCodes = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr std::int64_t kFewValues = 1 << 14;  // fewer are not worth other threads

// float8_e4m3fn: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, and 0x7f is NaN.
constexpr float e4m3(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float value = 0.0f;
  if (exponent == 15 && mantissa == 7) {
    value = std::bit_cast<float>(0x7fc00000u);
  } else if (exponent == 0) {
    value = static_cast<float>(mantissa) * 0x1p-9f;
  } else {
    value = std::bit_cast<float>(static_cast<std::uint32_t>((exponent + 120) << 23 | mantissa << 20));
  }
  return (bits & 0x80) != 0 ? -value : value;
}
constexpr std::array<float, 256> kScales = [] {
  std::array<float, 256> out{};
  for (int i = 0; i < 256; ++i) out[static_cast<std::size_t>(i)] = e4m3(i);
  return out;
}();

// The codes of a scale block, from k on.
void read_block(const Nvfp4Weight& w, std::int64_t row, std::int64_t k, std::uint8_t (&codes)[kBlock]) {
  if (w.inner_k_tiles == 0) {
    const std::uint8_t* const bytes = static_cast<const std::uint8_t*>(w.codes) + (row * w.k + k) / 2;
    for (int i = 0; i < kBlock / 2; ++i) {
      codes[2 * i] = bytes[i] & 15, codes[2 * i + 1] = static_cast<std::uint8_t>(bytes[i] >> 4);
    }
    return;
  }
  const std::int64_t words = w.inner_k_tiles / 2, width = 16 * w.inner_k_tiles, outer = k / width, j = k % width / 32;
  const std::uint32_t* const tile =
      static_cast<const std::uint32_t*>(w.codes) + ((row / 8 * (w.k / width) + outer) * 32 + row % 8 * 4) * words + j;
  const int first = k % 32 == 0 ? 0 : 2;  // of a word's four pairs two are of this block
  for (int t = 0; t < 4; ++t) {
    const std::uint32_t word = tile[t * words];
    for (int p = 0; p < 2; ++p) {
      for (int h = 0; h < 2; ++h) {
        codes[8 * p + 2 * t + h] = static_cast<std::uint8_t>(word >> 4 * (first + p + 4 * h) & 15);
      }
    }
  }
}

}  // namespace

void nvfp4_dequantize(const Nvfp4Weight& w, std::int64_t row, std::int64_t row_end, float* to) {
#pragma omp parallel for if ((row_end - row) * w.k > kFewValues)
  for (std::int64_t r = row; r < row_end; ++r) {
    float* const out = to + (r - row) * w.k;
    const float global = w.global_scales[w.row_scales ? r : 0];
    std::uint8_t codes[kBlock];
    for (std::int64_t k = 0; k < w.k; k += kBlock) {
      read_block(w, r, k, codes);
      const float scale = kScales[w.block_scales[(r * w.k + k) / kBlock]];
      // Exact: a code has 2 significant bits and a block scale 4.
      for (int i = 0; i < kBlock; ++i) out[k + i] = kCodes[codes[i]] * scale * global;
    }
  }
}

void nvfp4_linear(const Nvfp4Linear& p, std::vector<float>& scratch) {
  if (p.m == 0 || p.n == 0 || p.x_width == 0) return;
  const std::int64_t k = p.weight.k, step = std::max<std::int64_t>(kChunkFloats / k, 16);
  scratch.resize(static_cast<std::size_t>(std::min(step, p.n) * k));
  for (std::int64_t n0 = 0; n0 < p.n; n0 += step) {
    const std::int64_t n = std::min(step, p.n - n0);
    nvfp4_dequantize(p.weight, n0, n0 + n, scratch.data());
    kernels::gemm(p.m, n, p.x_width, 1.0f, {p.x, p.x_stride, 1}, {scratch.data(), 1, k}, 1.0f, {p.out + n0, p.n, 1});
  }
}

}  // namespace untorch::kernels::cpu
