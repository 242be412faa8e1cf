"""Kernels of AMX with emulated tiles, on CPUs without AMX: GEMMs of tiles, convolutions, W4A8 linear layers."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.native.shim import ROOT

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")

EMULATED = r"""
#define UNTORCH_ISA emulated
#include "kernels/cpu/common/amx.h"

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace untorch::kernels;
using namespace untorch::kernels::emulated;

// Emulates the instructions. Values are small integers, so that float32 is exact.
struct Emulated {
  inline static unsigned char tile[8][kAmxRows][kAmxTileBytes];
  inline static int words = kAmxMostWords;
  template <int T>
  static int rows() { return T < 6 ? kAmxRows : words; }
  template <int T>
  static std::size_t bytes() { return T == 4 || T == 5 ? 4 * words : kAmxTileBytes; }
  template <int T>
  static void zero() { std::memset(tile[T], 0, sizeof tile[T]); }
  template <int T>
  static void load(const void* from, std::int64_t stride) {
    for (int i = 0; i < rows<T>(); ++i) std::memcpy(tile[T][i], static_cast<const char*>(from) + i * stride, bytes<T>());
  }
  template <int T>
  static void store(void* to, std::int64_t stride) {
    for (int i = 0; i < kAmxRows; ++i) std::memcpy(static_cast<char*>(to) + i * stride, tile[T][i], 64);
  }
  template <int C, int A, int B, class Word, class Product>
  static void multiply(Product&& product) {
    for (int i = 0; i < kAmxRows; ++i) {
      for (int j = 0; j < 16; ++j) {
        Word sum;
        std::memcpy(&sum, tile[C][i] + j * 4, 4);
        for (int k = 0; k < words; ++k) sum += product(tile[A][i] + k * 4, tile[B][k] + j * 4);
        std::memcpy(tile[C][i] + j * 4, &sum, 4);
      }
    }
  }
  template <int C, int A, int B>
  static void dot_bf16() {
    const auto value = [](const unsigned char* from) {
      const unsigned bits = (from[0] | from[1] << 8) << 16;
      float wide;
      std::memcpy(&wide, &bits, 4);
      return wide;
    };
    multiply<C, A, B, float>([&](auto a, auto b) { return value(a) * value(b) + value(a + 2) * value(b + 2); });
  }
  template <int C, int A, int B>
  static void dot_u8s8() {
    multiply<C, A, B, std::int32_t>([](auto a, auto b) {
      int sum = 0;
      for (int x = 0; x < 4; ++x) sum += a[x] * static_cast<signed char>(b[x]);
      return sum;
    });
  }
};

template <bool kInt8, class Element>
Element stored(int value) {
  if constexpr (kInt8) return static_cast<Element>(value);
  const float wide = static_cast<float>(value);
  unsigned bits;
  std::memcpy(&bits, &wide, 4);
  return static_cast<Element>(bits >> 16);
}
// Of A or, signed, of B.
template <bool kInt8>
int drawn(bool is_signed) {
  return kInt8 ? std::rand() % 256 - (is_signed ? 128 : 0) : std::rand() % 17 - 8;
}
"""

GEMMS = r"""
// Rows of A and columns of B, k in order; how a product is stored in a panel depends on the width of an element.
template <bool kInt8, class Element, class Sum>
int run(int row_tiles, int panels, int steps, int words, bool accumulate) {
  constexpr int kPerWord = 4 / sizeof(Element);
  const int rows = row_tiles * 16, columns = panels * 16, k = steps * words * kPerWord;
  const int lda = k + 32, ldc = columns + 5, panel = (steps * words + 3) * 16 * kPerWord;
  Emulated::words = words;
  std::vector<int> a(rows * k), b(k * columns);
  for (int& x : a) x = drawn<kInt8>(false);
  for (int& x : b) x = drawn<kInt8>(true);
  std::vector<Element> left(rows * lda), right(panels * panel);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < k; ++j) left[i * lda + j] = stored<kInt8, Element>(a[i * k + j]);
  }
  for (int j = 0; j < k; ++j) {
    for (int c = 0; c < columns; ++c) {
      const int at = c / 16 * panel + j / kPerWord * 16 * kPerWord + c % 16 * kPerWord + j % kPerWord;
      right[at] = stored<kInt8, Element>(b[j * columns + c]);
    }
  }
  std::vector<Sum> c(rows * ldc, Sum(7));
  amx_gemm_blocks<Emulated, kInt8>({.a = left.data(),
                                    .a_stride = lda * static_cast<int>(sizeof(Element)),
                                    .b = right.data(),
                                    .panel_bytes = panel * static_cast<int>(sizeof(Element)),
                                    .c = c.data(),
                                    .c_stride = ldc * 4,
                                    .steps = steps,
                                    .start = accumulate ? c.data() : nullptr,
                                    .start_stride = ldc * 4,
                                    .words = words},
                                   rows, panels);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < ldc; ++j) {
      long sum = accumulate ? 7 : 0;
      for (int x = 0; x < k && j < columns; ++x) sum += static_cast<long>(a[i * k + x]) * b[x * columns + j];
      if (c[i * ldc + j] != static_cast<Sum>(j < columns ? sum : 7)) {
        std::printf("%d tiles of rows, %d panels, %d steps of %d: %d, %d\n", row_tiles, panels, steps, words, i, j);
        return 1;
      }
    }
  }
  return 0;
}

