"""_fused_rms_norm and _thnn_fused_lstm_cell on the GPU against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import Opt, call

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 1e-14}


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.cpu().double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None) -> None:
    out, root = call("aoti_torch_cuda__fused_rms_norm", x, shape, Opt(weight), Opt(eps, "double"), returns=2)
    assert out.dtype == x.dtype and out.shape == x.shape and out.is_contiguous()
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    dims = tuple(range(-len(shape), 0))
    exact = x.cpu().double()
    want_root = (exact.square().mean(dims, keepdim=True) + (torch.finfo(compute).eps if eps is None else eps)).rsqrt()
    want = exact * want_root * (1.0 if weight is None else weight.cpu().double())
    assert root.dtype == compute and root.shape == want_root.shape
    close(out, want, x.dtype)
    torch.testing.assert_close(root.cpu().double(), want_root, rtol=1e-6 if compute == torch.float32 else 1e-14, atol=0)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rms_norm(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    lead = draw(st.lists(st.integers(1, 9), max_size=3))
    shape = draw(st.lists(st.sampled_from([1, 3, 8, 64, 100, 128]), min_size=1, max_size=2))
    x = torch.randn(*lead, *shape, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    if lead and draw(st.booleans()):
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    weight = None
    if draw(st.booleans()):
        weight = torch.randn(*shape).to(draw(st.sampled_from([dtype, compute, torch.float16]))).cuda()
    rms_norm(x, shape, weight, draw(st.sampled_from([None, 1e-6, 0.1])))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 1024), (3, 1032), (5, 8192), (2, 8200), (2, 100003)])
def test_rms_norm_widths(dtype: torch.dtype, rows: int, width: int) -> None:
    """What a warp keeps, what a block keeps, and beyond."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    rms_norm(x, [width], torch.randn(width).to(dtype).cuda(), 1e-5)


def test_rms_norm_at_an_odd_address() -> None:
    x = torch.randn(33 * 64 + 1).to(torch.bfloat16).cuda()[1:].view(33, 64)
    rms_norm(x, [64], None, 1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("batch", "hidden"), [(1, 1), (7, 33), (64, 512), (0, 4)])
def test_lstm_cell(dtype: torch.dtype, biased: bool, batch: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(batch, 4 * hidden, generator=generator).to(dtype).cuda() for _ in range(2))
    cell = torch.randn(hidden, batch, generator=generator).to(dtype).cuda().t()
    biases = [torch.randn(4 * hidden, generator=generator).to(dtype).cuda() if biased else None for _ in range(2)]
    h, c, workspace = call("aoti_torch_cuda__thnn_fused_lstm_cell", a, b, cell, *map(Opt, biases), returns=3)
    gates = a.cpu().double() + b.cpu().double() + sum(t.cpu().double() for t in biases if t is not None)
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    want_c = f * cell.cpu().double() + i * g
    close(c, want_c, dtype)
    close(h, o * want_c.tanh(), dtype)
    close(workspace, torch.cat([i, f, g, o], -1), dtype)
