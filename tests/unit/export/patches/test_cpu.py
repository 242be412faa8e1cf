"""Patches of C++ code generation: the vector ISA, -march, parallel loops, sums in tiles, the layout of images."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.export import Dim

import untorch
from untorch.export import export, patches
from untorch.export.library import find_runtime_library
from untorch.export.patches.cpu import has_cpp_march, torch_version


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


def source(path: Path, size: int, dynamic_shapes: Any = None) -> str:
    export(Double(), (torch.zeros(size),), path, dynamic_shapes=dynamic_shapes, keep_sources=True, progress=False)
    with zipfile.ZipFile(path) as archive:
        return "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".cpp"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_small_loops_are_serial_and_open_ones_parallel(tmp_path: Path) -> None:
    assert "#pragma omp parallel" not in source(tmp_path / "small.pt2", 64)
    assert "#pragma omp parallel" in source(tmp_path / "open.pt2", 64, ({0: Dim("n", min=2, max=1 << 24)},))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_torch_still_parallelises_small_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "small_loops", contextlib.nullcontext)
    assert "#pragma omp parallel" in source(tmp_path / "small.pt2", 64)


def test_the_isa_probe_still_fails_with_custom_op_libs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import config, cpu_vec_isa

    (tmp_path / "libuntorch.so").symlink_to(find_runtime_library())
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    code = (
        'extern "C" int aoti_torch_device_type_cpu(); extern "C" int probe() { return aoti_torch_device_type_cpu(); }'
    )
    with config.patch({"aot_inductor.custom_op_libs": ["untorch"], "aot_inductor.link_libtorch": False}):
        assert not cpu_vec_isa.VecAVX2().check_build(code)


def test_torch_has_cpp_march() -> None:
    assert has_cpp_march() == (torch_version() >= (2, 13))


class Enlarged(torch.nn.Module):
    """Three images, channels last from their convolutions, are enlarged and summed before a fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(3, 32, 1) for _ in range(4))
        self.last = torch.nn.Conv2d(32, 16, 3)

    def forward(self, *images: torch.Tensor) -> torch.Tensor:
        first, *others = (layer(image) for layer, image in zip(self.convolutions, images, strict=True))
        size = first.shape[2:]
        large = [torch.nn.functional.interpolate(image, size, mode="bilinear") for image in others]
        return self.last(first + (large[0] + (large[1] + large[2])))


def enlarged(path: Path) -> str:
    """The kernels' source; results are eager's."""
    torch.manual_seed(0)
    model, images = Enlarged().eval(), tuple(torch.randn(2, 3, 32 // n, 24 // n) for n in (1, 2, 4, 8))
    export(model, images, path, keep_sources=True, progress=False)
    with untorch.load(path) as program, torch.no_grad():
        got = program(*(image.numpy() for image in images))
        torch.testing.assert_close(torch.from_numpy(got), model(*images), rtol=1e-4, atol=1e-4)
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".kernel.cpp")]
        source = "".join(archive.read(name).decode() for name in names)
    return next(part for part in source.split('extern "C"') if "void  cpp_fused" in part and "unsafe_index" in part)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_channels_are_gathered_together(tmp_path: Path) -> None:
    source = enlarged(tmp_path / "model.pt2")
    assert "tmpbuf[" not in source and "loadu(in_ptr" in source


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_torch_still_gathers_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "gathered_channels_last", contextlib.nullcontext)
    assert "tmpbuf[" in enlarged(tmp_path / "model.pt2")