int main() {
  int failures = 0, count = 0;
  for (int rows : {1, 2, 3}) {
    for (int panels : {1, 2, 5}) {
      for (int steps : {1, 2, 5}) {
        for (bool accumulate : {false, true}) {
          for (int words : {16, 7}) {
            failures += run<true, unsigned char, std::int32_t>(rows, panels, steps, words, accumulate);
            failures += run<false, unsigned short, float>(rows, panels, steps, words, accumulate);
            count += 2;
          }
        }
      }
    }
  }
  std::printf("%d GEMMs\n", count);
  return failures != 0;
}
"""

CONVOLUTIONS = r"""
#include "kernels/cpu/convolution/amx_image.h"
#include "kernels/cpu/convolution/amx_slice.h"

struct Problem {
  std::int64_t batch, groups, in_channels, out_channels;
  std::array<std::int64_t, 2> input, kernel, stride, padding, dilation, output{};
};

// A convolution of small integers in parts of tiles and panels; every output is finished once.
template <bool kInt8, class Element, class Sum>
int run(Problem p, bool per_image) {
  constexpr std::int64_t kPerWord = 4 / sizeof(Element);
  for (int d : {0, 1}) {
    p.output[d] = (p.input[d] + 2 * p.padding[d] - p.dilation[d] * (p.kernel[d] - 1) - 1) / p.stride[d] + 1;
  }
  const std::int64_t channels = p.groups * p.in_channels, outputs = p.groups * p.out_channels;
  const std::int64_t taps = p.kernel[0] * p.kernel[1], words = p.in_channels / kPerWord;
  const std::int64_t panels = (p.out_channels + 15) / 16, pixels = p.batch * p.output[0] * p.output[1];
  const int padding = kInt8 ? 3 : 0;
  std::vector<int> x(p.batch * p.input[0] * p.input[1] * channels), w(outputs * taps * p.in_channels);
  for (int& value : x) value = drawn<kInt8>(false);
  for (int& value : w) value = drawn<kInt8>(true);
  std::vector<Element> weight(p.groups * panels * taps * p.in_channels * 16);
  for (std::int64_t o = 0; o < outputs; ++o) {
    const std::int64_t j = o % p.out_channels, panel = o / p.out_channels * panels + j / 16;
    for (std::int64_t k = 0; k < taps * p.in_channels; ++k) {
      const std::int64_t at = (panel * taps * words + k / kPerWord) * 16 + j % 16;
      weight[at * kPerWord + k % kPerWord] = stored<kInt8, Element>(w[o * taps * p.in_channels + k]);
    }
  }
  const AmxImage image = amx_image(p, channels * sizeof(Element) + 64, per_image);
  std::vector<char> made(image.nbytes());
  for (std::int64_t i = 0; i < image.rows(); ++i) {
    fill_amx_row(p, image, i, padding, made.data(), [&](auto n, auto y, auto column, std::int64_t count, char* to) {
      for (std::int64_t z = 0; z < count; ++z, column += p.stride[1], to += image.pixel) {
        for (std::int64_t c = 0; c < channels; ++c) {
          const auto value = stored<kInt8, Element>(x[((n * p.input[0] + y) * p.input[1] + column) * channels + c]);
          std::memcpy(to + c * sizeof value, &value, sizeof value);
        }
      }
    });
  }
  const AmxConvolution call{image.lines, made.data(), image.pixel, image.taps.data(), taps, words,
                            static_cast<std::int64_t>(p.in_channels * sizeof(Element)), weight.data(), panels};
  Emulated::words = amx_step(words);
  std::vector<Sum> got(pixels * outputs), start(32 * p.batch);
  std::vector<int> times(pixels * outputs);
  for (std::int64_t i = 0; i < 32 * p.batch; ++i) start[i] = per_image ? i : i % 32;
  const std::int64_t tiles = image.lines.count * image.lines.tiles(), cut = panels > 2 ? 2 : panels;
  for (const AmxPart& part : {AmxPart{0, tiles, 0, p.groups, 0, cut}, AmxPart{0, tiles / 2, 0, p.groups, cut, panels},
                              AmxPart{tiles / 2, tiles, 0, p.groups, cut, panels}}) {
    amx_slice<Emulated, kInt8, Sum>(
        call, part, [&](auto, auto, std::int64_t line) { return start.data() + (per_image ? 32 * line : 0); },
        [&](const Sum* sums, std::int64_t pixel, std::int64_t count, std::int64_t group, std::int64_t panel, int each) {
          for (std::int64_t i = 0; i < count; ++i) {
            for (std::int64_t j = 0; j < 16 * each && panel * 16 + j < p.out_channels; ++j) {
              const std::int64_t at = (pixel + i) * outputs + group * p.out_channels + panel * 16 + j;
              got[at] = sums[i * 32 + j], ++times[at];
            }
          }
        });
  }
  for (std::int64_t at = 0; at < pixels * outputs; ++at) {
    const std::int64_t o = at % outputs, pixel = at / outputs, group = o / p.out_channels;
    const std::int64_t n = pixel / (p.output[0] * p.output[1]), j = o % p.out_channels % 32;
    std::int64_t sum = start[(per_image ? 32 * n : 0) + j];
    for (std::int64_t tap = 0; tap < taps; ++tap) {
      const std::int64_t y = pixel / p.output[1] % p.output[0] * p.stride[0] - p.padding[0] + tap / p.kernel[1] * p.dilation[0];
      const std::int64_t c = pixel % p.output[1] * p.stride[1] - p.padding[1] + tap % p.kernel[1] * p.dilation[1];
      const bool inside = y >= 0 && y < p.input[0] && c >= 0 && c < p.input[1];
      for (std::int64_t k = 0; k < p.in_channels; ++k) {
        const std::int64_t from = ((n * p.input[0] + y) * p.input[1] + c) * channels + group * p.in_channels + k;
        sum += (inside ? x[from] : padding) * w[(o * taps + tap) * p.in_channels + k];
      }
    }
    if (times[at] != 1 || got[at] != static_cast<Sum>(sum)) {
      std::printf("%d channels to %d, %d x %d: output %d, %d times\n", static_cast<int>(channels), static_cast<int>(outputs),
                  static_cast<int>(p.input[0]), static_cast<int>(p.input[1]), static_cast<int>(at), times[at]);
      return 1;
    }
  }
  return 0;
}

