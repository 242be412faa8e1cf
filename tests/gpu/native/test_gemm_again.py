"""Calls of one GEMM on other memory: from the third one on cuBLASLt's kernels are launched without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu.native.threads import differing
from tests.native.shim import I32, Opt, call, use_torch_stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Operands = list[torch.Tensor]
BF16, F16, F32, F64, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def mm(m: int, n: int, k: int, dtype: torch.dtype, column_major: bool = False) -> tuple[str, Operands, list[float]]:
    b = randn(n, k, dtype=dtype).t() if column_major else randn(k, n, dtype=dtype)
    return "aoti_torch_cuda_mm_out", [randn(m, n, dtype=dtype), randn(m, k, dtype=dtype), b], []


def addmm(added: tuple[int, ...], dtype: torch.dtype, beta: float, alpha: float) -> tuple[str, Operands, list[float]]:
    _, (out, a, b), _ = mm(384, 768, 512, dtype, True)
    return "aoti_torch_cuda_addmm_out", [out, randn(*added, dtype=dtype), a, b], [beta, alpha]


def bmm(dtype: torch.dtype) -> tuple[str, Operands, list[float]]:
    operands = [randn(*shape, dtype=dtype) for shape in ((6, 200, 136), (6, 200, 264), (6, 264, 136))]
    return "aoti_torch_cuda_bmm_out", operands, []


# The shim, the result and the operands, and what follows them.
PROBLEMS: dict[str, Callable[[], tuple[str, Operands, list[float]]]] = {
    "bfloat16": lambda: mm(512, 1024, 768, BF16, True),
    "float16, odd": lambda: mm(333, 517, 259, F16),
    "float32": lambda: mm(384, 384, 1024, F32, True),
    "float64": lambda: mm(200, 300, 400, F64),
    "split along K": lambda: mm(128, 128, 16384, BF16, True),
    "split along K, float32": lambda: mm(128, 128, 16384, F32, True),
    "tall": lambda: mm(8192, 640, 320, BF16),
    "bias": lambda: addmm((768,), BF16, 1, 1),
    "bias, float32": lambda: addmm((768,), F32, 1, 1),
    "factors": lambda: addmm((384, 768), F32, 0.5, 2),
    "batch": lambda: bmm(BF16),
    "batch, float32": lambda: bmm(F32),
}


def run(shim: str, operands: Operands, rest: list[float]) -> torch.Tensor:
    call(shim, *operands, *map(float, rest))
    return operands[0]


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_on_other_memory(name: str) -> None:
    use_torch_stream()
    given = [PROBLEMS[name]() for _ in range(3)]
    first = [run(*given[0]).clone(), run(*given[1]).clone()]  # by cuBLASLt
    held = []
    for which in (0, 1, 0, 1):
        shim, operands, rest = given[which]
        moved = [torch.empty_like(t).copy_(t) for t in operands]
        assert torch.equal(run(shim, moved, rest), first[which])
        held += moved
    last = run(*given[2]).clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        use_torch_stream()
        assert torch.equal(run(*given[1]), first[1])
    use_torch_stream()
    assert torch.equal(run(*given[2]), last)


def test_the_result_is_what_is_added() -> None:
    """Its place twice among the operands, which recording has seen apart."""
    use_torch_stream()
    shim, (out, added, a, b), rest = PROBLEMS["factors"]()
    for _ in range(4):
        want = run(shim, [out, added, a, b], rest).clone()
    again = added.clone()
    assert torch.equal(run(shim, [again, again, a, b], rest), want)


def test_another_factor() -> None:
    use_torch_stream()
    shim, operands, _ = PROBLEMS["factors"]()
    results = [run(shim, operands, [beta, alpha]).clone() for _ in range(4) for beta, alpha in ((0.5, 2), (1, 1))]
    _, added, a, b = operands
    for got, (beta, alpha) in zip(results, [(0.5, 2), (1, 1)] * 4, strict=True):
        torch.testing.assert_close(got, torch.addmm(added, a, b, beta=beta, alpha=alpha), rtol=1e-3, atol=1e-2)
    assert all(torch.equal(results[i], results[i % 2]) for i in range(8))


@pytest.mark.parametrize("rowwise", [False, True])
def test_float8(rowwise: bool) -> None:
    use_torch_stream()
    a, b = randn(256, 512).to(FP8), randn(384, 512).to(FP8).t()
    shapes = ((256, 1), (1, 384)) if rowwise else ((1,), (1,))
    factors = [[torch.rand(shape, device="cuda") + 0.5 for shape in shapes] for _ in range(2)]
    results = [
        call("aoti_torch_cuda__scaled_mm", a.clone(), b, *factors[i % 2], Opt(None), Opt(None), Opt(15, "int32"),
             I32(0), returns=1)
        for i in range(8)
    ]  # fmt: skip
    assert all(torch.equal(results[i], results[i % 2]) for i in range(8))
    want = (a.double() @ b.double()) * factors[0][0] * factors[0][1]
    torch.testing.assert_close(results[6].double(), want, rtol=2e-2, atol=0.5)


def test_int8() -> None:
    use_torch_stream()
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda") for shape in ((256, 512), (384, 512)))
    out = torch.empty(256, 384, dtype=torch.int32, device="cuda")
    for _ in range(5):
        out.zero_()
        call("aoti_torch_cuda__int_mm_out", out, a.clone(), b.t())
        assert torch.equal(out.double(), a.double() @ b.double().t())


@pytest.mark.parametrize("name", ["bfloat16", "split along K", "bias"])
def test_a_graph_has_the_kernels(name: str) -> None:
    use_torch_stream()
    shim, operands, rest = PROBLEMS[name]()
    for _ in range(4):
        want = run(shim, operands, rest).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        use_torch_stream()
        run(shim, operands, rest)
    use_torch_stream()
    for _ in range(2):
        operands[0].zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(operands[0], want)


def test_threads_share_the_kernels() -> None:
    assert not differing(lambda one: run(*one), [PROBLEMS["bias"]() for _ in range(4)])
