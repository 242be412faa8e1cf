"""The linear layers of a decoder between two attentions on the GPU, against the reference in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.native.again import run_again
from tests.native.decoder_layers import operands
from untorch.ops.decoder_linears import OPERATOR, decoder_linears_reference

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Inputs of o, the residual stream, the MLP, and q, k and v.
SIZES = {
    "Qwen3-0.6B": (2048, 1024, 3072, 4096), "Llama-3.2-1B": (2048, 2048, 8192, 3072),
    "Qwen3-4B": (4096, 2560, 9728, 6144), "Qwen3-8B": (4096, 4096, 12288, 6144),
}  # fmt: skip
TOKENS = (1, 2, 7, 300)
# Of the largest value: each layer's result is rounded before it is the next one's input.
TOLERANCE = {BF16: 2e-2, F16: 3e-3, F32: 1e-5}
Given = dict[str, Any]


def layers(name: str, group: int, dtype: torch.dtype = BF16, tokens: int = max(TOKENS), **options: Any) -> Given:
    return operands(tokens, *SIZES[name], dtype, group, device="cuda", **{"bias": True, "seed": 1} | options)


def first(given: Given, tokens: int) -> Given:
    return given | {name: given[name][:tokens] for name in ("x", "residual")}


def without(given: Given, *names: str) -> Given:
    return given | dict.fromkeys(names)


def verify(given: Given) -> None:
    for found, expected in zip(OPERATOR(**given), decoder_linears_reference(**given), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape and found.is_contiguous()
        largest = float(expected.abs().max())
        tolerance = TOLERANCE[found.dtype]
        torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("group", [0, 32, 64, 128, 256])
@pytest.mark.parametrize("name", list(SIZES))
def test_values(name: str, group: int, dtype: torch.dtype) -> None:
    given = layers(name, group, dtype)
    for tokens in TOKENS:
        verify(first(given, tokens))
        verify(first(without(given, "next_bias"), tokens))
        verify(first(without(given, "next_weight", "next_scales", "next_bias"), tokens))


@pytest.mark.parametrize(
    ("ko", "width", "inner", "n", "group"),
    [
        (256, 256, 256, 16, 0), (256, 512, 264, 24, 0), (48, 40, 24, 8, 0), (13, 7, 5, 3, 0), (128, 128, 128, 8, 32),
        (8192, 8192, 1024, 10240, 128), (2048, 3584, 18944, 4608, 64), (8192, 256, 256, 256, 256),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
def test_other_sizes(ko: int, width: int, inner: int, n: int, group: int, tokens: int) -> None:
    for dtype in (BF16, F16, F32):
        given = operands(tokens, ko, width, inner, n, dtype, group, device="cuda", bias=True)
        if tokens == 0:
            assert [tuple(result.shape) for result in OPERATOR(**given)] == [(0, n), (0, width)]
            continue
        verify(given)


@pytest.mark.parametrize("tokens", [3, 17])
def test_memory_that_each_kernel_writes_anew(tokens: int) -> None:
    """Layers so small that kernels start while the one before the last one runs: none reads an old line of L1."""
    given = operands(tokens, 48, 40, 24, 8, BF16, 0, device="cuda", bias=True)
    expected = OPERATOR(**given)
    verify(given)
    others = [given | {"x": torch.randn_like(given["x"])} for _ in range(4)]
    for turn in range(400):
        OPERATOR(**others[turn % 4])
        for found, wanted in zip(OPERATOR(**given), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("tiles", [2, 4, 8])
@pytest.mark.parametrize("scales", [F32, F16, BF16])
def test_layouts_and_scales(tiles: int, scales: torch.dtype) -> None:
    """Those that the kernel for one token does not take, too."""
    given = layers("Qwen3-0.6B", 64, inner_k_tiles=tiles, scales_dtype=scales)
    for tokens in (1, 7):
        verify(first(given, tokens))


def test_memory_that_is_not_aligned() -> None:
    given = first(layers("Qwen3-0.6B", 0), 1)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)

    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            verify(given | {name: moved(value)})


def test_special_values() -> None:
    """One token's NaN and infinities are its own."""
    given = first(layers("Qwen3-0.6B", 0), 7)
    clean = OPERATOR(**given)
    x = given["x"].clone()
    x[2, 5], x[4, 7] = torch.nan, torch.inf
    for found, expected in zip(OPERATOR(**(given | {"x": x})), clean, strict=True):
        rows = [0, 1, 3, 5, 6]
        assert torch.equal(found[rows], expected[rows]) and not found[[2, 4]].isfinite().any()
    alone = first(given, 1) | {"x": x[2:3]}
    assert all(result.isnan().all() for result in OPERATOR(**alone))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B"])
def test_the_same_bits_in_a_graph(name: str, group: int, tokens: int) -> None:
    """Captured once, replayed fifty times, with other values too."""
    given = first(layers(name, group), tokens)
    expected = OPERATOR(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = OPERATOR(**given)
    for _ in range(50):
        for result in results:
            result.zero_()
        graph.replay()
        assert all(map(torch.equal, results, expected))
    given["x"].mul_(0.5)
    expected = OPERATOR(**given)
    graph.replay()
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("group", [0, 64])
def test_replays_behind_each_other(group: int) -> None:
    """Of a chain of layers, each of which waits for the one before it."""
    given = first(layers("Llama-3.2-1B", group), 1)
    width = given["residual"].shape[1]

    def chain() -> torch.Tensor:
        out, stream = OPERATOR(**given)
        for _ in range(5):
            out, stream = OPERATOR(**(given | {"x": out[:, :width].tanh(), "residual": stream.tanh()}))
        return out

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("group", [0, 128])
def test_on_streams_at_once(group: int, tokens: int) -> None:
    """Kernels that need the whole GPU at the same time must not wait for each other."""
    inputs = [first(layers("Qwen3-4B", group, tokens=8, seed=seed), tokens) for seed in (1, 2)]
    expected = [OPERATOR(**given) for given in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in inputs]
    for _ in range(20):
        for stream, given, results in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(OPERATOR(**given))
    torch.cuda.synchronize()
    for results, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, wanted, strict=True))


def test_one_layer_after_the_other() -> None:
    """The same without the kernel for one token."""
    run_again(__file__, "(test_values and Qwen3) or other_sizes or graph", DECODER_LINEARS=0)
