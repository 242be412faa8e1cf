// Indirect GEMM for convolution in NHWC: a tile of output pixels × panels of 16 output channels stays in registers.
//
//   C[MR pixels, NV·16] = Σ over taps, channels  input[row of (pixel, tap)][channel] · weight[tap][channel][NV·16]
//
// Weights [ceil(out/16)][taps][in][16]. Each tile has a table [taps][pixels] of the addresses of its input rows, made
// once for a block of tiles and used for every panel; padding points to a row of zeros, and taps that are padding for
// the whole tile are skipped. 24 FMAs for 14 loads a step with AVX-512 (12×2): bound by the FMA ports. The reduction
// runs in blocks of at most kBlockK, so that a panel's part of the weights stays in the L1 or L2 while all tiles of the
// block pass. Every output is one chain of multiply-adds in the order of taps and channels.
//
// Weights of bfloat16 come in pairs of channels, [ceil(out/16)][taps][in/2][16][2]. With AVX512_BF16 the input is
// rounded to bfloat16 first, and a pair counts as one channel: vdpbf16ps does two multiply-adds a lane, so the kernel
// is bound by twice the rate of float32. At other levels a group of panels is widened into scratch once for all tiles
// of a block (2 bytes a weight for at least 16 multiply-adds), and the float32 kernels run.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/convolution/packed_levels.h"
#include "kernels/cpu/gemm/gemm_epilogue.h"
#include "kernels/cpu/gemm/gemm_half_pack.h"
#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr int P = kPanel<float>;
static_assert(P == kPackWidth);
using V = Vector<float>;

constexpr std::int64_t kBlockK = 768;  // even, so that it holds whole pairs
constexpr std::int64_t kMostPanels = 4;

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

// Sums so far, bias, residual and clamp; then the tile's store.
template <int MR, int W>
[[gnu::always_inline]] inline void finish_indirect(const IndirectTile& t, V (&acc)[MR][W]) {
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
  finish_indirect<MR, W>(t, acc);
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

#if defined(__AVX512F__)
#define UNTORCH_BF16 __attribute__((target("avx512bf16,avx512vl")))

// Pairs of bfloat16 in the place of floats, in the rows and in B.
template <int MR, int NV>
[[gnu::noinline]] UNTORCH_BF16 void indirect_bf16(const IndirectTile& t) {
  V acc[MR][NV] = {};
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
    for (std::int64_t k = 0; k < run; ++k, b += P) {
      __m512bh row[NV];
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) row[j] = (__m512bh)_mm512_loadu_si512(b + j * panel_step);
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) __builtin_prefetch(b + v * panel_step + kPrefetchSteps * P);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        int pair;
        std::memcpy(&pair, a[i] + k, sizeof pair);
        const auto x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) acc[i][j] = (V)_mm512_dpbf16_ps((__m512)acc[i][j], x, row[j]);
      }
    }
  }
  finish_indirect<MR, NV>(t, acc);
}

// The first 8 columns of one panel.
template <int MR>
[[gnu::noinline]] UNTORCH_BF16 void indirect_half_bf16(const IndirectTile& t) {
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
      const auto row = (__m256bh)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        int pair;
        std::memcpy(&pair, a[i] + k, sizeof pair);
        const auto x = (__m256bh)_mm256_set1_epi32(pair);
        acc[i][0] = (HalfVector)_mm256_dpbf16_ps((__m256)acc[i][0], x, row);
      }
    }
  }
  finish_half<MR>(acc, t.bias, t.accumulate, t.residual, t.ldc, t.low, t.high, t.c, t.ldc);
}

// Subnormals become zero, as vdpbf16ps takes them.
UNTORCH_BF16 void round_run(const float* from, std::int64_t count, std::uint16_t* to) {
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
  }
  if (i < count) {
    const auto mask = static_cast<__mmask16>((1u << (count - i)) - 1u);
    const auto rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + i));
    _mm256_mask_storeu_epi16(to + i, mask, rounded);
  }
}
#endif

using IndirectKernel = void (*)(const IndirectTile&);

struct IndirectTable {
  IndirectKernel kernel[kMaxRows][4] = {}, half[kMaxRows] = {};
};

template <class Make, int MR, int NV>
constexpr void add_indirect(IndirectTable& table) {
  if constexpr (NV <= max_panels(MR)) table.kernel[MR - 1][NV - 1] = Make::template kernel<MR, NV>();
}
template <class Make, int MR = 1>
constexpr void add_indirect_rows(IndirectTable& table) {
  if constexpr (MR <= kMaxRows) {
    table.half[MR - 1] = Make::template half<MR>();
    add_indirect<Make, MR, 1>(table), add_indirect<Make, MR, 2>(table);
    add_indirect<Make, MR, 3>(table), add_indirect<Make, MR, 4>(table);
    add_indirect_rows<Make, MR + 1>(table);
  }
}
template <class Make>
constexpr IndirectTable make_indirect_table() {
  IndirectTable table;
  add_indirect_rows<Make>(table);
  return table;
}

struct MakeIndirect {
  template <int MR, int NV>
  static constexpr IndirectKernel kernel() {
    return indirect<MR, NV>;
  }
  template <int MR>
  static constexpr IndirectKernel half() {
    return indirect_half<MR>;
  }
};
constexpr IndirectTable kIndirect = make_indirect_table<MakeIndirect>();