// Tiles finish each pixel of a line once, and read nothing behind a line that is as long as a tile.
int places(std::int64_t length) {
  const AmxLines lines{2, length, 1, length, length};
  std::vector<int> times(2 * length);
  for (std::int64_t tile = 0; tile < 2 * lines.tiles(); ++tile) {
    const AmxPlace place = amx_place(lines, tile);
    for (int i = place.skipped; i < place.rows; ++i) ++times[place.line * length + place.first + i];
    if (length >= kAmxBlock && place.first + (place.rows > kAmxRows ? kAmxBlock : kAmxRows) > length) return 1;
  }
  for (int count : times) {
    if (count != 1) return 1;
  }
  return 0;
}

int main() {
  const Problem problems[] = {
      // batch, groups, in, out; input, kernel, stride, padding, dilation
      {2, 1, 64, 40, {7, 7}, {3, 3}, {1, 1}, {1, 1}, {1, 1}},      // lines a batch entry, rows between that are dropped
      {3, 1, 48, 32, {5, 9}, {1, 1}, {1, 1}, {0, 0}, {1, 1}},      // one line
      {2, 1, 56, 70, {9, 6}, {1, 1}, {2, 2}, {0, 0}, {1, 1}},      // one phase of two
      {1, 1, 32, 16, {11, 20}, {3, 3}, {2, 2}, {1, 1}, {1, 1}},    // phases in both directions
      {1, 2, 16, 24, {12, 17}, {3, 2}, {3, 2}, {2, 0}, {2, 3}},    // groups, phases that no tap reads
      {2, 3, 32, 16, {1, 40}, {1, 5}, {1, 1}, {0, 4}, {1, 2}},     // one dimension: one line of rows with gaps
      {1, 1, 1200, 50, {4, 5}, {2, 2}, {1, 1}, {0, 1}, {1, 1}},    // several blocks in a tap
      {1, 1, 96, 33, {3, 6}, {5, 3}, {1, 1}, {3, 2}, {1, 1}},      // several taps in a block
      {1, 1, 64, 16, {3, 3}, {1, 1}, {1, 1}, {0, 0}, {1, 1}},      // fewer pixels than a tile has
      {1, 1, 16, 16, {40, 30}, {2, 2}, {2, 2}, {0, 0}, {1, 1}},    // more tiles than a block has
  };
  int failures = 0, count = 0;
  for (const Problem& p : problems) {
    for (bool per_image : {false, true}) {
      failures += run<true, unsigned char, std::int32_t>(p, per_image);
      failures += run<false, unsigned short, float>(p, per_image);
      count += 2;
    }
  }
  for (int length = 1; length < 200; ++length) failures += places(length);
  std::printf("%d convolutions\n", count);
  return failures != 0;
}
"""

W4A8 = r"""
#include "kernels/cpu/w4a8/w4a8_amx.h"

