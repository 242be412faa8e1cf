"""untorch's operators on CUDA tensors of torch: the library's kernels, on torch's stream, in torch's CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import untorch
from tests.gpu.models import exported
from tests.gpu.spin import Spin
from tests.unit.ops.test_native import CASES, Case, Layer, codes, draw, moe_case, scales
from untorch.ops import native
from untorch.ops.nvfp4 import nvfp4_linear
from untorch.ops.nvfp4_layout import pack_nvfp4_tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Make = Callable[[torch.dtype], Case]
cases = pytest.mark.parametrize("case", CASES)


def on_gpu(case: Case) -> Case:
    operator, reference, arguments = case
    return operator, reference, tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    size = float(wanted.float().abs().max())
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, wanted, rtol=4 * eps, atol=(1e-5 + 2 * eps) * size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@cases
def test_the_library_computes_what_the_reference_does(case: Make, dtype: torch.dtype) -> None:
    operator, reference, arguments = on_gpu(case(dtype))
    got = operator(*arguments)
    assert got.is_cuda and got.dtype == dtype and got.is_contiguous()
    close(got, reference(*arguments))


@cases
def test_bit_for_bit_what_the_file_computes(case: Make, folder: Path) -> None:
    module, x = Layer(case).eval(), case(torch.float32)[2][0]
    path = exported(folder, f"op_{case.__name__}", module, (x,))
    eager = module.cuda()(x.cuda())
    with untorch.load(path) as program:
        assert torch.equal(torch.from_dlpack(program(x.cuda())), eager)


@cases
def test_on_torchs_current_stream_without_waiting(case: Make) -> None:
    operator, _, arguments = on_gpu(case(torch.bfloat16))
    wanted = operator(*arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        operator(*arguments)  # the stream's memory and events
        x = torch.zeros_like(arguments[0])
        stream.synchronize()
        with Spin(stream) as spin:
            x.copy_(arguments[0])
            got = operator(x, *arguments[1:])
            x.zero_()
            assert spin.running
        assert torch.equal(got, wanted)


@cases
def test_in_a_cuda_graph(case: Make) -> None:
    operator, _, (x, *rest) = on_gpu(case(torch.bfloat16))
    static = x.clone()
    operator(static, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operator(static, *rest)
    for factor in (1, -2, 0.5):
        static.copy_(x * factor)
        graph.replay()
        assert torch.equal(out, operator(x * factor, *rest))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@cases
def test_under_torch_compile(case: Make, mode: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    operator, _, (x, *rest) = on_gpu(case(torch.bfloat16))
    compiled = torch.compile(lambda x: operator(x.sin(), *rest).cos() + 1, fullgraph=True, mode=mode)
    for i in range(5):
        given = x * (i + 1)
        # sin and cos are computed in float32 and rounded once there
        torch.testing.assert_close(compiled(given), operator(given.sin(), *rest).cos() + 1, rtol=0.02, atol=0.02)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_no_dense_weight_is_made() -> None:
    """A weight of 256 MiB in float32, and of 4 MiB where the activations are."""
    n, k = 8192, 8192
    weight = pack_nvfp4_tiles(codes(n, k // 2).to(torch.uint8)).cuda()
    arguments = (weight, scales(n, k // 16).cuda(), torch.tensor(0.01).cuda())
    x = draw(1, k).to(torch.bfloat16).cuda()
    nvfp4_linear(x, *arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    nvfp4_linear(x, *arguments)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_ids_of_no_expert_are_reported_by_the_next_operator() -> None:
    operator, _, arguments = on_gpu(moe_case(torch.bfloat16))
    wrong = list(arguments)
    wrong[2] = torch.full_like(arguments[2], 99)
    operator(*wrong)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="nvfp4_moe"):
        operator(*arguments)
    operator(*arguments)


def test_the_caller_s_setting_is_left_alone() -> None:
    operator, _, arguments = on_gpu(CASES[0](torch.float32))
    with untorch.stream(0x1230):
        operator(*arguments)
        library: Any = native._library()
        setting = library.untorch_caller_stream_exchange(native._CallerStream(0x1230, 1))
        assert (setting.stream, setting.is_set) == (0x1230, 1)
