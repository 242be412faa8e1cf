"""GEMVs of large weights, which are read by bulk copies before the kernels before them have ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import untorch
from untorch.export import export

# N and K: the sizes of an 8-billion-parameter decoder, a K of several rounds, an N that is no multiple of a tile, a K
# with a short last chunk, a weight too small for bulk copies.
SHAPES = [
    (4096, 4096), (24576, 4096), (4096, 12288), (5003, 4000), (2051, 14336), (1024, 16384), (8200, 1056), (640, 28672),
    (1024, 512),
]  # fmt: skip
ROWS = [1, 2, 5, 8, 9, 16]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=i % 2 == 1) for i, (n, k) in enumerate(SHAPES))

    def forward(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x * 1.5) for layer, x in zip(self.layers, xs, strict=True))


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16])
def model(request: pytest.FixtureRequest, folder: Path) -> tuple[nn.Module, untorch.Program]:
    torch.manual_seed(0)
    layers = Layers().to("cuda", request.param).eval().requires_grad_(False)
    example = tuple(torch.randn(3, k, device="cuda", dtype=request.param) for _, k in SHAPES)
    dims = {"xs": tuple({0: torch.export.Dim("rows", min=1, max=64)} for _ in SHAPES)}
    path = folder / f"gemv_{str(request.param).rpartition('.')[2]}.pt2"
    export(layers, example, path, device="cuda", dynamic_shapes=dims, progress=False)
    return layers, untorch.load(path)


@pytest.mark.parametrize("rows", ROWS)
def test_as_eager(model: tuple[nn.Module, untorch.Program], rows: int) -> None:
    layers, program = model
    dtype = next(layers.parameters()).dtype
    for _ in range(3):
        xs = tuple(torch.randn(rows, k, device="cuda", dtype=dtype) for _, k in SHAPES)
        expected = layers(*xs)
        for got, wanted in zip(program.forward(*xs), expected, strict=True):
            error = (torch.from_dlpack(got).float() - wanted.float()).abs().max() / wanted.float().abs().max()
            assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_in_a_graph(model: tuple[nn.Module, untorch.Program]) -> None:
    layers, program = model
    dtype = next(layers.parameters()).dtype
    xs = tuple(torch.randn(1, k, device="cuda", dtype=dtype) for _, k in SHAPES)
    graph = program.forward.graph(*xs)
    called = [torch.from_dlpack(result).clone() for result in program.forward(*xs)]
    for _ in range(20):
        for got, wanted in zip(graph(*xs), called, strict=True):
            assert torch.equal(torch.from_dlpack(got), wanted)


# Tiles of 32 and of 48 columns, N that is no multiple of either, groups longer and shorter than a k block.
INT4_SHAPES = [(6144, 4096), (24576, 1024), (4096, 4096), (4120, 12288), (5000, 2048)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 128, 256])
def test_int4_of_one_row(dtype: torch.dtype, group: int, folder: Path) -> None:
    """As each row of five, which another kernel serves."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(k, n, bias=False, dtype=dtype) for n, k in INT4_SHAPES)

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(layer(x * 1.5) for layer, x in zip(self.layers, xs, strict=True))

    example = tuple(torch.randn(3, k, device="cuda", dtype=dtype) for _, k in INT4_SHAPES)
    dims = {"xs": tuple({0: torch.export.Dim("rows", min=1, max=64)} for _ in INT4_SHAPES)}
    path = folder / "int4_rows.pt2"
    export(
        All().cuda().eval().requires_grad_(False), example, path, device="cuda", dynamic_shapes=dims, progress=False,
        quantize={"dtype": "int4", "group_size": group, "method": "rtn"},
    )  # fmt: skip
    with untorch.load(path) as program:
        xs = [torch.randn(5, k, device="cuda", dtype=dtype) for _, k in INT4_SHAPES]
        rows = [torch.from_dlpack(result).clone() for result in program.forward(*xs)]
        for row in range(5):
            for got, wanted in zip(program.forward(*(x[row : row + 1] for x in xs)), rows, strict=True):
                error = (torch.from_dlpack(got)[0].float() - wanted[row].float()).abs().max()
                assert error < 1e-2 * wanted.float().abs().max()
