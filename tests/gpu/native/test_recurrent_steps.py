"""The steps of recurrent layers on the GPU, against the reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import Opt, call, use_torch_stream
from untorch.ops.recurrent import CELLS
from untorch.ops.recurrent_steps import DTYPES, recurrent_steps

SHIM = "aoti_torch_cuda_recurrent_steps"
# Half types round the result, and behind the persistent kernel's sizes the GEMM's operand at each step.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
Layer = dict[str, Any]


def operands(
    cell: str, steps: int, batch: int, hidden: int, directions: int = 1, dtype: torch.dtype = torch.float32,
    biases: bool = True, ragged: bool = False, seed: int = 0,
) -> Layer:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    gates, scale = CELLS[cell] * hidden, max(hidden, 1) ** -0.5  # as PyTorch's modules have their weights

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).cuda()

    lengths = torch.randint(0, steps + 1, (batch,), generator=generator).cuda() if ragged else None
    return {
        "input_gates": random(steps, batch, directions * gates), "w_hidden": random(directions, gates, hidden, scale=scale),
        "bias_hidden": random(directions, gates, scale=scale) if biases else None,
        "hx": random(directions, batch, hidden), "cx": random(directions, batch, hidden) if cell == "lstm" else None,
        "lengths": lengths, "cell": cell,
    }  # fmt: skip


def run(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    use_torch_stream()
    optional = {"bias_hidden", "cx", "lengths"}
    arguments = [Opt(value) if name in optional else value for name, value in layer.items()]
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = call(SHIM, *arguments, returns=3)
    return found


def verify(layer: Layer) -> None:
    tolerance = TOLERANCE[layer["input_gates"].dtype]
    found = run(layer)
    for got, expected in zip(found, recurrent_steps(**layer), strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape and got.is_contiguous()
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for got, again in zip(found, run(layer), strict=True):
        assert torch.equal(got, again), "the same input gave other bits"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("batch", "hidden"),
    [
        (1, 1), (1, 64), (1, 100), (1, 128), (1, 256), (1, 333), (1, 1024), (2, 20), (3, 64), (4, 256), (5, 20), (8, 64),
        (9, 64), (8, 520), (16, 256), (32, 256), (33, 64), (40, 256), (1, 1500), (3, 2048),
    ],
)  # fmt: skip
def test_sizes(cell: str, batch: int, hidden: int, dtype: torch.dtype) -> None:
    for directions, ragged in ((1, False), (2, True)):
        verify(operands(cell, 5, batch, hidden, directions, dtype, ragged=ragged))


@settings(max_examples=150, deadline=None)
@given(
    cell=st.sampled_from(list(CELLS)), steps=st.integers(0, 40), batch=st.integers(0, 40), hidden=st.integers(1, 300),
    directions=st.sampled_from([1, 2]), dtype=st.sampled_from(DTYPES), biases=st.booleans(), ragged=st.booleans(),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_any_size(**options: Any) -> None:
    verify(operands(**options))


def test_a_long_sequence() -> None:
    for batch in (1, 6, 64):
        layer = operands("gru", 3000, batch, 96, seed=1)
        for got, expected in zip(run(layer), recurrent_steps(**layer), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 8, 40])
def test_operands_that_are_not_contiguous(batch: int) -> None:
    layer = operands("lstm", 6, batch, 32, 2, ragged=True)
    strided = dict(layer)
    for name in ("input_gates", "hx", "cx"):
        strided[name] = layer[name].transpose(0, 1).contiguous().transpose(0, 1)
    strided["w_hidden"] = layer["w_hidden"].transpose(1, 2).contiguous().transpose(1, 2)
    for got, expected in zip(run(strided), run(layer), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("batch", [1, 8, 40])
def test_infinity_and_nan_stay_in_their_row(cell: str, batch: int) -> None:
    layer = operands(cell, 6, batch, 32)
    layer["input_gates"][2, 0, 3] = torch.nan
    layer["input_gates"][1, 0, 5] = torch.inf
    found = run(layer)
    assert found[0][2, 0].isnan().any() and found[1][0, 0].isnan().any()
    for got, expected in zip(found, recurrent_steps(**layer), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("batch", [1, 8, 40])
def test_in_a_graph(batch: int) -> None:
    layer = operands("lstm", 20, batch, 200, 2, ragged=True)
    run(layer)  # what a capture may not do: load kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        found = run(layer)
    for seed in (1, 2):
        other = operands("lstm", 20, batch, 200, 2, ragged=True, seed=seed)
        for name, value in layer.items():
            if isinstance(value, torch.Tensor):
                value.copy_(other[name])
        graph.replay()
        torch.cuda.synchronize()
        for got, expected in zip(found, run(other), strict=True):
            assert torch.equal(got, expected)


def test_streams_side_by_side() -> None:
    """Layers whose CTAs wait for each other, more than the GPU has room for at once."""
    layers = [operands("lstm", 50, 2, 512, seed=seed) for seed in range(4)]
    expected = [run(layer) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    found: list[Any] = [None] * len(layers)
    for _ in range(30):
        for i, (layer, stream) in enumerate(zip(layers, streams, strict=True)):
            with torch.cuda.stream(stream):
                found[i] = run(layer)
    torch.cuda.synchronize()
    use_torch_stream()
    for got, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
