// Indirect GEMM for convolution in NHWC: a tile of output pixels × panels of 16 output channels stays in registers.
//
//   C[MR pixels, NV·16] = Σ over taps, channels  input[row of (pixel, tap)][channel] · weight[tap][channel][NV·16]
//
// Weights [ceil(out/16)][taps][in][16]. Each tile has a table [taps][pixels] of the addresses of its input rows, made
// once for a block of tiles and used for every panel; padding points to a row of zeros, and taps that are padding for
// the whole tile are skipped. 24 FMAs for 14 loads a step with AVX-512 (12×2): bound by the FMA ports. The reduction
// runs in blocks of at most kBlockK, so that a panel's part of the weights stays in the L1 or L2 while all tiles of the
// block pass. Every output is one chain of multiply-adds in the order of taps and channels.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/convolution/packed_levels.h"
#include "kernels/cpu/gemm/gemm_epilogue.h"
#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr int P = kPanel<float>;
static_assert(P == kPackWidth);
using V = Vector<float>;

constexpr std::int64_t kBlockK = 768;

constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }
constexpr std::int64_t smaller(std::int64_t x, std::int64_t y) { return x < y ? x : y; }

// A part of the reduction: `taps` taps and, of each, `run` channels from `offset` on.
struct IndirectTile {
  std::int64_t taps, run, offset;
  const float* const* rows;  // [taps][kMaxRows]; the first of a tap is null where the tap is skipped
  const float* b;
  std::int64_t panel_step;
  float* c;
  std::int64_t ldc;
  bool accumulate;
  const float* bias;      // added at the end; may be null
  const float* residual;  // laid out like c; may be null
  float low, high;        // of the clamp at the end
};

template <int MR, int NV>
[[gnu::noinline]] void indirect(const IndirectTile& t) {
  constexpr int W = NV * kVectorsPerPanel;
  V acc[MR][W];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) acc[i][j] = V{};
  }
  const float* b = t.b;
  const std::int64_t run = t.run, offset = t.offset, panel_step = t.panel_step;
  const float* const* rows = t.rows;
  for (std::int64_t tap = 0; tap < t.taps; ++tap, rows += kMaxRows) {
    if (rows[0] == nullptr) {
      b += run * P;
      continue;
    }
    const float* a[MR];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) a[i] = rows[i] + offset;
    for (std::int64_t k = 0; k < run; ++k) {
      V row[W];
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) {
        row[j] = load(b + (j / kVectorsPerPanel) * panel_step + (j % kVectorsPerPanel) * kLanes<float>);
      }
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) __builtin_prefetch(b + v * panel_step + kPrefetchSteps * P);
      b += P;
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        const V x = a[i][k] - V{};  // a plain broadcast: x − 0 is x
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) acc[i][j] += x * row[j];
      }
    }
  }
  float* const c = t.c;
  const std::int64_t ldc = t.ldc;
  if (t.accumulate) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) acc[i][j] += load(c + i * ldc + j * kLanes<float>);
    }
  }
  if (t.bias != nullptr) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
      const V bias = load(t.bias + j * kLanes<float>);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) acc[i][j] += bias;
    }
  }
  finish_tile<float, MR, W>(acc, t.residual, ldc, t.low, t.high);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) store(c + i * ldc + j * kLanes<float>, acc[i][j]);
  }
}

// The first 8 columns of one panel.
template <int MR>
[[gnu::noinline]] void indirect_half(const IndirectTile& t) {
  HalfVector acc[MR][kHalfVectors] = {};
  const float* b = t.b;
  const float* const* rows = t.rows;
  for (std::int64_t tap = 0; tap < t.taps; ++tap, rows += kMaxRows) {
    if (rows[0] == nullptr) {
      b += t.run * P;
      continue;
    }
    const float* a[MR];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) a[i] = rows[i] + t.offset;
    for (std::int64_t k = 0; k < t.run; ++k, b += P) {
      HalfVector row[kHalfVectors];
#pragma GCC unroll 2
      for (int j = 0; j < kHalfVectors; ++j) row[j] = load_half(b + j * kHalfLanes);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        const HalfVector x = a[i][k] - HalfVector{};
#pragma GCC unroll 2
        for (int j = 0; j < kHalfVectors; ++j) acc[i][j] += x * row[j];
      }
    }
  }
  finish_half<MR>(acc, t.bias, t.accumulate, t.residual, t.ldc, t.low, t.high, t.c, t.ldc);
}