#if defined(__AVX512F__)
struct MakeIndirectBf16 {
  template <int MR, int NV>
  static constexpr IndirectKernel kernel() {
    return indirect_bf16<MR, NV>;
  }
  template <int MR>
  static constexpr IndirectKernel half() {
    return indirect_half_bf16<MR>;
  }
};
constexpr IndirectTable kIndirectBf16 = make_indirect_table<MakeIndirectBf16>();
#endif

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
  if (most > kMostPanels) most = kMostPanels;
  if (panels <= 0) return 1;
  return static_cast<int>(ceil_div(panels, ceil_div(panels, most)));
}

// All tiles of a block, one group.
void group_slice(const ConvolutionCall& call, const PixelTiles& tiles, std::int64_t tile0, std::int64_t tile1,
                 std::int64_t tallest, const float* const* table, std::int64_t group, std::int64_t panel0,
                 std::int64_t panel1, float* wide) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t table_step = call.taps * kMaxRows;
  const std::int64_t n = p.out_channels, k = call.taps * call.run, ldc = p.groups * n;
  const std::int64_t full_panels = n / P;
  const std::int64_t first_channel = group * n;
  const bool widens = call.weights == ConvolutionWeights::kWidened;
  // In floats, or in pairs where these are multiplied as they are. Pairs to widen are half as many.
  const std::int64_t per_panel = widens ? P * k / 2 : P * k;
  const float* const weight = call.weight + group * ceil_div(n, P) * per_panel;
  const float* const bias = call.bias == nullptr ? nullptr : call.bias + first_channel;
  // Blocks of the reduction: several taps, or a part of one.
  const std::int64_t pieces = ceil_div(call.run, kBlockK), run = ceil_div(ceil_div(call.run, pieces), 2) * 2;
  const std::int64_t most_taps = pieces > 1 ? 1 : kBlockK / call.run > 0 ? kBlockK / call.run : 1;
  const std::int64_t tap_blocks = ceil_div(call.taps, most_taps), block_taps = ceil_div(call.taps, tap_blocks);
  alignas(64) float buffer[kMaxRows * P];
  alignas(64) float bias_tail[P];
  if (bias != nullptr && n % P != 0) {
    for (std::int64_t j = 0; j < P; ++j) bias_tail[j] = j < n % P ? bias[full_panels * P + j] : 0.0f;
  }
  const TileEpilogue inside = tile_epilogue(p.epilogue, call.residual != nullptr);
  const IndirectTable* kernels = &kIndirect;
#if defined(__AVX512F__)
  if (call.weights == ConvolutionWeights::kPairs) kernels = &kIndirectBf16;
#endif
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
        const std::int64_t at = (tap * call.run + piece) * P;
        if (widens) {
          const std::int64_t steps = t.taps * t.run;
          const auto* const pairs = reinterpret_cast<const std::uint32_t*>(weight + panel * per_panel + at / 2);
          widen_panels<HalfType::kBFloat16>(pairs, ceil_div(cols, P), per_panel, steps / 2, wide);
          t.b = wide, t.panel_step = steps * P;
        } else {
          t.b = weight + panel * per_panel + at;
        }
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
          (half ? kernels->half[rows - 1] : kernels->kernel[rows - 1][width - 1])(t);
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

std::int64_t convolution_workspace(std::int64_t tiles, std::int64_t taps, ConvolutionWeights weights) {
  const std::int64_t wide = weights == ConvolutionWeights::kWidened ? kMostPanels * P * kBlockK * 4 : 0;
  return wide + tiles * taps * kMaxRows * static_cast<std::int64_t>(sizeof(const float*));
}

void round_to_bf16(std::int64_t pixels, std::int64_t count, const float* from, std::int64_t from_step,
                   std::uint16_t* to, std::int64_t to_step) {
  if (from_step == count && to_step == count) count *= pixels, pixels = 1;
  for (; pixels > 0; --pixels, from += from_step, to += to_step) {
#if defined(__AVX512F__)
    round_run(from, count, to);
#else
    for (std::int64_t i = 0; i < count; ++i) {
      Vector<float> v{};
      v[0] = from[i];
      store_half_part<HalfType::kBFloat16>(to + i, v, 1);
    }
#endif
  }
}

void widen_bf16_pairs(const std::uint32_t* from, std::int64_t pairs, float* to) {
  widen_panels<HalfType::kBFloat16>(from, 1, 0, pairs, to);
}

void convolution_slice(const ConvolutionCall& call, const PixelTiles& tiles, std::int64_t tile0, std::int64_t tile1,
                       std::int64_t group0, std::int64_t group1, std::int64_t panel0, std::int64_t panel1,
                       void* workspace) {
  const bool widens = call.weights == ConvolutionWeights::kWidened;
  float* const wide = static_cast<float*>(workspace);
  const float** const table =
      static_cast<const float**>(static_cast<void*>(widens ? wide + kMostPanels * P * kBlockK : wide));
  const std::int64_t table_step = call.taps * kMaxRows;
  std::int64_t tallest = 1;
  for (std::int64_t tile = tile0; tile < tile1; ++tile) {
    const std::int64_t size = tiles.size(tile);
    if (size > tallest) tallest = size;
    fill_rows(call, tiles.first(tile), size, table + (tile - tile0) * table_step);
  }
  for (std::int64_t group = group0; group < group1; ++group) {
    group_slice(call, tiles, tile0, tile1, tallest, table, group, panel0, panel1, wide);
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
