"""Kernels of users for CUDA: CuPy, PyTorch and Triton on the call's stream, in calls and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import untorch
from tests.native.cuda.proxy_models import Around, Both, Detect, define_all
from untorch import _core
from untorch.runtime import registry

BOXES = np.array([[0, 0, 2, 2], [0, 0, 2, 2.5], [5, 5, 6, 6], [5, 5, 6, 6], [0, 1, 2, 3], [9, 9, 9, 9]], np.float32)
SCORES = np.array([0.5, 0.9, 0.7, 0.7, 0.5, 0.1], np.float32)
X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def package(folder: Path) -> Path:
    from untorch.export import export

    define_all()
    untorch.register_kernel("proxy::scale", lambda *a, **k: None, device="cuda")
    path = folder / "proxy_kernels.pt2"
    methods = {
        "around": {"model": Around(), "args": (torch.ones(3, 4, device="cuda"),)},
        "detect": {"model": Detect(), "args": (torch.rand(6, 4, device="cuda"), torch.rand(6, device="cuda"))},
    }
    export(methods=methods, path=path, device="cuda", progress=False)
    return path


@pytest.fixture
def program(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[untorch.Program]:
    monkeypatch.setattr(registry, "_registered", {})
    with untorch.load(package) as loaded:
        yield loaded


def expected(x: Any) -> np.ndarray[Any, Any]:
    return np.sin(np.asarray(x) * 6) + 1


def with_torch(x: untorch.Tensor, factor: float) -> torch.Tensor:
    with torch.cuda.stream(torch.cuda.ExternalStream(int(untorch.current_stream()))):
        return torch.from_dlpack(x) * factor


def with_torch_on_its_own_stream(x: untorch.Tensor, factor: float) -> torch.Tensor:
    """DLPack orders the two streams."""
    return torch.from_dlpack(x) * factor


def with_cupy(x: untorch.Tensor, factor: float) -> Any:
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.ExternalStream(int(untorch.current_stream())):
        return cupy.from_dlpack(x) * cupy.float32(factor)


def with_triton(x: untorch.Tensor, factor: float) -> torch.Tensor:
    from tests.gpu.triton_scale import scale

    with torch.cuda.stream(torch.cuda.ExternalStream(int(untorch.current_stream()))):
        source = torch.from_dlpack(x)
        out = torch.empty_like(source)
        scale[(1,)](source, out, factor, source.numel(), BLOCK=16)
        return out


@pytest.mark.parametrize("kernel", [with_torch, with_torch_on_its_own_stream, with_cupy, with_triton])
def test_calls(program: untorch.Program, kernel: Any) -> None:
    untorch.register_kernel("proxy::scale", kernel, device="cuda")
    for i in range(50):
        x = X + np.float32(i)
        np.testing.assert_allclose(program.around(x), expected(x), rtol=1e-4, atol=1e-4)
    given = torch.from_numpy(X).cuda()
    out = program.around(given)
    torch.testing.assert_close(
        torch.from_dlpack(out).cpu().numpy(), expected(X).astype(np.float32), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kernel", [with_torch, with_cupy, with_triton])
def test_graphs(program: untorch.Program, kernel: Any) -> None:
    untorch.register_kernel("proxy::scale", kernel, device="cuda")
    with program.around.graph(X) as graph:
        for i in range(20):
            x = X + np.float32(i)
            filler = torch.full((1 << 16,), 7.0, device="cuda")  # uses memory that the kernel's results had
            np.testing.assert_allclose(graph(x), expected(x), rtol=1e-4, atol=1e-4)
            del filler


def test_what_a_graph_cannot_hold(program: untorch.Program) -> None:
    def waits(x: untorch.Tensor, factor: float) -> torch.Tensor:
        out = with_torch(x, factor)
        torch.cuda.ExternalStream(int(untorch.current_stream())).synchronize()
        return out

    untorch.register_kernel("proxy::scale", waits, device="cuda")
    np.testing.assert_allclose(program.around(X), expected(X), rtol=1e-4, atol=1e-4)
    with pytest.raises(untorch.UnsupportedError, match="the kernel of operator `proxy::scale`.*cannot hold"):
        program.around.graph(X)

    def reads(x: untorch.Tensor, factor: float) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * factor).cuda()

    untorch.register_kernel("proxy::scale", reads, device="cuda")
    with pytest.raises(untorch.UnsupportedError, match="a copy on the CPU waits for the GPU"):
        program.around.graph(X)
    untorch.register_kernel("proxy::scale", with_torch, device="cuda")
    np.testing.assert_allclose(program.around(X), expected(X), rtol=1e-4, atol=1e-4)


def test_cast_on_the_gpu(program: untorch.Program) -> None:
    untorch.register_kernel("proxy::scale", lambda x, factor: with_torch(x, factor).double(), device="cuda", cast=True)
    np.testing.assert_allclose(program.around(X), expected(X), rtol=1e-4, atol=1e-4)
    untorch.register_kernel("proxy::scale", lambda x, factor: with_torch(x, factor).t().contiguous().t(), device="cuda")
    np.testing.assert_allclose(program.around(X), expected(X), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Path:
    """PyTorch's own package."""
    define_all()
    args = (torch.rand(6, 4, device="cuda"), torch.rand(6, device="cuda"))
    program = torch.export.export(Both().cuda(), args)
    return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "stock_proxy.pt2")))


def test_a_stock_package(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    with untorch.load(stock) as program:
        with pytest.raises(untorch.UnsupportedError, match="`proxy::scale` has no kernel for cuda"):
            program(BOXES, SCORES)
        untorch.register_kernel("proxy::scale", with_torch, device="cuda")
        with pytest.raises(untorch.UnsupportedError, match="does not tell the (shapes|dtypes) of its results"):
            program(BOXES, SCORES)
        untorch.register_kernel("proxy::scale", with_torch, device="cuda", unchecked=True)
        kept, rows = program(BOXES, SCORES)
        assert kept.tolist()[:2] == [1, 2] and 3 not in kept.tolist()
        np.testing.assert_allclose(rows, expected(BOXES), rtol=1e-4, atol=1e-4)


def test_native_nms_in_a_model(program: untorch.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("Python was called")

    monkeypatch.setattr("untorch.runtime.method._ProxyHandler.__call__", refuse)
    boxes, scores = BOXES, SCORES
    kept, rows = program.detect(boxes, scores)
    assert kept.tolist()[:2] == [1, 2] and 3 not in kept.tolist()
    np.testing.assert_allclose(rows, boxes[kept] + 1)
    with pytest.raises(untorch.UnsupportedError, match="depends on the data"):
        program.detect.graph(boxes, scores)
    assert _core.native_operators("cuda")
