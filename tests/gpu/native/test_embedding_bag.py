"""_embedding_bag on the GPU against torch's CUDA operator: all four results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.faults import fault_of
from tests.native.shim import I32, Opt, call

NAMES = ["aoti_torch_cuda__embedding_bag", "aoti_torch_cuda__embedding_bag_forward_only"]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_all_results(data: st.DataObject) -> None:
    draw = data.draw
    mode = draw(st.integers(0, 2))
    width, count = draw(st.integers(1, 70)), draw(st.integers(0, 60))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16]))
    kind = draw(st.sampled_from([torch.int64, torch.int32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    weight = torch.randn(11, width, generator=generator).to(dtype).cuda()
    if draw(st.booleans()):
        weight = weight.t().contiguous().t()
    indices = torch.randint(0, 11, (count,), generator=generator).to(kind).cuda()
    bags = draw(st.integers(1, 8))
    offsets = torch.cat([torch.zeros(1), torch.randint(0, count + 1, (bags - 1,), generator=generator).sort().values])
    offsets = offsets.to(kind).cuda()
    last = draw(st.booleans())
    if last:
        offsets = torch.cat([offsets, torch.full((1,), count, dtype=kind, device="cuda")])
    padding = draw(st.sampled_from([-1, 3]))
    scales = torch.rand(count, generator=generator).to(dtype).cuda() if mode == 0 and draw(st.booleans()) else None
    want = torch.ops.aten._embedding_bag(weight, indices, offsets, False, mode, False, scales, last, padding)
    name = draw(st.sampled_from(NAMES))
    got = call(name, weight, indices, offsets, I32(0), mode, I32(0), Opt(scales), I32(last), padding, returns=4)
    tolerance = 1e-2 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[2][: len(offsets) - last], want[2][: len(offsets) - last]) and got[2].shape == want[2].shape
    assert torch.equal(got[3], want[3])


def test_large() -> None:
    weight = torch.randn(100_000, 128)
    indices = torch.randint(0, 100_000, (200_000,))
    offsets = torch.arange(0, 200_000, 40)
    want = torch.nn.functional.embedding_bag(indices, weight.double(), offsets, mode="mean")
    args = (weight.cuda(), indices.cuda(), offsets.cuda(), I32(0), 1, I32(0), Opt(None), I32(0), -1)
    got = call(NAMES[0], *args, returns=4)[0]
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got, call(NAMES[0], *args, returns=4)[0])


@pytest.mark.parametrize(("indices", "offsets", "text"), [
    ([0, 9, 1], [0, 2], "_embedding_bag: index 9 is outside of the table's rows"),
    ([0, -1, 1], [0, 2], "_embedding_bag: index -1 is outside of the table's rows"),
    ([0, 1, 1], [0, 7], "_embedding_bag: argument 'offsets' holds 7, which decreases or lies beyond the indices"),
])  # fmt: skip
def test_faults_are_reported(indices: list[int], offsets: list[int], text: str) -> None:
    weight = torch.ones(5, 3, device="cuda")
    arguments = (torch.tensor(indices).cuda(), torch.tensor(offsets).cuda(), I32(0), 0, I32(0), Opt(None), I32(0), -1)
    assert text in fault_of(NAMES[0], weight, *arguments, returns=4)
