// Indirect GEMM in integers for W8A8 convolution in NHWC: a tile of output pixels × panels of 16 output channels.
//
//   S[MR pixels, NP·16] = start + Σ over taps, words  input[row of (pixel, tap)][word] · weight[tap][word][NP·16][4]
//
// Each tile has a table [taps][pixels] of the addresses of its input rows, made once for a block of tiles and used for
// every panel; padding points to a row of zero points. All sums of a tile stay in registers over the whole reduction
// and start at −zero · column sums, so the result is the exact integer. 24 vpdpbusd for 14 loads a step of four
// channels with AVX-512 (12 × 2): bound by the multipliers. The sums pass to the epilogue through a tile in L1.
#include <cstdint>

#include "kernels/cpu/w8a8/convolution_bytes.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr std::int64_t P = kPackWidth;
constexpr int N = kLanes<float>;

#if defined(__AVX512F__)
constexpr int kTallestVnni = 12, kTallestMadd = 12;
constexpr int widest(int rows, bool) { return rows <= 6 ? 4 : rows <= 8 ? 3 : 2; }
#elif defined(__AVX2__)
constexpr int kTallestVnni = 6, kTallestMadd = 4;
constexpr int widest(int rows, bool vnni) { return vnni ? (rows <= 3 ? 2 : 1) : (rows <= 2 ? 2 : 1); }
#else
constexpr int kTallestVnni = 0, kTallestMadd = 2;
constexpr int widest(int, bool) { return 1; }
#endif
constexpr int kTallest = 12;  // of the tables of addresses

constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }
constexpr std::int64_t smaller(std::int64_t x, std::int64_t y) { return x < y ? x : y; }

struct SumTile {
  std::int64_t taps, run, offset;  // run: words of a tap; offset: bytes, of the group
  const std::uint8_t* const* rows;
  const std::int8_t* b;
  std::int64_t panel_step;  // bytes
  const std::int32_t* start;
  std::int32_t* sums;     // [MR][NP·16]
  const ByteTile* bytes;  // where a tile may go to bytes in registers; else null, and the sums are stored
};

typedef std::int32_t LooseWord __attribute__((aligned(1), may_alias));
[[gnu::always_inline]] inline Ints broadcast(const std::uint8_t* p) {
  return Ints{} + *reinterpret_cast<const LooseWord*>(p);
}

template <int MR, int NP>
[[gnu::noinline]] void sums_madd(const SumTile& t) {
  constexpr int W = NP * kVectorsPerPanel;
  Ints acc[MR][W];
#pragma GCC unroll 16
  for (int j = 0; j < W; ++j) {
    const Ints start = load_ints(t.start + j * N);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) acc[i][j] = start;
  }
  const std::int8_t* b = t.b;
  const std::uint8_t* const* rows = t.rows;
  for (std::int64_t tap = 0; tap < t.taps; ++tap, rows += kTallest) {
    for (std::int64_t k = 0; k < t.run; ++k, b += kPanelBytes) {
      Ints even[W], odd[W];
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) {
        const auto both =
            (Shorts)load_weights(b + j / kVectorsPerPanel * t.panel_step + j % kVectorsPerPanel * kVectorBytes);
        even[j] = (Ints)((both << 8) >> 8), odd[j] = (Ints)(both >> 8);
      }
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        const Ints a = broadcast(rows[i] + t.offset + 4 * k);
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) acc[i][j] = dot_madd(acc[i][j], a, even[j], odd[j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) *reinterpret_cast<LooseInts*>(t.sums + (i * W + j) * N) = acc[i][j];
  }
}

#if defined(UNTORCH_VNNI)
template <int MR, int NP>
[[gnu::noinline]] UNTORCH_VNNI void sums_vnni(const SumTile& t) {
  constexpr int W = NP * kVectorsPerPanel;
  constexpr std::int64_t kAhead = 24 * kPanelBytes;
  Ints acc[MR][W];
#pragma GCC unroll 16
  for (int j = 0; j < W; ++j) {
    const Ints start = load_ints(t.start + j * N);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) acc[i][j] = start;
  }
  const std::int8_t* b = t.b;
  const std::uint8_t* const* rows = t.rows;
  const std::int64_t run = t.run, panel_step = t.panel_step;
  for (std::int64_t tap = 0; tap < t.taps; ++tap, rows += kTallest) {
    const std::uint8_t* a[MR];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) a[i] = rows[i] + t.offset;
    for (std::int64_t k = 0; k < run; ++k, b += kPanelBytes) {
      Ints w[W];
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) {
        const std::int8_t* const from = b + j / kVectorsPerPanel * panel_step;
        if (j % kVectorsPerPanel == 0) __builtin_prefetch(from + kAhead, 0, 3);
        w[j] = load_weights(from + j % kVectorsPerPanel * kVectorBytes);
      }
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        const Ints x = broadcast(a[i] + 4 * k);
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) acc[i][j] = UNTORCH_DPBUSD(acc[i][j], x, w[j]);
      }
    }
  }
