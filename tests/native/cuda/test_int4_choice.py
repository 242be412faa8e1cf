"""Which kernel serves an int4 product on CUDA, compiled from its header. Needs no GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.shim import ROOT

SOURCE = r"""
#include <cstdio>
#include <initializer_list>
#include "kernels/cuda/int4_choice.h"
using namespace untorch::kernels::cuda;
int main() {
  const char* const names[] = {"narrow", "mma", "unpack"};
  for (long m : {1, 8, 9, 256, 257, 8192}) {
    std::printf("rows %ld %s %s %s\n", m, names[int(choose_int4(Scalar::kBFloat16, m, 166912))],
                names[int(choose_int4(Scalar::kFloat16, m, 101376))],
                names[int(choose_int4(Scalar::kFloat32, m, 166912))]);
  }
  for (int m : {1, 16, 17, 32, 33, 64, 65, 500}) {
    std::printf("tile %d %d %d %d\n", m, int4_tile_rows(m, 232448), int4_tile_rows(m, 166912),
                int4_tile_rows(m, 101376));
  }
  const long l2 = 50l << 20;
  std::printf("chunk %ld %ld %ld %ld\n", long(int4_chunk(4096, 4096, 2, l2)), long(int4_chunk(28672, 8192, 2, l2)),
              long(int4_chunk(8, 8192, 2, l2)), long(int4_chunk(4096, 1 << 20, 4, l2)));
}
"""


def test_the_choice(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "choice.cpp").write_text(SOURCE)
    program = tmp_path / "choice"
    include = f"-I{ROOT / 'native'}"
    subprocess.run([compiler, "-std=c++20", include, str(tmp_path / "choice.cpp"), "-o", str(program)], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    # By what a block may have of shared memory on sm_90, sm_80 and sm_89; the small ones have no room for int4_narrow.
    assert lines == [
        "rows 1 narrow mma unpack",
        "rows 8 narrow mma unpack",
        "rows 9 mma mma unpack",
        "rows 256 mma mma unpack",
        "rows 257 unpack unpack unpack",
        "rows 8192 unpack unpack unpack",
        "tile 1 16 16 16",
        "tile 16 16 16 16",
        "tile 17 32 32 32",
        "tile 32 32 32 32",
        "tile 33 64 64 32",
        "tile 64 64 64 32",
        "tile 65 128 128 32",
        "tile 500 128 128 32",
        "chunk 3200 1536 8 1024",
    ]
