"""AMX's GEMM of tiles with emulated tiles, on CPUs without AMX: operands, strides, numbers of tiles."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.native.shim import ROOT

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")

MAIN = r"""
#define UNTORCH_ISA emulated
#include "kernels/cpu/common/amx.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace untorch::kernels::emulated;

// Emulates the instructions. Values are small integers, so that float32 is exact.
struct Emulated {
  inline static unsigned char tile[8][kAmxRows][kAmxTileBytes];
  template <int T>
  static void zero() { std::memset(tile[T], 0, sizeof tile[T]); }
  template <int T>
  static void load(const void* from, std::int64_t stride) {
    for (int i = 0; i < kAmxRows; ++i) std::memcpy(tile[T][i], static_cast<const char*>(from) + i * stride, 64);
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
        for (int k = 0; k < 16; ++k) sum += product(tile[A][i] + k * 4, tile[B][k] + j * 4);
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

// Rows of A and columns of B, k in order; how a product is stored in a panel depends on the width of an element.
template <bool kInt8, class Element, class Sum>
int run(int row_tiles, int panels, int steps, bool accumulate) {
  constexpr int kPerWord = 4 / sizeof(Element), kPerStep = 16 * kPerWord;
  const int rows = row_tiles * 16, columns = panels * 16, k = steps * kPerStep;
  const int lda = k + 32, ldc = columns + 5, panel = (steps * 16 + 3) * 16 * kPerWord;
  std::vector<int> a(rows * k), b(k * columns);
  for (int& x : a) x = kInt8 ? std::rand() % 256 : std::rand() % 17 - 8;
  for (int& x : b) x = kInt8 ? std::rand() % 256 - 128 : std::rand() % 17 - 8;
  const auto stored = [](int value) {
    if constexpr (kInt8) return static_cast<Element>(value);
    const float wide = static_cast<float>(value);
    unsigned bits;
    std::memcpy(&bits, &wide, 4);
    return static_cast<Element>(bits >> 16);
  };
  std::vector<Element> left(rows * lda), right(panels * panel);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < k; ++j) left[i * lda + j] = stored(a[i * k + j]);
  }
  for (int j = 0; j < k; ++j) {
    for (int c = 0; c < columns; ++c) {
      const int at = c / 16 * panel + j / kPerWord * 16 * kPerWord + c % 16 * kPerWord + j % kPerWord;
      right[at] = stored(b[j * columns + c]);
    }
  }
  std::vector<Sum> c(rows * ldc, Sum(7));
  amx_gemm<Emulated, kInt8>({.a = left.data(),
                              .a_stride = lda * static_cast<int>(sizeof(Element)),
                              .b = right.data(),
                              .panel_bytes = panel * static_cast<int>(sizeof(Element)),
                              .c = c.data(),
                              .c_stride = ldc * 4,
                              .steps = steps,
                              .accumulate = accumulate},
                             row_tiles, panels);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < ldc; ++j) {
      long sum = accumulate ? 7 : 0;
      for (int x = 0; x < k && j < columns; ++x) sum += static_cast<long>(a[i * k + x]) * b[x * columns + j];
      if (c[i * ldc + j] != static_cast<Sum>(j < columns ? sum : 7)) {
        std::printf("%d tiles of rows, %d panels, %d steps: %d, %d\n", row_tiles, panels, steps, i, j);
        return 1;
      }
    }
  }
  return 0;
}

int main() {
  int failures = 0, count = 0;
  for (int rows : {1, 2}) {
    for (int panels : {1, 2}) {
      for (int steps : {1, 2, 5}) {
        for (bool accumulate : {false, true}) {
          failures += run<true, unsigned char, std::int32_t>(rows, panels, steps, accumulate);
          failures += run<false, unsigned short, float>(rows, panels, steps, accumulate);
          count += 2;
        }
      }
    }
  }
  std::printf("%d GEMMs\n", count);
  return failures != 0;
}
"""


def test_with_emulated_tiles(tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(MAIN)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    made = tmp_path / "main"
    command = [*compiler, "-std=c++20", f"-I{ROOT / 'native'}", str(tmp_path / "main.cpp"), "-o", str(made)]
    subprocess.run(command, check=True)
    done = subprocess.run([made], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "48 GEMMs\n")
