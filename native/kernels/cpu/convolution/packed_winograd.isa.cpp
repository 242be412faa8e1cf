// Winograd convolution F(2×2, 3×3) in NHWC: 16 GEMMs with 4/9 of the direct kernel's multiplications.
//
//   V = Bᵀ·d·B of each 4×4 patch d;  M[ξ] = V[ξ]·U[ξ] for the 16 positions ξ;  2×2 outputs = Aᵀ·M·A
//
// Weights U = G·g·Gᵀ are transformed and packed at export, [16][out/16][in][16]. A block of tiles passes at a time: V
// [16][tiles][in] stays in the L2, M [16][tiles][32] for two panels of output channels. The factors are 0, ±1 and ±½,
// so errors stay those of the direct kernel within a small factor. Every output is computed in one fixed order.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/convolution/packed_levels.h"
#include "kernels/cpu/gemm/gemm_epilogue.h"
#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
constexpr int P = kPanel<float>;
constexpr int N = kLanes<float>;
constexpr std::int64_t kWide = 2 * P;  // output channels of a pass
constexpr std::int64_t kGap = 16;      // keeps the 16 matrices of V out of the same cache sets

std::int64_t matrix_step(std::int64_t tiles, std::int64_t channels) { return tiles * channels + kGap; }

// V of one tile; rows[16] are the addresses of its pixels.
void transform_input(const float* const* rows, std::int64_t channels, float* to, std::int64_t step) {
  for (std::int64_t c = 0; c < channels; c += N) {
    V t[4][4];
#pragma GCC unroll 4
    for (int x = 0; x < 4; ++x) {
      const V d0 = load(rows[x] + c), d1 = load(rows[4 + x] + c), d2 = load(rows[8 + x] + c),
              d3 = load(rows[12 + x] + c);
      t[0][x] = d0 - d2, t[1][x] = d1 + d2, t[2][x] = d2 - d1, t[3][x] = d1 - d3;
    }
#pragma GCC unroll 4
    for (int y = 0; y < 4; ++y) {
      float* const at = to + 4 * y * step + c;
      store(at, t[y][0] - t[y][2]);
      store(at + step, t[y][1] + t[y][2]);
      store(at + 2 * step, t[y][2] - t[y][1]);
      store(at + 3 * step, t[y][1] - t[y][3]);
    }
  }
}

// The 2×2 outputs of one vector of channels.
[[gnu::always_inline]] inline void transform_output(const float* from, std::int64_t step, V (&out)[2][2]) {
  V s[2][4];
#pragma GCC unroll 4
  for (int x = 0; x < 4; ++x) {
    const V m0 = load(from + x * step), m1 = load(from + (4 + x) * step), m2 = load(from + (8 + x) * step),
            m3 = load(from + (12 + x) * step);
    s[0][x] = m0 + m1 + m2, s[1][x] = m1 - m2 - m3;
  }
#pragma GCC unroll 2
  for (int y = 0; y < 2; ++y) out[y][0] = s[y][0] + s[y][1] + s[y][2], out[y][1] = s[y][1] - s[y][2] - s[y][3];
}

}  // namespace

std::int64_t winograd_workspace(std::int64_t tiles, std::int64_t channels) {
  return 16 * (matrix_step(tiles, channels) + matrix_step(tiles, kWide)) * static_cast<std::int64_t>(sizeof(float));
}

void winograd_slice(const ConvolutionCall& call, std::int64_t tile0, std::int64_t tile1, void* workspace) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t tiles = tile1 - tile0, channels = p.in_channels, n = p.out_channels, panels = n / P;
  const std::int64_t across = (p.output[1] + 1) / 2, down = (p.output[0] + 1) / 2;
  const std::int64_t v_step = matrix_step(tiles, channels), m_step = matrix_step(tiles, kWide);
  float* const v = static_cast<float*>(workspace);
  float* const m = v + 16 * v_step;
  for (std::int64_t tile = tile0; tile < tile1; ++tile) {
    const std::int64_t image = tile / (across * down), y = tile / across % down * 2, x = tile % across * 2;
    const float* const from = call.input + image * call.strides.batch;
    const float* rows[16];
    for (std::int64_t i = 0; i < 16; ++i) {
      const std::int64_t iy = y + i / 4 - p.padding[0], ix = x + i % 4 - p.padding[1];
      const bool inside = iy >= 0 && iy < p.input[0] && ix >= 0 && ix < p.input[1];
      rows[i] = inside ? from + iy * call.strides.row + ix * call.strides.pixel : call.zeros;
    }
    transform_input(rows, channels, v + (tile - tile0) * channels, v_step);
  }
  const TileEpilogue inside = tile_epilogue(p.epilogue, call.residual != nullptr);
  const V low = V{} + inside.low, high = V{} + inside.high;
  const bool clamps = inside.low != -__builtin_inff();
  const std::int64_t tile_m = (tiles + (tiles + kMaxRows - 1) / kMaxRows - 1) / ((tiles + kMaxRows - 1) / kMaxRows);
  for (std::int64_t panel = 0; panel < panels; panel += 2) {
    const std::int64_t wide = panels - panel < 2 ? panels - panel : 2;
    for (std::int64_t position = 0; position < 16; ++position) {
      for (std::int64_t j = 0; j < wide;) {
        const int group = choose_panels(static_cast<int>(tile_m), wide - j);
        Tile<float> t{};
        t.k = channels, t.lda = channels, t.alpha = 1.0f, t.beta = 0.0f;
        t.b = call.weight + ((position * panels + panel + j) * channels) * P;
        t.row_step = P, t.panel_step = P * channels, t.ldc = kWide;
        for (std::int64_t i = 0; i < tiles; i += tile_m) {
          const std::int64_t rows = tiles - i < tile_m ? tiles - i : tile_m;
          t.a = v + position * v_step + i * channels;
          t.c = m + position * m_step + i * kWide + j * P;
          kMicro<float>.kernel[rows - 1][group - 1](t);
        }
        j += group;
      }
    }
    const std::int64_t channel = panel * P, width = wide * P;
    for (std::int64_t tile = tile0; tile < tile1; ++tile) {
      const std::int64_t image = tile / (across * down), y = tile / across % down * 2, x = tile % across * 2;
      const std::int64_t rows = p.output[0] - y < 2 ? 1 : 2, cols = p.output[1] - x < 2 ? 1 : 2;
      const std::int64_t at = ((image * p.output[0] + y) * p.output[1] + x) * n + channel, line = p.output[1] * n;
      for (std::int64_t c = 0; c < width; c += N) {
        V out[2][2];
        transform_output(m + (tile - tile0) * kWide + c, m_step, out);
        const V bias = call.bias == nullptr ? V{} : load(call.bias + channel + c);
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t s = 0; s < cols; ++s) {
            const std::int64_t to = at + r * line + s * n + c;
            V value = out[r][s] + bias;
            if (inside.residual) value += load(call.residual + to);
            if (clamps) {
              value = low > value ? low : value;
              value = high < value ? high : value;
            }
            store(call.output + to, value);
          }
        }
      }
      if (!inside.rest) continue;
      for (std::int64_t r = 0; r < rows; ++r) {
        const float* const added =
            call.residual == nullptr || inside.residual ? nullptr : call.residual + at + r * line;
        apply_epilogue(cols, width, p.epilogue, added, n, call.output + at + r * line, n);
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
