"""The operators in eager PyTorch and torch.compile: the library's kernels, and the reference where they do not serve."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from untorch.export import export
from untorch.ops import int4, int4_moe, native, nvfp4, nvfp4_moe
from untorch.ops.int4_layout import pack_int4
from untorch.ops.nvfp4_layout import pack_nvfp4_tiles

Case = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[Any, ...]]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def codes(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def scales(*shape: int) -> torch.Tensor:
    return draw(*shape).abs().clamp(0.1, 2).to(torch.float8_e4m3fn)


def int4_case(dtype: torch.dtype) -> Case:
    weight, scale = pack_int4(codes(48, 256, high=16)), draw(4, 48, 2).mul(0.05).to(torch.bfloat16)
    x = draw(2, 3, 250).to(dtype)
    return int4.int4_linear, int4.int4_linear_reference, (x, weight, scale, 64, draw(48).to(dtype))


def nvfp4_case(dtype: torch.dtype) -> Case:
    weight = pack_nvfp4_tiles(codes(48, 128).to(torch.uint8))
    arguments = (draw(3, 250).to(dtype), weight, scales(48, 16), torch.tensor(0.02))
    return nvfp4.nvfp4_linear, nvfp4.nvfp4_linear_reference, arguments


def moe_case(dtype: torch.dtype) -> Case:
    e, k, i, m = 4, 64, 32, 6
    weights = (
        codes(e, 2 * i, k // 2).to(torch.uint8), scales(e, 2 * i, k // 16), codes(e, k, i // 2).to(torch.uint8),
        scales(e, k, i // 16), torch.full((e, 2), 0.05), torch.full((e,), 0.05),
    )  # fmt: skip
    ids = codes(m, 2, high=e).to(torch.int32)
    ids[1, 0] = -1
    extra = (draw(e, 2 * i), None, 1.5, 0.5, 3.0)
    arguments = (draw(m, k).to(dtype), torch.rand(m, 2), ids, *weights, *extra)
    return nvfp4_moe.nvfp4_moe, nvfp4_moe.nvfp4_moe_reference, arguments


def int4_moe_case(dtype: torch.dtype) -> Case:
    e, k, i, m = 4, 128, 64, 6
    weights = (
        pack_int4(codes(e * 2 * i, k, high=16)), draw(2, e * 2 * i, 2).mul(0.05).to(dtype),
        pack_int4(codes(e * k, 128, high=16)), draw(2, e * k, 2).mul(0.05).to(dtype),
    )  # fmt: skip
    ids = codes(m, 2, high=e).to(torch.int32)
    ids[1, 0] = -1
    arguments = (draw(m, k).to(dtype), torch.rand(m, 2), ids, *weights, 64, i, draw(e, 2 * i), None, 1.5, 0.5, 3.0)
    return int4_moe.int4_moe, int4_moe.int4_moe_reference, arguments


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own

CASES = [int4_case, nvfp4_case, moe_case, int4_moe_case]
OPERATORS = {
    "int4_case": int4.int4_linear, "nvfp4_case": nvfp4.nvfp4_linear, "moe_case": nvfp4_moe.nvfp4_moe,
    "int4_moe_case": int4_moe.int4_moe,
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_library_computes_what_the_reference_does(case: Callable[[torch.dtype], Case], dtype: torch.dtype) -> None:
    operator, reference, arguments = case(dtype)
    got, wanted = operator(*arguments), reference(*arguments)
    assert got.dtype == dtype and got.is_contiguous()
    size = float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(dtype).eps, atol=4e-6 * size)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of the library that operators call."""
    seen: list[str] = []
    real = native.call

    def noted(function: str, out: torch.Tensor, *arguments: Any) -> None:
        seen.append(function)
        real(function, out, *arguments)

    monkeypatch.setattr(native, "call", noted)
    return seen


@pytest.mark.parametrize("case", CASES)
def test_eager_and_compiled_call_the_library(case: Callable[[torch.dtype], Case], calls: list[str]) -> None:
    operator, _, arguments = case(torch.float32)
    eager = operator(*arguments)
    assert len(calls) == 1
    compiled = torch.compile(lambda *given: operator(*given) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), eager * 2)
    assert len(calls) == 2 and len(set(calls)) == 1


