"""Calls of one convolution on other memory: from the third one on cuDNN's kernels are launched without it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.native.captured import captured
from tests.gpu.native.threads import differing
from tests.native.shim import I32, Opt, call, use_torch_stream
from untorch.ops.fused_convolution import stored_weight

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Shape of x and of the weight, stride, padding, dilation, transposed, output padding, groups.
PROBLEMS: dict[str, tuple[Any, ...]] = {
    "3x3": ([2, 64, 56, 56], [64, 64, 3, 3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "1x1": ([2, 256, 14, 14], [1024, 256, 1, 1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "deep": ([2, 2048, 7, 7], [512, 2048, 1, 1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "stem": ([2, 3, 224, 224], [64, 3, 7, 7], [2, 2], [3, 3], [1, 1], False, [0, 0], 1),
    "patches": ([1, 3, 224, 224], [768, 3, 16, 16], [16, 16], [0, 0], [1, 1], False, [0, 0], 1),
    "grouped": ([2, 96, 28, 28], [96, 12, 3, 3], [1, 1], [1, 1], [1, 1], False, [0, 0], 8),
    "dilated": ([1, 40, 30, 31], [24, 40, 3, 3], [1, 1], [2, 2], [2, 2], False, [0, 0], 1),
    "odd": ([3, 17, 19, 23], [13, 17, 3, 5], [2, 1], [1, 2], [1, 1], False, [0, 0], 1),
    "transposed": ([2, 64, 16, 16], [64, 32, 2, 2], [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    "transposed, wide": ([1, 33, 9, 9], [33, 20, 4, 4], [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    "3-D": ([1, 16, 8, 28, 28], [32, 16, 3, 3, 3], [1, 2, 2], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
}  # fmt: skip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Convolve = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(args: tuple[Any, ...]) -> Convolve:
    def convolve(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = call("aoti_torch_cuda_convolution", x, w, Opt(bias), *args, returns=1)
        return out

    return convolve


def fused(args: tuple[Any, ...]) -> Convolve:
    stride, padding, dilation, transposed, extra, groups = args

    def convolve(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = call(
            "aoti_torch_cuda_fused_convolution", x, stored_weight(w, transposed, groups), Opt(bias), Opt(residual),
            stride, padding, dilation, I32(transposed), extra, groups, "relu", I32(0), "", returns=1,
        )  # fmt: skip
        return out

    return convolve


def operands(problem: tuple[Any, ...], dtype: torch.dtype, last: bool) -> list[torch.Tensor]:
    """x, weight, bias and residual, random and in memory of their own."""
    shape, weight, *args = problem
    channels = weight[1] * args[-1] if args[3] else weight[0]
    x, w = torch.randn(shape, device="cuda").to(dtype), torch.randn(weight, device="cuda").to(dtype)
    if last:
        x = x.to(memory_format=LAST[x.dim()])
    bias = torch.randn(channels, device="cuda").to(dtype)
    like = torch.ops.aten.convolution(x, w, bias, *args)
    return [x, w, bias, torch.randn_like(like).to(memory_format=LAST[x.dim()])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rows", "channels last", "fused"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_on_other_memory(name: str, kind: str, dtype: torch.dtype) -> None:
    problem = PROBLEMS[name]
    convolve = (fused if kind == "fused" else plain)(problem[2:])
    use_torch_stream()
    given = [operands(problem, dtype, kind != "rows") for _ in range(3)]
    first = [convolve(*given[0]), convolve(*given[1])]  # by cuDNN
    held = [convolve(*given[2])]
    for which in (0, 1, 0, 1):
        moved = [t.clone(memory_format=torch.preserve_format) for t in given[which]]
        got = convolve(*moved)
        assert torch.equal(got, first[which])
        held += [*moved, got]
    # On another stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        use_torch_stream()
        assert torch.equal(convolve(*given[1]), first[1])
    use_torch_stream()
    assert torch.equal(convolve(*given[2]), held[0])


def test_a_graph_has_the_kernels() -> None:
    stride, padding, dilation, transposed, extra, groups = PROBLEMS["3x3"][2:]
    x, w, _, _ = operands(PROBLEMS["3x3"], torch.bfloat16, True)
    weight = stored_weight(w, transposed, groups)
    use_torch_stream()
    for _ in range(3):
        want = call(
            "aoti_torch_cuda_fused_convolution", x, weight, Opt(None), Opt(None), stride, padding, dilation,
            I32(transposed), extra, groups, "relu", I32(0), "", returns=1,
        )  # fmt: skip

    def numbers(values: list[int]) -> list[Any]:
        return [(ctypes.c_int64 * len(values))(*values), ctypes.c_int64(len(values))]

    rest = [
        None, None, *numbers(stride), *numbers(padding), *numbers(dilation), ctypes.c_int32(transposed), *numbers(extra),
        ctypes.c_int64(groups), b"relu", ctypes.c_int32(0), b"",
    ]  # fmt: skip
    out = torch.zeros_like(want)
    with captured("aoti_torch_cuda_fused_convolution", [x, weight], rest, out) as graph:
        for _ in range(2):
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want)


def test_threads_share_the_kernels() -> None:
    problem = PROBLEMS["3x3"]
    convolve = fused(problem[2:])
    assert not differing(lambda one: convolve(*one), [operands(problem, torch.bfloat16, True) for _ in range(4)])