using IndirectKernel = void (*)(const IndirectTile&);

struct IndirectTable {
  IndirectKernel kernel[kMaxRows][4] = {}, half[kMaxRows] = {};

  template <int MR, int NV>
  constexpr void add() {
    if constexpr (MR <= kMaxRows && NV <= max_panels(MR <= kMaxRows ? MR : 1))
      kernel[MR - 1][NV - 1] = indirect<MR, NV>;
  }
  template <int MR>
  constexpr void add_row() {
    if constexpr (MR <= kMaxRows) half[MR - 1] = indirect_half<MR>;
    add<MR, 1>(), add<MR, 2>(), add<MR, 3>(), add<MR, 4>();
  }
  constexpr IndirectTable() {
    add_row<1>(), add_row<2>(), add_row<3>(), add_row<4>(), add_row<5>(), add_row<6>();
    add_row<7>(), add_row<8>(), add_row<9>(), add_row<10>(), add_row<11>(), add_row<12>();
  }
};
constexpr IndirectTable kIndirect{};

// The addresses of a tile's input rows, [taps][kMaxRows].
void fill_rows(const ConvolutionCall& call, std::int64_t first, std::int64_t count, const float** rows) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t per_image = p.output[0] * p.output[1];
  std::int64_t n = first / per_image, y = first % per_image / p.output[1], x = first % p.output[1];
  const bool whole_rows = call.taps != p.taps();  // padded beforehand
  for (std::int64_t i = 0; i < count; ++i) {
    const float* const image = call.input + n * call.strides.batch;
    const std::int64_t top = y * p.stride[0] - p.padding[0], left = x * p.stride[1] - p.padding[1];
    const float** to = rows + i;
    if (whole_rows) {
      const float* at = image + top * call.strides.row + left * call.strides.pixel;
      for (std::int64_t ky = 0; ky < p.kernel[0]; ++ky, to += kMaxRows) {
        *to = at;
        at += p.dilation[0] * call.strides.row;
      }
    } else {
      std::int64_t iy = top;
      for (std::int64_t ky = 0; ky < p.kernel[0]; ++ky, iy += p.dilation[0]) {
        const bool inside = iy >= 0 && iy < p.input[0];
        const float* const line = image + iy * call.strides.row;
        std::int64_t ix = left;
        for (std::int64_t kx = 0; kx < p.kernel[1]; ++kx, ix += p.dilation[1], to += kMaxRows) {
          *to = inside && ix >= 0 && ix < p.input[1] ? line + ix * call.strides.pixel : call.zeros;
        }
      }
    }
    if (++x == p.output[1]) {
      x = 0;
      if (++y == p.output[0]) y = 0, ++n;
    }
  }
  if (whole_rows) return;
  for (std::int64_t tap = 0; tap < call.taps; ++tap, rows += kMaxRows) {
    bool all = true;
    for (std::int64_t i = 0; i < count; ++i) all = all && rows[i] == call.zeros;
    if (all) rows[0] = nullptr;
  }
}

// As few groups of panels as the registers allow, of about equal width.
int balanced_panels(std::int64_t rows, std::int64_t panels) {
  std::int64_t most = max_panels(static_cast<int>(rows));
  if (most > 4) most = 4;
  if (panels <= 0) return 1;
  return static_cast<int>(ceil_div(panels, ceil_div(panels, most)));
}