#include <cmath>

struct Problem {
  std::int64_t m, n, k, group;
};

// What the bits of a number of so many bits of exponent and mantissa, not infinite, stand for.
double value_of(unsigned bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = (bits & ((1 << mantissa_bits) - 1)) | (exponent > 0 ? 1 << mantissa_bits : 0);
  const double value = std::ldexp(mantissa, (exponent > 0 ? exponent : 1) - bias - mantissa_bits);
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

// Every output is float64's, but for rounding x and the weight to bfloat16; nothing else is written.
template <Weights F>
int run(const Problem& given) {
  constexpr bool kNvfp4 = F == Weights::kNvfp4;
  W4A8Linear p;
  p.format = kNvfp4 ? W4A8Format::kNvfp4 : W4A8Format::kInt4;
  p.m = given.m, p.n = given.n, p.k = given.k, p.group = kNvfp4 ? 16 : given.group;
  const std::int64_t panels = (p.n + 15) / 16, groups = p.k / p.group, scale_count = panels * groups * 32;
  p.x_width = p.k - 5, p.x_stride = p.k + 3;
  std::vector<float> x(p.m * p.x_stride, NAN), wide(scale_count), global(p.n), bias(p.n), got(p.m * p.n + 1, 7.0f);
  std::vector<std::int32_t> words(panels * p.k * 2);
  std::vector<std::uint16_t> halves(scale_count);
  std::vector<std::uint8_t> bytes(scale_count);
  const auto real = [] { return std::rand() % 20001 / 10000.0f - 1.0f; };
  for (std::int64_t i = 0; i < p.m; ++i) {
    for (std::int64_t k = 0; k < p.x_width; ++k) x[i * p.x_stride + k] = real();
  }
  for (float& value : wide) value = real();
  for (float& value : global) value = real();
  for (float& value : bias) value = real();
  for (std::int32_t& word : words) word = std::rand() ^ std::rand() << 12;
  for (std::uint16_t& bits : halves) {  // from 2^-4 to 1, of both signs
    bits = (F == Weights::kBFloat16Scales ? 0x3d80 + std::rand() % 0x200 : 0x2c00 + std::rand() % 0x1000) | std::rand() % 2 << 15;
  }
  for (std::uint8_t& bits : bytes) bits = std::rand() % 127 | std::rand() % 2 << 7;
  p.x = x.data(), p.weight = words.data();
  p.scales = kNvfp4 ? static_cast<const void*>(bytes.data())
             : F == Weights::kFloat32Scales ? static_cast<const void*>(wide.data()) : halves.data();
  if (kNvfp4) p.global_scales = global.data();
  if (p.m % 2 == 0) p.bias = bias.data();
  p.out = got.data();
  const std::int64_t stride = w4a8_amx_stride(p.k), cut = panels / 2;
  std::vector<std::uint16_t> rows((p.m + 15) / 16 * 16 * stride, 0x7fc0);
  for (std::int64_t i = 0; i < p.m; ++i) round_row(p.x + i * p.x_stride, p.x_width, p.k, rows.data() + i * stride);
  w4a8_amx<Emulated, F>(p, rows.data(), 0, cut);
  w4a8_amx<Emulated, F>(p, rows.data(), cut, panels);
  const auto scale_at = [&](std::int64_t at) {
    return kNvfp4 ? value_of(bytes[at], 4, 3) : F == Weights::kFloat32Scales ? wide[at]
           : F == Weights::kBFloat16Scales ? value_of(halves[at], 8, 7) : value_of(halves[at], 5, 10);
  };
  int wrong = got[p.m * p.n] != 7.0f;
  std::vector<double> weight(p.k);
  for (std::int64_t j = 0; j < p.n; ++j) {
    const std::int64_t panel = j / 16, column = j % 16;
    for (std::int64_t k = 0; k < p.k; ++k) {
      const std::int32_t word = words[((panel * p.k + k) / 8) * 16 + column];
      const unsigned code = word >> (k % 4 * 8 + k % 8 / 4 * 4) & 15;
      const std::int64_t at = (panel * groups + k / p.group) * (kNvfp4 ? 16 : 32) + column;
      weight[k] = kNvfp4 ? value_of(code, 2, 1) * scale_at(at) * global[j]
                         : (static_cast<int>(code) - 8) * scale_at(at) + scale_at(at + 16);
    }
    for (std::int64_t i = 0; i < p.m; ++i) {
      double want = p.bias == nullptr ? 0.0 : bias[j], size = std::abs(want);
      for (std::int64_t k = 0; k < p.x_width; ++k) {
        const double product = x[i * p.x_stride + k] * weight[k];
        want += product, size += std::abs(product);
      }
      // Half a unit in each of two factors; the sums are float32.
      wrong += !(std::abs(got[i * p.n + j] - want) <= size * 0x1.02p-8);
    }
  }
  if (wrong == 0) return 0;
  std::printf("%d x %d x %d in groups of %d: %d\n", int(p.m), int(p.n), int(p.k), int(p.group), wrong);
  return 1;
}

// Ties go to even values; what is not finite in bfloat16 becomes NaN; zeros follow the last value.
int rounding() {
  const float from[] = {1.0f, 1.0f + 0x1p-8f, -1.0f - 0x3p-8f, 3.38e38f, INFINITY, -INFINITY, NAN, -3.4e38f};
  const std::uint16_t want[] = {0x3f80, 0x3f80, 0xbf82, 0x7f7e, 0x7fc0, 0x7fc0, 0x7fc0, 0x7fc0};
  std::vector<float> x(40);
  for (int i = 0; i < 40; ++i) x[i] = from[i % 8];
  std::vector<std::uint16_t> got(65, 7);
  round_row(x.data(), 37, 64, got.data());
  for (int i = 0; i < 65; ++i) {
    if (got[i] == (i < 37 ? want[i % 8] : i < 64 ? 0 : 7)) continue;
    std::printf("bfloat16 of value %d: %x\n", i, got[i]);
    return 1;
  }
  return 0;
}

int main() {
  const Problem problems[] = {
      // m, n, k, group
      {16, 16, 32, 32},       // a tile of one step
      {17, 40, 96, 32},       // tails of rows and columns, an odd number of steps and of panels
      {47, 33, 256, 64},
      {1, 16, 128, 128},
      {30, 5, 512, 128},      // a whole block of k
      {18, 100, 768, 256},    // and a part of the next
      {34, 17, 2112, 32},
      {1050, 20, 544, 32},    // several blocks of rows
  };
  int failures = rounding(), count = 0;
  for (const Problem& p : problems) {
    failures += run<Weights::kFloat32Scales>(p) + run<Weights::kBFloat16Scales>(p) + run<Weights::kFloat16Scales>(p);
    failures += run<Weights::kNvfp4>(p);
    count += 4;
  }
  std::printf("%d linear layers\n", count);
  return failures != 0;
}
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [(GEMMS, "216 GEMMs\n"), (CONVOLUTIONS, "40 convolutions\n"), (W4A8, "32 linear layers\n")],
    ids=["gemms", "convolutions", "w4a8"],
)
def test_with_emulated_tiles(program: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(EMULATED + program)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    made = tmp_path / "main"
    options = ["-std=c++20", "-march=x86-64-v2", "-O1", "-fwrapv", f"-I{ROOT / 'native'}"]
    command = [*compiler, *options, str(tmp_path / "main.cpp"), "-o", str(made)]
    subprocess.run(command, check=True)
    done = subprocess.run([made], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, expected)
