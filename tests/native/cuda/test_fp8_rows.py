"""Rounding to float8_e4m3fn as the CUDA kernels do it, compiled from its header, against PyTorch. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.native.cuda.compiled import lines_of

E4M3 = torch.float8_e4m3fn

FLOATS = r"""
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include "kernels/cuda/quantize/fp8_rows.h"
using namespace untorch::kernels::cuda;
void show(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  std::printf("%u %u\n", unsigned(bits), unsigned(e4m3_of(value)));
}
int main() {
  // Around every number that E4M3 has and every one halfway between two of them: multiples of 2^-10, 4 bits long, and a
  // fifth for halfway.
  for (int exponent = -12; exponent <= 9; ++exponent) {
    for (int mantissa = 0; mantissa < 32; ++mantissa) {
      const float value = std::ldexp(1.0f + float(mantissa) / 32, exponent);
      std::uint32_t bits;
      std::memcpy(&bits, &value, 4);
      for (int near = -2; near <= 2; ++near) show(bits + near), show((bits + near) | 0x80000000u);
    }
  }
  for (std::uint32_t bits : {0u, 1u, 0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x7f800000u, 0x7fc00000u}) {
    show(bits), show(bits | 0x80000000u);
  }
  std::uint32_t state = 1;
  for (int i = 0; i < 50000; ++i) show(state = state * 1664525u + 1013904223u);
}
"""

PAIRS = r"""
#include <cstdio>
#include "kernels/cuda/quantize/fp8_rows.h"
using namespace untorch::kernels::cuda;
int main() {
  // Every float16 up to 464 / 256 in the lower half, and its negative in the upper one.
  for (std::uint32_t bits = 0; bits <= 0x3f40u; ++bits) {
    const std::uint32_t pair = e4m3_pair_of(bits | (bits | 0x8000u) << 16);
    std::printf("%u %u %u %u\n", unsigned(bits), pair & 255u, pair >> 8 & 255u, pair >> 24);
    if (pair >> 16 & 255u) return 1;
  }
}
"""


def numbers(source: str, folder: Path) -> torch.Tensor:
    return torch.tensor([[int(word) for word in line.split()] for line in lines_of(source, folder)])


def test_of_floats(tmp_path: Path) -> None:
    bits, got = numbers(FLOATS, tmp_path).unbind(1)
    values = torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)
    want = values.to(E4M3).float()
    want[values.abs() > 464] = float("nan")  # PyTorch's versions differ beyond what E4M3 has: 448 or NaN
    made = got.to(torch.uint8).view(E4M3).float()
    nan = want.isnan()
    assert torch.equal(made.isnan(), nan)
    assert torch.equal(made[~nan].view(torch.int32), want[~nan].view(torch.int32))  # signs of zeros, too
    assert nan.any() and (made == 2**-9).any() and (made.abs() == 448).any()


def test_of_pairs(tmp_path: Path) -> None:
    bits, nothing, low, high = numbers(PAIRS, tmp_path).unbind(1)
    want = (bits.to(torch.int16).view(torch.float16).float() * 256).to(E4M3)
    assert not nothing.any()
    assert torch.equal(low, want.view(torch.uint8).long())
    assert torch.equal(high, (-want.float()).to(E4M3).view(torch.uint8).long())
