"""Triton attention on the GPU: the operator against float64, and exported models that carry its kernels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import untorch
from tests.gpu.models import exported
from untorch.export import export
from untorch.ops.attention.operator import attention
from untorch.ops.attention.reference import attention_reference

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MASKS = ("none", "none", "bool", "additive", "lowest", "keys", "prefix", "float32")


def tensor(shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str, generator: Any) -> torch.Tensor:
    """[batch, heads, length, width] in one of the layouts that models have."""
    b, h, n, d = shape

    def make(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda", dtype=dtype, generator=generator)

    if layout == "projected":
        return make(b, n, h, d).transpose(1, 2)
    if layout == "packed":  # queries, keys and values of one projection
        return make(b, n, h, 3, d)[:, :, :, 1].transpose(1, 2)
    if layout == "odd":
        return make(b, h, n + 1, d + 3)[:, :, 1:, 2:-1]
    if layout == "columns":
        return make(b, h, d, n).mT
    return make(b, h, n, d)


def mask_of(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, generator: Any) -> torch.Tensor | None:
    seen = torch.rand(shape, device="cuda", generator=generator) > 0.3
    if shape[2] > 1:
        seen[:, :, 0] = False
    values = torch.randn(shape, device="cuda", generator=generator)
    masks: dict[str, Any] = {
        "none": None,
        "bool": seen,
        "additive": torch.where(seen, values, -math.inf).to(dtype),
        # float16's lowest number is not so low that nothing is left of a score that it is added to.
        "lowest": torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        if dtype == torch.float16
        else torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype),
        "keys": seen[:, :1, -1:],
        "prefix": (torch.arange(shape[3], device="cuda") < shape[3] // 3)[None],
        "float32": values[0, :1],
    }
    return masks[kind]


def check(got: torch.Tensor, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None) -> None:
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    expected = attention_reference(q.double(), k.double(), v.double(), wide, causal, scale)
    assert got.dtype == q.dtype and got.transpose(1, 2).is_contiguous()
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(
    dtype=st.sampled_from(list(TOLERANCE)),
    batch=st.integers(1, 3),
    heads_kv=st.integers(1, 3),
    group=st.sampled_from([1, 1, 2, 7]),
    queries=st.sampled_from([1, 2, 8, 17, 128, 200, 515]),
    keys=st.sampled_from([0, 1, 31, 64, 128, 300, 1025, 3000]),
    width=st.sampled_from([8, 40, 64, 80, 128, 192, 256]),
    other_width=st.booleans(),
    mask=st.sampled_from(MASKS),
    causal=st.booleans(),
    scale=st.sampled_from([None, None, 0.3, -0.2]),
    layout=st.sampled_from(["plain", "projected", "packed", "odd", "columns"]),
    seed=st.integers(0, 1000),
)
def test_the_operator(
    dtype: Any, batch: int, heads_kv: int, group: int, queries: int, keys: int, width: int, other_width: bool,
    mask: str, causal: bool, scale: float | None, layout: str, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = heads_kv * group
    q = tensor((batch, heads, queries, width), dtype, layout, generator)
    k = tensor((batch, heads_kv, keys, width), dtype, layout, generator)
    v = tensor((batch, heads_kv, keys, max(8, width - 24) if other_width else width), dtype, layout, generator)
    added = mask_of(mask, (batch, heads, queries, keys), dtype, generator)
    check(attention(q, k, v, added, causal, scale), q, k, v, added, causal, scale)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "heads", "heads_kv", "queries", "keys"), [
    (2, 16, 16, 2048, 2048), (1, 8, 2, 1000, 4097), (300, 1, 1, 130, 130), (1, 5, 1, 4097, 1000),
    (1, 32, 8, 1, 40000), (4, 32, 8, 2, 5000), (200, 8, 2, 1, 300),
])  # fmt: skip
def test_large_ones(width: int, causal: bool, batch: int, heads: int, heads_kv: int, queries: int, keys: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q = tensor((batch, heads, queries, width), torch.bfloat16, "projected", generator)
    k, v = (tensor((batch, heads_kv, keys, width), torch.bfloat16, "projected", generator) for _ in range(2))
    check(attention(q, k, v, None, causal, None), q, k, v, None, causal, None)


@pytest.mark.parametrize("kept", [0, 1, 700, 20000])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("first", [0, 300])
def test_a_cache_that_is_partly_visible(kept: int, kind: str, first: int) -> None:
    """Blocks outside are not read: there are infinities in them, which no mask would hide in a product with zero."""
    generator = torch.Generator("cuda").manual_seed(0)
    q = tensor((2, 8, 1, 128), torch.float16, "plain", generator)
    k, v = (tensor((2, 2, 20000, 128), torch.float16, "plain", generator) for _ in range(2))
    position = torch.arange(20000, device="cuda")
    seen = ((position >= first) & (position < first + kept))[None]
    mask = seen if kind == "bool" else torch.where(seen, 0.0, -math.inf).half()
    got = attention(q, k, v, mask, False, None)
    check(got, q, k, v, mask, False, None)
    blocks = (position >= first + kept + 256) | (position < first - 256)
    v = v.masked_fill(blocks[:, None], math.inf)
    torch.testing.assert_close(attention(q, k, v, mask, False, None), got)


class Layer(nn.Module):
    """Attention with shared keys, as models write it; ``mask`` also when causal is not asked for."""

    def __init__(self, heads: int = 8, heads_kv: int = 2, width: int = 64, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.width, self.causal = heads, heads_kv, width, causal
        self.queries = nn.Linear(128, heads * width)
        self.keys = nn.Linear(128, heads_kv * width)
        self.values = nn.Linear(128, heads_kv * width)
        self.out = nn.Linear(heads * width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q = self.queries(x).view(b, n, self.heads, self.width).transpose(1, 2)
        k = self.keys(x).view(b, n, self.heads_kv, self.width).transpose(1, 2)
        v = self.values(x).view(b, n, self.heads_kv, self.width).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


class Decoder(nn.Module):
    """One step over a cache of fixed length of which ``position`` keys are there."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(k.shape[2], device=k.device)[None, None, None, :] <= position
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def layer(dtype: torch.dtype, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Layer(**options).eval().to(dtype)


def test_a_file_has_the_kernels_in_it(tmp_path: Path) -> None:
    """verify runs it in a process without torch."""
    for dtype in (torch.bfloat16, torch.float32):
        report = export(
            layer(dtype), (torch.randn(2, 300, 128, dtype=dtype),), tmp_path / "a.pt2", device="cuda",
            attention="triton", verify=True, verify_tolerance=2e-2, progress=False,
        )  # fmt: skip
        method = report.methods["forward"]
        assert not [name for name in method.operators if "attention" in name]
        [done] = [p for p in method.passes if p.name == "choose_attention"]
        assert [text.split(":")[1] for text in done.changed] == [" triton"] and done.skipped == {}


@pytest.mark.parametrize("causal", [False, True])
def test_sizes_that_vary(folder: Path, causal: bool) -> None:
    module = layer(torch.float16, causal=causal)
    shapes = ({0: Dim("batch", min=1, max=16), 1: Dim("length", min=1, max=4096)},)
    path = exported(
        folder, f"attention_triton_{causal}", module, (torch.randn(2, 300, 128).half(),), dynamic_shapes=shapes,
        attention="triton",
    )  # fmt: skip
    module = module.cuda()
    with untorch.load(path) as program:
        for batch, length in ((2, 300), (1, 1), (3, 17), (16, 64), (1, 4096), (2, 1023)):
            x = torch.randn(batch, length, 128, device="cuda", dtype=torch.float16)
            got = torch.from_dlpack(program(x))
            with torch.no_grad():
                torch.testing.assert_close(got, module(x), rtol=5e-3, atol=5e-3)


def test_decoding_in_a_graph(folder: Path) -> None:
    """The number of keys varies, so does the number of splits; a graph follows the position."""
    q = torch.randn(2, 8, 1, 128).bfloat16()
    k, v = torch.randn(2, 2, 3000, 128).bfloat16(), torch.randn(2, 2, 3000, 128).bfloat16()
    keys, batch = Dim("keys", min=1, max=1 << 17), Dim("batch", min=1, max=512)
    shapes = ({0: batch}, {0: batch, 2: keys}, {0: batch, 2: keys}, {})
    path = exported(
        folder, "attention_triton_decoding", Decoder(), (q, k, v, torch.tensor([70])), dynamic_shapes=shapes,
        attention="triton",
    )  # fmt: skip
    with untorch.load(path) as program:
        for size, length in ((1, 5), (2, 3000), (1, 100000), (300, 130)):
            args = [
                torch.randn(size, h, n, 128, device="cuda").bfloat16() for h, n in ((8, 1), (2, length), (2, length))
            ]
            position = torch.tensor([length // 2], device="cuda")
            got = torch.from_dlpack(program(*args, position))
            torch.testing.assert_close(got, Decoder()(*args, position), rtol=1.6e-2, atol=1.6e-2)
        args = [t.cuda() for t in (q, k, v)]
        with program.forward.graph(*args, torch.tensor([0], device="cuda")) as graph:
            for at in (0, 70, 2999):
                position = torch.tensor([at], device="cuda")
                got = torch.from_dlpack(graph(*args, position))
                torch.testing.assert_close(got, Decoder()(*args, position), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("choice", ["native", "math"])
def test_the_other_choices(tmp_path: Path, choice: str) -> None:
    report = export(
        layer(torch.float16), (torch.randn(2, 300, 128).half(),), tmp_path / "a.pt2", device="cuda", attention=choice,
        verify=True, verify_tolerance=1e-2, progress=False,
    )  # fmt: skip
    fused = [name for name in report.methods["forward"].operators if "scaled_dot_product" in name]
    assert bool(fused) is (choice == "native")


class WideHeads(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.sin(), k, k * 2, mask, is_causal=self.causal).cos()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "keys", "causal"])
def test_heads_that_triton_does_not_take(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    """By the runtime's kernel, which the file names; a package of another machine has the same call."""
    generator = torch.Generator("cuda").manual_seed(7)
    q, k = (torch.randn(2, 3, n, 320, device="cuda", generator=generator).to(dtype) for n in (9, 33))
    mask = None if kind == "causal" else mask_of(kind, (2, 3, 9, 33), dtype, generator)
    if mask is not None:
        mask = mask.contiguous()
        mask[:, :, 0] = True if mask.dtype == torch.bool else 0.0  # PyTorch's operators do not agree about no keys
    model, args = WideHeads(kind == "causal"), (q, k) if mask is None else (q, k, mask)
    expected = model(*args).float()
    major, minor = torch.cuda.get_device_capability()
    for file, options in (("here.pt2", {}), ("elsewhere.pt2", {"arch": f"sm_{major}{minor}"})):
        given = tuple(arg.cpu() for arg in args) if options else args
        report = export(model, given, tmp_path / file, device="cuda", progress=False, **options)
        [done] = [p for p in report.methods["forward"].passes if p.name == "choose_attention"]
        assert "the runtime's kernel for wide heads" in done.changed[0]
        with untorch.load(tmp_path / file) as program:
            found = torch.from_dlpack(program(*args)).float()
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype] * 4)
