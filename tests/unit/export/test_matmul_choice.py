"""Which kernel computes a GEMM where none can be timed: estimates, tuning files, and what is in the compiled file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from untorch.export import CompileError, export
from untorch.export.gpus import GPUS, find_gpu
from untorch.export.kernel_choice import read_tuning
from untorch.export.matmul_choice import LIBRARY, Gemm, Tile, _ends_in_memory, estimate_library, estimate_tile

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

H200 = find_gpu("H200")
TILES = [Tile(m, n, 32, 4, 4) for m in (16, 32, 64, 128) for n in (16, 32, 64, 128)]


def best_tile(gemm: Gemm) -> Tile:
    return min(TILES, key=lambda tile: estimate_tile(H200, gemm, tile))


def test_tiles_that_do_not_fit() -> None:
    gemm = Gemm(512, 512, 512)
    assert estimate_tile(H200, gemm, Tile(256, 256, 128, 4, 8)) == math.inf  # shared memory
    assert estimate_tile(H200, gemm, Tile(128, 256, 32, 3, 4)) == math.inf  # registers
    assert estimate_tile(find_gpu("L4"), gemm, Tile(128, 128, 64, 4, 8)) == math.inf
    assert estimate_tile(H200, gemm, Tile(128, 128, 64, 4, 8)) < math.inf


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_more_work_takes_longer(gpu: Any) -> None:
    for estimate in (estimate_library, lambda gpu, gemm: estimate_tile(gpu, gemm, Tile(64, 64, 32, 3, 4))):
        least = estimate(gpu, Gemm(256, 256, 256))
        for gemm in (Gemm(65536, 256, 256), Gemm(256, 65536, 256), Gemm(256, 256, 8192)):
            assert estimate(gpu, gemm) > 1.5 * least
        assert estimate(gpu, Gemm(2048, 2048, 2048, element=4)) > estimate(gpu, Gemm(2048, 2048, 2048))
        assert estimate(gpu, Gemm(256, 256, 256, batch=500)) > 3 * least


def test_small_m_has_small_tiles_and_large_m_large_ones() -> None:
    assert best_tile(Gemm(16, 4096, 4096)).m == 16
    assert best_tile(Gemm(4096, 4096, 4096)).m * best_tile(Gemm(4096, 4096, 4096)).n == 128 * 128


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (16, 512, 1024), (256, 8192, 3072), (8192, 8192, 8192)])
def test_the_library_is_the_faster_one_without_what_follows(m: int, n: int, k: int) -> None:
    gemm = Gemm(m, n, k)
    assert estimate_library(H200, gemm) <= min(estimate_tile(H200, gemm, tile) for tile in TILES)
    # Within what the H200 can: a tenth more than the data sheet's rates would give, at least.
    least = max(2.0 * m * n * k / (H200.matrix_rate * 1e12), gemm.bytes_moved / (H200.bandwidth * 1e9))
    assert 1.1 * least < estimate_library(H200, gemm) < 2 * least + 8e-6


def test_the_epilogue() -> None:
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")

    def gemm(*behind: Any) -> torch.fx.Node:
        node = made = graph.call_function(aten.mm.default, (x, x))
        for target in behind:
            node = graph.call_function(target, (node,))
        return made

    assert not _ends_in_memory(gemm())
    assert not _ends_in_memory(gemm(aten.mm.default))
    assert _ends_in_memory(gemm(aten.relu.default))
    assert _ends_in_memory(gemm(aten.view.default, aten.relu.default, aten.mm.default))
    assert not _ends_in_memory(gemm(aten.relu.default, aten.sum.default))
    assert not _ends_in_memory(gemm(aten.relu.default, aten.exp.default, aten.var_mean.correction))


class Model(nn.Module):
    """One GEMM with a pointwise epilogue, and one before a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x))).softmax(-1)


