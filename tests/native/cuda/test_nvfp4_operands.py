"""NVFP4 operands of a W4A4 GEMM, as the CUDA kernels quantize them, compiled from their header. Needs no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.native.cuda.compiled import compiled, lines_of
from tests.native.nvfp4_float4 import e2m1_codes, in_tiles, rows_in_float4
from tests.native.nvfp4_weights import random_weight
from untorch.ops.nvfp4_layout import E2M1_VALUES, pack_nvfp4_tiles, unpack_nvfp4

E4M3 = torch.float8_e4m3fn

BLOCKS = r"""
#include <algorithm>
#include <cstdio>
#include <vector>
#include "kernels/cuda/quantize/nvfp4_operands.h"
using namespace untorch::kernels::cuda;
// Rows of 128 float32 from a file: of each block its codes and its scale.
int main(int, char** arguments) {
  std::FILE* const file = std::fopen(arguments[1], "rb");
  std::vector<float> row(128);
  while (std::fread(row.data(), 4, row.size(), file) == row.size()) {
    float size = 0x1p-110f;
    for (float value : row) size = std::max(size, value < 0 ? -value : value);
    for (int block = 0; block < 8; ++block) {
      float values[16];
      std::copy_n(row.data() + 16 * block, 16, values);
      std::uint32_t scale;
      const std::uint64_t codes = quantize_nvfp4_block(values, kE2m1Max * kE4m3Max / size, scale);
      std::printf("%u", unsigned(scale));
      for (int i = 0; i < 16; ++i) std::printf(" %d", int(codes >> 4 * i & 15));
      std::printf("\n");
    }
  }
}
"""

CODES = r"""
#include <cstdio>
#include <vector>
#include "kernels/cuda/quantize/nvfp4_operands.h"
using namespace untorch::kernels::cuda;
int main(int, char** arguments) {
  Nvfp4Gemm p;
  p.n = 24, p.k = 384, p.inner_k_tiles = arguments[2][0] - '0';
  std::vector<unsigned char> weight(p.n * p.k / 2);
  std::FILE* const file = std::fopen(arguments[1], "rb");
  if (std::fread(weight.data(), 1, weight.size(), file) != weight.size()) return 1;
  p.weight = weight.data();
  for (int column = 0; column < p.n; ++column) {
    for (int block = 0; block < p.k / 16; ++block) {
      const std::uint64_t codes = nvfp4_block_codes(p, column, block);
      for (int i = 0; i < 16; ++i) std::printf("%d ", int(codes >> 4 * i & 15));
    }
    std::printf("\n");
  }
}
"""

PLACES = r"""
#include <cstdio>
#include <initializer_list>
#include "kernels/cuda/quantize/nvfp4_operands.h"
using namespace untorch::kernels::cuda;
int main() {
  for (int row = 0; row < 256; ++row) {
    for (int block = 0; block < 12; ++block) std::printf("%d ", int(nvfp4_scale_offset(row, block, 12 * 16)));
    std::printf("\n");
  }
  for (std::uint32_t bits = 0; bits < 127; ++bits) std::printf("%a\n", double(e4m3_value(bits)));
  for (int i = -64; i <= 64; ++i) {
    for (float near : {-0x1p-20f, 0.0f, 0x1p-20f}) {
      const float value = float(i) / 8 + near;
      std::printf("%a %u\n", double(value), unsigned(e2m1_of(value)));
    }
  }
}
"""


def run(source: str, folder: Path, data: torch.Tensor, *arguments: str) -> torch.Tensor:
    """The numbers that the program prints, lines [.., ..]."""
    file = folder / "data"
    file.write_bytes(data.contiguous().view(torch.uint8).numpy().tobytes())
    command = [compiled(source, folder), file, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return torch.tensor([[int(word) for word in line.split()] for line in done.stdout.splitlines()])


def test_blocks_of_rows(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 128, generator=generator)
    x *= 2.0 ** -torch.randint(0, 24, (400, 8, 1), generator=generator).expand(400, 8, 16).flatten(1)
    x[0] = 0
    x[1, 16:] = 0
    x[2] *= 1e30
    x[3] *= 1e-36
    x[4] = torch.tensor(E2M1_VALUES).repeat(8)
    x[5] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(16)
    got = run(BLOCKS, tmp_path, x)
    codes, scales, _ = rows_in_float4(x)
    assert torch.equal(got[:, 0].reshape(400, 8), scales.view(torch.uint8).long())
    assert torch.equal(got[:, 1:].reshape(400, 128), codes)
    zeros = got.reshape(400, 8, 17)[0]
    assert not zeros.any()


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [0, 2, 4, 8])
def test_codes_of_weights(tiles: int, tmp_path: Path) -> None:
    packed, _ = random_weight(24, 384)
    data = pack_nvfp4_tiles(packed, tiles) if tiles else packed
    assert torch.equal(run(CODES, tmp_path, data, str(tiles)), unpack_nvfp4(packed).long())


def test_places_of_scales_and_values(tmp_path: Path) -> None:
    lines = lines_of(PLACES, tmp_path)
    places = torch.tensor([[int(word) for word in line.split()] for line in lines[:256]])
    scales = torch.arange(256 * 12).reshape(256, 12)
    for shift in (0, 8):  # as bytes, which are too few for so many
        byte = (scales >> shift & 255).to(torch.uint8).view(E4M3)
        assert torch.equal(in_tiles(byte)[places.flatten()].reshape(256, 12), byte.view(torch.uint8))
    assert sorted(places.flatten().tolist()) == list(range(256 * 12))
    values = torch.tensor([float.fromhex(line) for line in lines[256 : 256 + 127]])
    assert torch.equal(values, torch.arange(127, dtype=torch.uint8).view(E4M3).float())
    rounded = [line.split() for line in lines[256 + 127 :]]
    inputs = torch.tensor([float.fromhex(value) for value, _ in rounded])
    codes = torch.tensor([int(code) for _, code in rounded])
    assert torch.equal(codes, e2m1_codes(inputs))
    # No other of E2M1's values is nearer.
    values = torch.tensor(E2M1_VALUES)
    nearest = (values - inputs[:, None].clamp(-6, 6)).abs().amin(1)
    assert torch.equal((values[codes] - inputs.clamp(-6, 6)).abs(), nearest)