class Overlapped(torch.nn.Module):
    """fold of windows that a product of matrices leaves transposed, as in VOLO's attention."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        batch, heads, windows, kernel, width = y.shape
        columns = y.permute(0, 1, 4, 3, 2).reshape(batch, heads * width * kernel, windows)
        return torch.nn.functional.fold(columns, (8, 8), kernel_size=3, padding=1, stride=2)


class Scattered(torch.nn.Module):
    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = x.new_zeros(33, 50)
        return zeros.index_add(1, places, x.t()), zeros.index_put((torch.arange(33)[:, None], places), x.t(), True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_sums_into_computed_places(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    windows = (torch.randn(2, 2, 16, 9, 16) * 100).to(dtype)
    x, places = (torch.randn(40, 33) * 100).to(dtype), torch.randint(0, 50, (40,))
    shapes = ({0: torch.export.Dim("batch", max=8)},)
    methods: dict[str, Any] = {
        "fold": {"model": Overlapped(), "args": (windows,), "dynamic_shapes": shapes},
        "scatter": (Scattered(), (x, places)),
    }
    if dtype == torch.int64:
        del methods["fold"]  # it has no integers
    export(methods=methods, path=tmp_path / "sums.pt2", progress=False)
    with untorch.load(tmp_path / "sums.pt2") as program:
        for found, expected in zip(program.scatter(x.numpy(), places.numpy()), Scattered()(x, places), strict=True):
            assert numpy.allclose(found, expected.numpy(), atol=1e-3)
        for given in (windows, windows[:1], torch.cat([windows, windows.flip(2)[:1]])) if "fold" in methods else ():
            assert numpy.allclose(program.fold(given.numpy()), Overlapped()(given).numpy(), atol=1e-3)


COMPILED = """
import torch
from tests.unit.export.patches.test_cpu import Overlapped

torch.manual_seed(0)
y = torch.randn(2, 2, 16, 9, 16)
print(float((torch.compile(Overlapped())(y) - Overlapped()(y)).abs().max()))
"""


@pytest.mark.slow
def test_torch_still_scatters_tiles_beside_their_place() -> None:
    """Which may end the process: it writes behind the result."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED], capture_output=True, text=True, timeout=300,
        cwd=Path(__file__).resolve().parents[4],
    )  # fmt: skip
    assert done.returncode < 0 or float(done.stdout) > 1e-3, done.stderr


class Extrema(torch.nn.Module):
    """Of each row, of each column, and of all; what a mask has, and what other reductions give."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        least, greatest = x.min(1), x.max(1)
        scaled = (x.float() * 0.5).to(x.dtype)
        return (
            x.amin(1), x.amax(1), x.argmin(1), x.argmax(1), *least, *greatest, x.amin(0), x.argmax(0), x.min(), x.max(),
            x.argmin(), x.t().argmax(), x.t().amin(1, keepdim=True), *torch.aminmax(x, dim=1), scaled.amin(1),
            scaled.argmax(1), x.sum(1), x.all(1), x.any(1), (x > 2).all(1), (x > 2).amax(1), x[:, :1].amin(1),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cpu", ["portable", "native"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_extrema_of_bytes(tmp_path: Path, dtype: torch.dtype, cpu: str) -> None:
    torch.manual_seed(0)
    shapes, least = ({0: torch.export.Dim("rows", min=2, max=8)},), torch.iinfo(dtype).min
    example = torch.randint(3, 120, (3, 72)).to(dtype)
    export(Extrema(), (example,), tmp_path / "bytes.pt2", dynamic_shapes=shapes, cpu=cpu, progress=False)
    with untorch.load(tmp_path / "bytes.pt2") as program:
        extremes = torch.tensor([[least], [torch.iinfo(dtype).max]], dtype=dtype).expand(2, 72).contiguous()
        lower = torch.randint(least, least + 100, (5, 72)).to(dtype)
        for given in (example, lower, extremes, torch.zeros_like(lower)):
            for i, (found, expected) in enumerate(zip(program.forward(given.numpy()), Extrema()(given), strict=True)):
                assert numpy.array_equal(found, expected.numpy()), (i, found, expected)


LEAST = """
import torch

x = torch.randint(3, 120, (7, 72)).to(torch.uint8)
print(bool((torch.compile(lambda x: x.amin(1))(x) == 0).all()))
"""


@pytest.mark.slow
def test_torch_still_reduces_more_bytes_than_it_loads() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEAST], capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.stdout.split() == ["True"], done.stderr