def compiled(tmp_path: Path, **options: Any) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Whether the file calls the runtime's operator; and which kernels it has, by their names."""
    args = (torch.randn(64, 512).bfloat16(),)
    report = export(
        Model().bfloat16(), args, tmp_path / "model.pt2", device="cuda", arch="sm_90", matmul="auto", progress=False,
        record_tuning=tmp_path / "new.json", **options,
    )  # fmt: skip
    choices = read_tuning(tmp_path / "new.json")["sm_90"]
    return "aoti_torch_cuda_addmm_out" in report.methods["forward"].operators, {
        choice["kernel"]: choice["config"] for choice in choices.values()
    }


UP, DOWN = (f"gemm 1 x [64, {k}] rows . [{k}, {n}] columns + bias, bfloat16" for k, n in ((512, 2048), (2048, 512)))


@pytest.mark.slow
def test_by_the_estimate(tmp_path: Path) -> None:
    calls_the_library, kernels = compiled(tmp_path)
    assert calls_the_library
    assert kernels[DOWN] == LIBRARY
    assert kernels[UP]["BLOCK_M"] in (16, 32, 64)
    [template] = [name for name in kernels if name.startswith("triton_tem")]
    assert "gelu" in template
    assert kernels[template]["num_warps"] == kernels[UP]["num_warps"]


@pytest.mark.slow
def test_by_a_tuning_file(tmp_path: Path) -> None:
    tile = {"BLOCK_M": 64, "BLOCK_K": 32, "BLOCK_N": 64, "GROUP_M": 8, "num_stages": 3, "num_warps": 4}
    choices = {UP: {"kernel": UP, "config": LIBRARY}, DOWN: {"kernel": DOWN, "config": tile}}
    document = {"format": "untorch tuning", "version": 1, "choices": {"sm_90": choices}}
    (tmp_path / "tuning.json").write_text(json.dumps(document))
    calls_the_library, kernels = compiled(tmp_path, tuning=tmp_path / "tuning.json")
    assert calls_the_library
    assert kernels[UP] == LIBRARY
    assert kernels[DOWN] == tile
    assert len([name for name in kernels if name.startswith("triton_tem")]) == 1


@pytest.mark.slow
def test_other_kinds_of_gemms_are_the_operators(tmp_path: Path) -> None:
    class Others(nn.Module):
        def forward(self, x: torch.Tensor, a: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x @ a + a.mT @ x.mT, torch._int_mm(i, i)

    args = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.ones(32, 32, dtype=torch.int8)
    report = export(
        Others(), args, tmp_path / "model.pt2", device="cuda", arch="sm_90", matmul="auto", progress=False
    )  # fmt: skip
    called = set(report.methods["forward"].operators)
    assert called >= {"aoti_torch__mm_plus_mm_out", "aoti_torch_cuda__int_mm_out"}


@pytest.mark.slow
def test_dynamic_sizes_stay_with_the_library(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=1, max=4096)
    calls_the_library, kernels = compiled(tmp_path, dynamic_shapes=({0: rows},))
    assert calls_the_library
    assert kernels[UP] == kernels[DOWN] == LIBRARY


def test_the_cpu_has_no_choice(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        export(Model(), (torch.randn(4, 512),), tmp_path / "model.pt2", matmul="auto", progress=False)
    assert str(caught.value) == (
        "method 'forward': option matmul: 'auto' is for CUDA, and this method is for the CPU: leave it out"
    )


def test_estimates_are_near_what_was_measured() -> None:
    """PyTorch's GEMMs in bfloat16 on an H200."""
    results = json.loads((Path(__file__).parents[3] / "benchmarks/results/gpu_matmul.json").read_text())
    assert results["machine"]["gpu"] == "NVIDIA H200"
    measured = results["values"]["bfloat16"]
    assert len(measured) == 20
    for name, values in measured.items():
        m, k, _k, n = (int(size) for size in re.findall(r"\d+", name)[:4])
        assert 0.6 < estimate_library(H200, Gemm(m, n, k)) / values["torch_seconds"] < 1.3, name
