"""TF32 on the GPU: as PyTorch was set at export, in stock packages by its defaults, overridden by load and environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import untorch
from untorch.export import export

if torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("TF32 needs compute capability 8.0", allow_module_level=True)

# Of the largest value: float32 sums are far below, operands with 10 bits of mantissa above.
LIMIT = 5e-5


class Layers(nn.Module):
    """A convolution and a GEMM, large enough that both use the tensor cores where they may."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(64, 64, 3, padding=1)
        self.linear = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.convolution(x), self.linear(y)


def model_and_inputs() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = Layers().eval().requires_grad_(False).cuda()
    return model, (torch.randn(4, 64, 56, 56, device="cuda"), torch.randn(512, 256, device="cuda"))


@contextlib.contextmanager
def precision(allow_tf32: bool) -> Iterator[None]:
    kinds = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [kind.allow_tf32 for kind in kinds]
    kinds[0].allow_tf32 = kinds[1].allow_tf32 = allow_tf32
    try:
        yield
    finally:
        kinds[0].allow_tf32, kinds[1].allow_tf32 = before


def uses(path: Path, **options: bool) -> tuple[bool, bool]:
    """Whether the convolution and the GEMM rounded to TF32."""
    model, inputs = model_and_inputs()
    wanted = model.double()(*(x.double() for x in inputs))
    with untorch.load(path, **options) as program:
        method = program[next(iter(program))]
        got = [torch.from_dlpack(y) for y in method.run(list(inputs))]
        with method.graph(*inputs) as graph:
            again = [torch.from_dlpack(y).clone() for y in graph(*inputs)]
    rounded = []
    for outputs in (got, again):
        errors = [((y.double() - w).abs().max() / w.abs().max()).item() for y, w in zip(outputs, wanted, strict=True)]
        assert max(errors) < 5e-3
        rounded.append(tuple(error > LIMIT for error in errors))
    assert rounded[0] == rounded[1], "a graph is captured with the call's setting"
    return rounded[0]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("precision")
    model, inputs = model_and_inputs()
    paths = {name: folder / f"{name}.pt2" for name in ("default", "ieee", "tf32", "stock")}
    export(model, inputs, paths["default"], device="cuda", progress=False)
    with precision(False):
        export(model, inputs, paths["ieee"], device="cuda", progress=False)
    with precision(True):
        export(model, inputs, paths["tf32"], device="cuda", progress=False)
    with torch.no_grad():
        program = torch.export.export(model, inputs)
        torch._inductor.aoti_compile_and_package(program, package_path=str(paths["stock"]))
    return paths


EXPECTED = {"default": (True, False), "ieee": (False, False), "tf32": (True, True), "stock": (True, False)}


@pytest.mark.parametrize("name", EXPECTED)
def test_operators_use_what_pytorch_would(name: str, packages: dict[str, Path]) -> None:
    assert uses(packages[name]) == EXPECTED[name]
    assert uses(packages[name], tf32=True) == (True, True)
    assert uses(packages[name], tf32=False) == (False, False)
    if name != "stock":
        with untorch.load(packages[name]) as program:
            recorded = program.manifest["methods"]["forward"]["tf32"]
        assert (recorded["convolution"], recorded["matmul"]) == EXPECTED[name]


@pytest.mark.parametrize(("value", "expected"), [("0", (False, False)), ("1", (True, True))])
def test_the_environment_decides_for_all(value: str, expected: tuple[bool, bool], packages: dict[str, Path]) -> None:
    code = f"""
from pathlib import Path
from tests.gpu.test_precision import uses
for path in {[str(path) for path in packages.values()]}:
    for options in ({{}}, {{"tf32": True}}, {{"tf32": False}}):
        assert uses(Path(path), **options) == {expected}, (path, options)
"""
    environment = dict(os.environ, UNTORCH_ALLOW_TF32=value)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