@pytest.mark.parametrize("case", CASES)
def test_float64_and_no_elements_are_the_reference(case: Callable[[torch.dtype], Case], calls: list[str]) -> None:
    operator, _, arguments = case(torch.float32)
    x, *rest = arguments
    double = [a.double() if operator is int4.int4_linear and a is rest[-1] else a for a in rest]
    assert operator(x.double(), *double).dtype == torch.float64
    if operator not in (nvfp4_moe.nvfp4_moe, int4_moe.int4_moe):
        assert operator(x[:0], *rest).shape[0] == 0
    assert calls == []


class Layer(nn.Module):
    def __init__(self, case: Callable[[torch.dtype], Case]) -> None:
        super().__init__()
        self.case = case.__name__  # an operator cannot be copied
        _, _, (_, *rest) = case(torch.float32)
        self.rest: list[Any] = []
        for i, value in enumerate(rest):
            if isinstance(value, torch.Tensor):
                self.register_buffer(f"b{i}", value)
                self.rest.append(f"b{i}")
            else:
                self.rest.append(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATORS[self.case](x, *(getattr(self, v) if isinstance(v, str) else v for v in self.rest))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bit_for_bit_what_the_file_computes(case: Callable[[torch.dtype], Case], tmp_path: Path) -> None:
    module, x = Layer(case).eval(), case(torch.float32)[2][0]
    with torch.no_grad():
        eager = module(x)
    export(module, (x,), tmp_path / "layer.pt2", progress=False)
    with untorch.load(tmp_path / "layer.pt2") as program:
        assert np.array_equal(program(x.numpy()), eager.numpy())


def test_strided_rows_and_misaligned_weights() -> None:
    operator, reference, (_, weight, scale, group, bias) = int4_case(torch.float32)
    wide = draw(2, 6, 250)[:, ::2]
    padded = torch.empty(weight.numel() + 1, dtype=torch.int32)
    moved = padded[1:].view_as(weight).copy_(weight)
    torch.testing.assert_close(operator(wide, moved, scale, group, bias), reference(wide, weight, scale, group, bias))


def test_ids_of_no_expert_are_a_value_error() -> None:
    operator, _, arguments = moe_case(torch.float32)
    arguments[2][3, 1] = 4
    with pytest.raises(ValueError, match=r"nvfp4_moe: topk_ids: expected experts from 0 to 3, or -1 for none, got "):
        operator(*arguments)


def test_what_the_library_refuses_is_its_message() -> None:
    _, _, arguments = int4_case(torch.float32)
    with pytest.raises(
        RuntimeError, match=r"int4_linear: argument 'out' must be contiguous float32\[2, 3, 48\] on cpu"
    ):
        native.call("int4_linear", torch.empty(3, 48), *arguments[:4], (None,))
    out = torch.empty(3 * 2 * 48 + 1)[1:].view(2, 3, 48)
    with pytest.raises(RuntimeError, match="int4_linear: argument 'out' must be aligned to 16 bytes"):
        native.call("int4_linear", out, *arguments[:4], (None,))


class _OnCuda:
    """What `serves` looks at of a tensor on a GPU."""

    dtype, device = torch.float32, torch.device("cuda", 0)

    def numel(self) -> int:
        return 1


def test_without_cuda_in_the_build_the_reference_runs_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_warned", set())
    monkeypatch.setattr(native, "_has_cuda_kernels", lambda: False)
    x: Any = _OnCuda()
    text = (
        r"untorch::int4_linear: this untorch was built without CUDA, so its reference runs on cuda:0, which dequantizes "
        r"the weights to float32 at every call: install the CUDA toolkit \(nvcc\) and reinstall untorch"
    )
    with pytest.warns(RuntimeWarning, match=text):
        assert not native.serves("int4_linear", x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.serves("int4_linear", x)
    with pytest.warns(RuntimeWarning, match="untorch::nvfp4_moe"):
        assert not native.serves("nvfp4_moe", x)
    monkeypatch.setattr(native, "_has_cuda_kernels", lambda: True)
    assert native.serves("int4_linear", x)


@pytest.mark.slow
def test_handles_are_freed() -> None:
    """Ten thousand calls: a handle is some hundred bytes."""
    code = """
        import resource, torch
        from untorch.ops.int4 import int4_linear
        x, weight, scale = torch.ones(1, 32), torch.zeros(1, 1, 32, 1, dtype=torch.int32), torch.ones(1, 8, 2)
        def peak():
            for _ in range(10000):
                int4_linear(x, weight, scale, 32)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak()
        print(peak() - peak())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert abs(int(done.stdout)) < 1024, "KiB"