// All tiles of a block, one group.
void group_slice(const ConvolutionCall& call, const PixelTiles& tiles, std::int64_t tile0, std::int64_t tile1,
                 std::int64_t tallest, const float* const* table, std::int64_t group, std::int64_t panel0,
                 std::int64_t panel1) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t table_step = call.taps * kMaxRows;
  const std::int64_t n = p.out_channels, k = call.taps * call.run, ldc = p.groups * n;
  const std::int64_t full_panels = n / P;
  const std::int64_t first_channel = group * n;
  const float* const weight = call.weight + group * ceil_div(n, P) * P * k;
  const float* const bias = call.bias == nullptr ? nullptr : call.bias + first_channel;
  // Blocks of the reduction: several taps, or a part of one.
  const std::int64_t pieces = ceil_div(call.run, kBlockK), run = ceil_div(call.run, pieces);
  const std::int64_t most_taps = pieces > 1 ? 1 : kBlockK / call.run > 0 ? kBlockK / call.run : 1;
  const std::int64_t tap_blocks = ceil_div(call.taps, most_taps), block_taps = ceil_div(call.taps, tap_blocks);
  alignas(64) float buffer[kMaxRows * P];
  alignas(64) float bias_tail[P];
  if (bias != nullptr && n % P != 0) {
    for (std::int64_t j = 0; j < P; ++j) bias_tail[j] = j < n % P ? bias[full_panels * P + j] : 0.0f;
  }
  const TileEpilogue inside = tile_epilogue(p.epilogue, call.residual != nullptr);
  for (std::int64_t tap = 0; tap < call.taps; tap += block_taps) {
    for (std::int64_t piece = 0; piece < call.run; piece += run) {
      IndirectTile t{};
      t.taps = smaller(block_taps, call.taps - tap), t.run = smaller(run, call.run - piece);
      t.offset = piece + (call.taps == p.taps() ? group * p.in_channels : 0);
      t.accumulate = tap > 0 || piece > 0;
      t.panel_step = P * k;
      const bool last = tap + t.taps >= call.taps && piece + t.run >= call.run;
      for (std::int64_t panel = panel0; panel < panel1;) {
        // A partial last panel is a tile of its own.
        const std::int64_t full = smaller(full_panels, panel1) - panel;
        const int width = balanced_panels(tallest, full);
        const bool half = full <= 0 && n - panel * P == kHalf, partial = full <= 0 && !half;
        const std::int64_t cols = full <= 0 ? n - panel * P : static_cast<std::int64_t>(width) * P;
        const std::int64_t channel = first_channel + panel * P;
        t.b = weight + panel * P * k + (tap * call.run + piece) * P;
        const bool in_registers = last && !partial;
        t.low = in_registers ? inside.low : -__builtin_inff(), t.high = in_registers ? inside.high : __builtin_inff();
        t.bias = !last || bias == nullptr ? nullptr : partial ? bias_tail : bias + panel * P;
        for (std::int64_t tile = tile0; tile < tile1; ++tile) {
          const std::int64_t first = tiles.first(tile);
          const int rows = static_cast<int>(tiles.size(tile));
          float* const to = call.output + first * ldc + channel;
          t.rows = table + (tile - tile0) * table_step + tap * kMaxRows;
          t.c = partial ? buffer : to;
          t.ldc = partial ? P : ldc;
          const float* const added = call.residual == nullptr ? nullptr : call.residual + first * ldc + channel;
          t.residual = in_registers && inside.residual ? added : nullptr;
          if (partial && t.accumulate) {
            for (int r = 0; r < rows; ++r) {
              for (std::int64_t j = 0; j < cols; ++j) buffer[r * P + j] = to[r * ldc + j];
            }
          }
          (half ? kIndirect.half[rows - 1] : kIndirect.kernel[rows - 1][width - 1])(t);
          if (partial) {
            for (int r = 0; r < rows; ++r) {
              for (std::int64_t j = 0; j < cols; ++j) to[r * ldc + j] = buffer[r * P + j];
            }
          }
          if (last && partial) {
            apply_epilogue(rows, cols, p.epilogue, added, ldc, to, ldc);
          } else if (last && inside.rest) {
            apply_epilogue(rows, cols, p.epilogue, inside.residual ? nullptr : added, ldc, to, ldc);
          }
        }
        panel += width;
      }
    }
  }
}

}  // namespace

int convolution_tile_rows() { return kMaxRows; }

std::int64_t convolution_workspace(std::int64_t tiles, std::int64_t taps) {
  return tiles * taps * kMaxRows * static_cast<std::int64_t>(sizeof(const float*));
}

void convolution_slice(const ConvolutionCall& call, const PixelTiles& tiles, std::int64_t tile0, std::int64_t tile1,
                       std::int64_t group0, std::int64_t group1, std::int64_t panel0, std::int64_t panel1,
                       void* workspace) {
  const float** const table = static_cast<const float**>(workspace);
  const std::int64_t table_step = call.taps * kMaxRows;
  std::int64_t tallest = 1;
  for (std::int64_t tile = tile0; tile < tile1; ++tile) {
    const std::int64_t size = tiles.size(tile);
    if (size > tallest) tallest = size;
    fill_rows(call, tiles.first(tile), size, table + (tile - tile0) * table_step);
  }
  for (std::int64_t group = group0; group < group1; ++group) {
    group_slice(call, tiles, tile0, tile1, tallest, table, group, panel0, panel1);
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