#if defined(UNTORCH_FINISHES_IN_REGISTERS)
  if (t.bytes != nullptr) {
    t.bytes->residual != nullptr ? finish_bytes<true>(acc, *t.bytes) : finish_bytes<false>(acc, *t.bytes);
    return;
  }
#endif
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) *reinterpret_cast<LooseInts*>(t.sums + (i * W + j) * N) = acc[i][j];
  }
}
#endif

using SumKernel = void (*)(const SumTile&);

// [rows - 1][panels - 1]; null where the sums do not fit the registers.
struct SumKernels {
  SumKernel kernel[kTallest][4] = {};

  template <int MR, int NP>
  constexpr void add(bool vnni) {
    if (NP > widest(MR, vnni)) return;
#if defined(UNTORCH_VNNI)
    if constexpr (MR <= kTallestVnni) {
      if (vnni) kernel[MR - 1][NP - 1] = sums_vnni<MR, NP>;
    }
#endif
    if constexpr (MR <= kTallestMadd) {
      if (!vnni) kernel[MR - 1][NP - 1] = sums_madd<MR, NP>;
    }
  }
  template <int MR>
  constexpr void add_row(bool vnni) {
    add<MR, 1>(vnni);
    if constexpr (widest(MR, true) > 1 || widest(MR, false) > 1) add<MR, 2>(vnni);
    if constexpr (widest(MR, true) > 2) add<MR, 3>(vnni);
    if constexpr (widest(MR, true) > 3) add<MR, 4>(vnni);
  }
  constexpr explicit SumKernels(bool vnni) {
    add_row<1>(vnni), add_row<2>(vnni), add_row<3>(vnni), add_row<4>(vnni), add_row<5>(vnni), add_row<6>(vnni);
    add_row<7>(vnni), add_row<8>(vnni), add_row<9>(vnni), add_row<10>(vnni), add_row<11>(vnni), add_row<12>(vnni);
  }
};
constexpr SumKernels kMadd{false}, kVnni{true};

// A tile of pixels: its first, and how many. Divisions cost as much as short reductions, so they are done once.
struct Place {
  std::int64_t first, image, rows;
};

// The addresses of a tile's input rows, [taps][kTallest].
void fill_rows(const Int8ConvolutionCall& call, std::int64_t first, std::int64_t count, const std::uint8_t** rows) {
  const Int8Convolution& p = *call.problem;
  const std::int64_t per_image = p.output[0] * p.output[1], image = first / per_image;
  std::int64_t y = first % per_image / p.output[1], x = first % p.output[1];
  const bool whole_rows = call.taps != p.taps();  // padded beforehand
  const std::uint8_t* const from = call.input + image * call.batch_step;
  const std::uint8_t* const zeros = call.zeros + image * call.zeros_step;
  if (call.taps == 1 && p.padding[0] == 0 && p.padding[1] == 0) {
    const std::int64_t step = p.stride[1] * call.pixel_step;
    const std::uint8_t* at = from + y * p.stride[0] * call.row_step + x * step;
    for (std::int64_t i = 0; i < count; ++i, at += step) {
      rows[i] = at;
      if (++x == p.output[1]) x = 0, ++y, at = from + y * p.stride[0] * call.row_step - step;
    }
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t top = y * p.stride[0] - p.padding[0], left = x * p.stride[1] - p.padding[1];
    const std::uint8_t** to = rows + i;
    if (whole_rows) {
      const std::uint8_t* at = from + top * call.row_step + left * call.pixel_step;
      for (std::int64_t ky = 0; ky < call.taps; ++ky, to += kTallest, at += p.dilation[0] * call.row_step) *to = at;
    } else {
      std::int64_t iy = top;
      for (std::int64_t ky = 0; ky < p.kernel[0]; ++ky, iy += p.dilation[0]) {
        const bool inside = iy >= 0 && iy < p.input[0];
        const std::uint8_t* const line = from + iy * call.row_step;
        std::int64_t ix = left;
        for (std::int64_t kx = 0; kx < p.kernel[1]; ++kx, ix += p.dilation[1], to += kTallest) {
          *to = inside && ix >= 0 && ix < p.input[1] ? line + ix * call.pixel_step : zeros;
        }
      }
    }
    if (++x == p.output[1]) x = 0, ++y;
  }
}

}  // namespace

