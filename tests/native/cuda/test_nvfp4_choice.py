"""Which kernel serves an NVFP4 product on CUDA, compiled from its header. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

from tests.native.cuda.compiled import lines_of

SOURCE = r"""
#include <cstdio>
#include <initializer_list>
#include "kernels/cuda/nvfp4_choice.h"
using namespace untorch::kernels::cuda;
int main() {
  const char* const names[] = {"narrow", "mma", "stream", "unpack"};
  for (long m : {1, 8, 9, 16, 17, 64, 256, 257, 512, 513, 8192}) {
    Nvfp4Gemm h200, a100, l4;
    h200.m = a100.m = l4.m = m;
    h200.max_shared_bytes = 232448, a100.max_shared_bytes = 166912, l4.max_shared_bytes = 101376;
    h200.has_clusters = h200.has_wgmma = true;
    Nvfp4Gemm narrow_lanes = h200, bytes = h200, wide = h200;
    narrow_lanes.inner_k_tiles = 4;
    bytes.inner_k_tiles = 0;
    a100.dtype = Scalar::kFloat16;
    wide.dtype = Scalar::kFloat32;
    std::printf("rows %ld", m);
    for (const Nvfp4Gemm& p : {h200, a100, l4, narrow_lanes, bytes, wide}) {
      std::printf(" %s", names[int(choose_nvfp4(p))]);
    }
    Nvfp4Limits without_stream;
    without_stream.stream_rows = 0, without_stream.mma_rows = 64;
    std::printf(" %s\n", names[int(choose_nvfp4(h200, without_stream))]);
  }
}
"""


def test_the_choice(tmp_path: Path) -> None:
    lines = lines_of(SOURCE, tmp_path)
    # On an H200, an A100 and an L4, which has little shared memory; with 4 inner k tiles; of bytes; in float32; on an
    # H200 without nvfp4_stream.
    assert lines == [
        "rows 1 narrow narrow mma unpack unpack unpack narrow",
        "rows 8 narrow narrow mma unpack unpack unpack narrow",
        "rows 9 narrow mma mma unpack unpack unpack narrow",
        "rows 16 narrow mma mma unpack unpack unpack narrow",
        "rows 17 stream mma mma unpack unpack unpack mma",
        "rows 64 stream mma mma unpack unpack unpack mma",
        "rows 256 stream mma mma unpack unpack unpack unpack",
        "rows 257 stream unpack unpack unpack unpack unpack unpack",
        "rows 512 stream unpack unpack unpack unpack unpack unpack",
        "rows 513 unpack unpack unpack unpack unpack unpack unpack",
        "rows 8192 unpack unpack unpack unpack unpack unpack unpack",
    ]