void extend_range(const float* from, std::int64_t count, FloatRange& range) {
  using V = Vector<float>;
  V low{}, high{};
  Ints magnitude{};
  const auto see = [&](V x) __attribute__((always_inline)) {
    const Ints bits = (Ints)x & 0x7fffffff;
    low = smaller(x, low), high = larger(x, high);
    magnitude = bits > magnitude ? bits : magnitude;
  };
  std::int64_t j = 0;
  for (; j + N <= count; j += N) see(load(from + j));
  if (j < count) {
    V part{};
    for (std::int64_t x = j; x < count; ++x) part[x - j] = from[x];
    see(part);
  }
  for (int i = 0; i < N; ++i) {
    range.low = low[i] < range.low ? low[i] : range.low;
    range.high = high[i] > range.high ? high[i] : range.high;
    range.finite = range.finite && magnitude[i] < kInfinityBits;
  }
}

void quantize_bytes(const float* from, std::int64_t count, float inverse, std::int32_t zero, std::uint8_t* to) {
  using V = Vector<float>;
  std::int64_t j = 0;
  for (; j + N <= count; j += N) {
    const V x = load(from + j);
    *reinterpret_cast<LooseNarrow*>(to + j) = (LooseNarrow)quantized(x == x ? x : V{}, inverse, zero);
  }
  if (j == count) return;
  V part{};
  for (std::int64_t x = j; x < count; ++x) part[x - j] = from[x];
  const Narrow u = quantized(part == part ? part : V{}, inverse, zero);
  for (std::int64_t x = j; x < count; ++x) to[x] = u[x - j];
}

int int8_convolution_tile_rows(bool vnni) { return vnni ? kTallestVnni : kTallestMadd; }

std::int64_t int8_convolution_workspace(std::int64_t tiles, std::int64_t taps) {
  const auto rows = static_cast<std::int64_t>(kTallest * sizeof(const std::uint8_t*));
  return tiles * (taps * rows + static_cast<std::int64_t>(sizeof(Place)));
}

void int8_convolution_slice(const Int8ConvolutionCall& call, const PixelTiles& tiles, std::int64_t tile0,
                            std::int64_t tile1, std::int64_t group0, std::int64_t group1, std::int64_t panel0,
                            std::int64_t panel1, void* workspace) {
  const Int8Convolution& p = *call.problem;
  const std::int64_t pixels = p.output[0] * p.output[1], table_step = call.taps * kTallest;
  const auto places = static_cast<Place*>(workspace);
  const auto table = reinterpret_cast<const std::uint8_t**>(places + (tile1 - tile0));
  std::int64_t tallest = 1;
  std::int64_t first = tiles.first(tile0);
  for (std::int64_t tile = tile0; tile < tile1; ++tile) {
    const std::int64_t next = tiles.first(tile + 1), size = next - first;
    if (size > tallest) tallest = size;
    fill_rows(call, first, size, table + (tile - tile0) * table_step);
    places[tile - tile0] = {first, first / pixels, size};
    first = next;
  }
  const SumKernels& kernels = call.vnni ? kVnni : kMadd;
  const std::int64_t n = p.out_channels, of_group = ceil_div(n, P) * P;
  const std::int64_t panel_step = call.taps * call.run * kPanelBytes;
  const std::int64_t most = widest(static_cast<int>(tallest), call.vnni);
  Finisher finish(call);
  alignas(64) std::int32_t sums[kTallest * 4 * P];
  ByteTile bytes = byte_tile(call, finish);
  bool in_registers = false;
#if defined(UNTORCH_FINISHES_IN_REGISTERS)
  in_registers = call.vnni && finish.only_clamps_above();
#endif
  for (std::int64_t group = group0; group < group1; ++group) {
    for (std::int64_t panel = panel0; panel < panel1;) {
      // As few groups of panels as the registers allow, of about equal width.
      const std::int64_t left = panel1 - panel, width = ceil_div(left, ceil_div(left, most));
      const std::int64_t channel = group * of_group + panel * P;
      SumTile t{};
      t.taps = call.taps, t.run = call.run, t.offset = group * call.group_step;
      t.b = call.problem->weight + (group * of_group / P + panel) * panel_step, t.panel_step = panel_step;
      t.sums = sums;
      const std::int64_t shift = group * n + panel * P;
      bytes.bias = call.bias + channel;
      t.bytes = in_registers && panel * P + width * P <= n ? &bytes : nullptr;
      FinishTile f{};
      f.columns = smaller(width * P, n - panel * P), f.sums = sums, f.lds = width * P;
      f.bias = call.bias + channel, f.ldc = p.groups * n;
      for (std::int64_t tile = 0; tile < tile1 - tile0; ++tile) {
        const Place& place = places[tile];
        t.rows = table + tile * table_step;
        t.start = call.start + place.image * call.channel_step + channel;
        f.rows = place.rows, f.factor = call.factor + place.image * call.channel_step + channel;
        f.at = place.first * f.ldc + shift;
        bytes.factor = f.factor;
        if (in_registers) finish.place(f.at, bytes.out, bytes.residual);
        kernels.kernel[place.rows - 1][width - 1](t);
        if (t.bytes == nullptr) finish(f);
      }
      panel += width;
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
