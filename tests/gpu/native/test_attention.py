"""Attention on the GPU against float64 on the CPU: masks, GQA, odd sizes, strides, split-K, packed sequences."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import delete, handle, lib, raise_on, to_torch, use_torch_stream

FLASH, EFFICIENT, CUDNN = (f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
# Kinds of the output slots: t tensor, u undefined tensor, i int64.
SLOTS = {
    FLASH: "ttuuiittt",
    EFFICIENT: "tttt",
    CUDNN: "ttuuiittu",
    "_flash_attention_forward": "ttttt",
    "_flash_attention_forward_v2": "ttttt",
    "_flash_attention_forward_no_dropout_inplace": "t",
    "_flash_attention_forward_no_dropout_inplace_v2": "t",
    "_efficient_attention_forward": "ttttii",
}
HALF = [torch.bfloat16, torch.float16]
# Of values about 1: what rounding the exponentials and the result to the dtype may cost.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-5}


def shim(op: str, *args: Any) -> list[Any]:
    """Calls aoti_torch_cuda_<op>. Tensors are handles, a list of one is an optional tensor (``[None]``: absent), int
    64-bit, bool 32-bit, float double, None a null pointer; a tuple of one is an optional number."""
    owned, keep, c_args = [], [], []
    for arg in args:
        if isinstance(arg, list):
            if arg[0] is None:
                c_args.append(ctypes.c_void_p())
            else:
                owned.append(handle(arg[0]))
                c_args.append(ctypes.byref(owned[-1]))
        elif isinstance(arg, tuple):
            keep.append(ctypes.c_double(arg[0]) if isinstance(arg[0], float) else ctypes.c_int64(arg[0]))
            c_args.append(ctypes.byref(keep[-1]))
        elif isinstance(arg, torch.Tensor):
            owned.append(handle(arg))
            c_args.append(owned[-1])
        elif isinstance(arg, bool):
            c_args.append(ctypes.c_int32(arg))
        elif isinstance(arg, int):
            c_args.append(ctypes.c_int64(arg))
        elif isinstance(arg, float):
            c_args.append(ctypes.c_double(arg))
        else:
            c_args.append(ctypes.c_void_p())
    slots = [ctypes.c_int64() if kind == "i" else ctypes.c_void_p() for kind in SLOTS[op]]
    try:
        raise_on(getattr(lib, f"aoti_torch_cuda_{op}")(*c_args, *map(ctypes.byref, slots)))
        out: list[Any] = []
        for kind, slot in zip(SLOTS[op], slots, strict=True):
            out.append(slot.value if kind == "i" else None if kind == "u" else to_torch(slot))
        return out
    finally:
        for h in owned:
            delete(h)
        for kind, slot in zip(SLOTS[op], slots, strict=True):
            if kind != "i" and slot.value:
                delete(slot)


def optional_scale(scale: float | None) -> tuple[float] | None:
    return None if scale is None else (scale,)


def sdpa(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bias: torch.Tensor | None = None,
    causal: bool = False, scale: float | None = None, lse: bool = True,
) -> list[Any]:  # fmt: skip
    if op == FLASH:
        return shim(op, q, k, v, 0.0, causal, False, optional_scale(scale))
    if op == EFFICIENT:
        return shim(op, q, k, v, [bias], lse, 0.0, causal, optional_scale(scale))
    return shim(op, q, k, v, [bias], lse, 0.0, causal, False, optional_scale(scale))


@dataclass
class Want:
    out: torch.Tensor
    lse: torch.Tensor  # -inf where a row sees no key


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bias: torch.Tensor | None = None, left: int = -1,
    right: int = -1, bottom_right: bool = False, scale: float | None = None,
) -> Want:  # fmt: skip
    """[B, H, L, D] in float64."""
    q, k, v = (t.detach().cpu().double() for t in (q, k, v))
    groups = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.cpu().double()
    rows = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2] if bottom_right else 0)
    columns = torch.arange(k.shape[2])[None, :]
    hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
    if right >= 0:
        hidden |= columns > rows + right
    if left >= 0:
        hidden |= columns < rows - left
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1) if k.shape[2] else torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    return Want(weights @ v, lse)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> None:
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * magnitude, equal_nan=True
    )


def close_lse(got: torch.Tensor, want: torch.Tensor, empty: float) -> None:
    want = torch.where(want == -math.inf, empty, want)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=2e-4)


def like_empty_like(got: torch.Tensor, query: torch.Tensor) -> None:
    assert got.shape == query.shape
    if query.numel():
        assert got.stride() == torch.empty_like(query).stride()


def randoms(dtype: torch.dtype, *shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype).cuda() for shape in shapes]


def check_all(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bias: torch.Tensor | None = None,
    causal: bool = False, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Runs the operator and checks every output; gives the result."""
    got = sdpa(op, q, k, v, bias=bias, causal=causal, scale=scale)
    want = reference(q, k, v, bias=bias, right=0 if causal else -1, bottom_right=op == FLASH, scale=scale)
    close(got[0], want.out, q.dtype)
    batch, heads, queries = q.shape[:3]
    if op == FLASH:
        close_lse(got[1], want.lse, math.inf)
        like_empty_like(got[0], q)
        assert got[4:6] == [queries, k.shape[2]]
        assert got[6].shape == (2,) and got[6].dtype == torch.uint64 and got[7].shape == ()
        assert not got[6].cpu().view(torch.int64).any() and got[7].cpu().view(torch.int64) == 0
        assert got[8].shape == (0,) and got[8].dtype == q.dtype and got[8].is_cuda
    elif op == EFFICIENT:
        assert got[0].stride() == torch.empty(batch, queries, heads, v.shape[-1]).transpose(1, 2).stride()
        padded = (queries + 31) // 32 * 32
        assert got[1].shape == (batch, heads, padded)
        close_lse(got[1][..., :queries], want.lse, 0.0)
        assert bool((got[1][..., queries:] == math.inf).all())
        assert not got[2].is_cuda and got[2].dtype == torch.int64 and got[3].item() == 0
    else:
        close_lse(got[1][..., 0], want.lse, -math.inf)
        assert got[4:6] == [queries, k.shape[2]]
        if v.shape[-1] == q.shape[-1]:
            like_empty_like(got[0], q)
    return got[0]


CASES = [(op, dtype) for op in (FLASH, CUDNN) for dtype in HALF] + [(EFFICIENT, dtype) for dtype in TOLERANCE]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [8, 32, 40, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_widths(op: str, dtype: torch.dtype, width: int, causal: bool) -> None:
    """Enough blocks for the tiles of 128 rows, and a tail in queries and keys."""
    q, k, v = randoms(dtype, (12, 12, 133, width), (12, 12, 261, width), (12, 12, 261, width), seed=width)
    check_all(op, q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_few_blocks(op: str, dtype: torch.dtype, width: int, causal: bool) -> None:
    """Tiles of 64 rows, and the keys split over blocks."""
    q, k, v = randoms(dtype, (1, 2, 70, width), (1, 2, 1000, width), (1, 2, 1000, width), seed=width)
    check_all(op, q, k, v, causal=causal)


WIDE = [(EFFICIENT, dtype) for dtype in TOLERANCE]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1024, 512), (2, 3, 70, 264), (1, 2, 5, 500)])
@pytest.mark.parametrize(("op", "dtype"), WIDE)
def test_heads_wider_than_256(op: str, dtype: torch.dtype, shape: tuple[int, ...], causal: bool) -> None:
    """The attention of a diffusion VAE has one head of 512."""
    q, k, v = randoms(dtype, shape, shape, shape, seed=sum(shape))
    check_all(op, q, k, v, causal=causal)


@pytest.mark.parametrize("keys", [40, 128, 300])
@pytest.mark.parametrize("width", [128, 256, 512])
def test_few_blocks_in_float32(width: int, keys: int) -> None:
    """The keys are split by the tile."""
    q, k, v = randoms(torch.float32, (1, 4, 128, width), (1, 4, keys, width), (1, 4, keys, width), seed=keys)
    check_all(EFFICIENT, q, k, v)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    draw = data.draw
    op, dtype = draw(st.sampled_from(CASES))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * (1 if op == EFFICIENT else draw(st.sampled_from([1, 2, 5])))
    batch, queries, keys = draw(st.integers(1, 3)), draw(st.integers(1, 300)), draw(st.integers(1, 700))
    width = draw(st.integers(1, 256))
    value_width = width if op == FLASH else draw(st.sampled_from([width, 1, 64, 100, 256]))
    shapes = [(batch, heads, queries, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, value_width)]
    operands = []
    for i, shape in enumerate(shapes):
        layout = draw(st.sampled_from(["dense", "rows first", "padded", "last not 1", "offset"]))
        b, h, n, d = shape
        (x,) = randoms(dtype, shape, seed=i)
        if layout == "rows first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "padded":
            room = torch.full((b, h, n, d + 8), math.nan, dtype=dtype, device="cuda")
            room[..., :d] = x
            x = room[..., :d]
        elif layout == "last not 1":
            x = x.transpose(2, 3).contiguous().transpose(2, 3)
        elif layout == "offset":
            room = torch.full((x.numel() + 1,), math.nan, dtype=dtype, device="cuda")
            room[1:] = x.flatten()
            x = room[1:].view(shape)
        operands.append(x)
    bias = None
    if op != FLASH and draw(st.booleans()):
        sizes = [draw(st.sampled_from([1, n])) for n in (batch, heads, queries, keys)]
        (bias,) = randoms(dtype, tuple(sizes), seed=7)
        if draw(st.booleans()):
            bias = bias.masked_fill(
                torch.rand(sizes, generator=torch.Generator().manual_seed(3)).cuda() < 0.4, -math.inf
            )
        bias = bias.expand(batch, heads, queries, keys) if draw(st.booleans()) else bias
    scale = draw(st.sampled_from([None, 0.3, -0.2, 0.0]))
    check_all(op, *operands, bias=bias, causal=draw(st.booleans()), scale=scale)


@pytest.mark.parametrize(("op", "dtype"), [case for case in CASES if case[0] != FLASH])
@pytest.mark.parametrize("aligned", [True, False])
def test_bias_as_compiled_code_pads_it(op: str, dtype: torch.dtype, aligned: bool) -> None:
    """Rows padded to eight elements and sliced, broadcast over the heads; keys of odd number."""
    q, k, v = randoms(dtype, (9, 16, 140, 64), (9, 16, 77, 64), (9, 16, 77, 64))
    (room,) = randoms(dtype, (9, 1, 140, 80 if aligned else 79))
    bias = room[..., :77].expand(9, 16, 140, 77)
    check_all(op, q, k, v, bias=bias)
    check_all(op, q, k, v, bias=bias, causal=True)
    check_all(op, q[:, :, :3], k, v, bias=bias[:, :, :3])


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_rows_that_see_nothing(op: str, dtype: torch.dtype) -> None:
    q, k, v = randoms(dtype, (2, 2, 200, 64), (2, 2, 90, 64), (2, 2, 90, 64))
    if op == FLASH:  # the diagonal ends bottom right: the first 110 rows see no key
        got = check_all(op, q, k, v, causal=True)
        assert not got[:, :, :110].any()
        return
    bias = torch.zeros(2, 1, 200, 90, dtype=dtype, device="cuda")
    bias[1, 0, 17] = -math.inf
    bias[0, 0, 130:] = -math.inf
    got = check_all(op, q, k, v, bias=bias)
    assert not got[1, :, 17].any() and not got[0, :, 130:].any()


@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize(
    "sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (1, 1, 1, 1), (1, 70000, 1, 3), (70000, 1, 2, 1)]
)
def test_sizes_at_the_edge(op: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    batch, heads, queries, keys = sizes
    q, k, v = randoms(dtype, (batch, heads, queries, 16), (batch, heads, keys, 16), (batch, heads, keys, 16))
    check_all(op, q, k, v)


@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize(("queries", "keys"), [(1, 4096), (1, 40001), (3, 70000), (64, 9000)])
def test_decoding(op: str, dtype: torch.dtype, queries: int, keys: int) -> None:
    """Few queries over long keys: the keys are split, and query heads share a tile."""
    heads = 4 if op == EFFICIENT else 16
    q, k, v = randoms(dtype, (1, heads, queries, 128), (1, 4, keys, 128), (1, 4, keys, 128))
    q[:, :, 0, :8] *= 6
    first = check_all(op, q, k, v)
    for _ in range(3):
        assert torch.equal(sdpa(op, q, k, v)[0], first)
    check_all(op, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", HALF)
def test_many_query_heads_share_a_tile(dtype: torch.dtype) -> None:
    q, k, v = randoms(dtype, (2, 96, 3, 64), (2, 1, 300, 64), (2, 1, 300, 64))
    check_all(FLASH, q, k, v, causal=True)
    check_all(CUDNN, q, k, v, causal=True)
    (bias,) = randoms(dtype, (1, 96, 1, 300))
    check_all(CUDNN, q, k, v, bias=bias)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_deterministic(op: str, dtype: torch.dtype) -> None:
    q, k, v = randoms(dtype, (2, 8, 1000, 64), (2, 8, 1000, 64), (2, 8, 1000, 64))
    first = sdpa(op, q, k, v, causal=True)
    for _ in range(5):
        again = sdpa(op, q, k, v, causal=True)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_nan_and_infinity(op: str, dtype: torch.dtype) -> None:
    """A NaN reaches its own row alone (or, in value, its column); large scores do not overflow."""
    q, k, v = randoms(dtype, (1, 2, 80, 64), (1, 2, 100, 64), (1, 2, 100, 64))
    q[0, 0, 5, 3] = math.nan
    v[0, 1, 9, 2] = math.nan
    got, want = sdpa(op, q, k, v)[0], reference(q, k, v)
    assert torch.equal(got.cpu().isnan(), want.out.isnan())
    q, k, v = randoms(dtype, (1, 1, 64, 64), (1, 1, 64, 64), (1, 1, 64, 64))
    q, k = q * 30, k * 30
    assert sdpa(op, q, k, v)[0].isfinite().all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", [64, 128])
def test_many_tiles_causal(dtype: torch.dtype, width: int) -> None:
    q, k, v = randoms(dtype, (1, 3, 3000, width), (1, 3, 3000, width), (1, 3, 3000, width))
    check_all(FLASH, q, k, v, causal=True)
    check_all(CUDNN, q[:, :, :2000], k, v, causal=True)


def test_packed_projection() -> None:
    """Query, key and value as slices of one projection, as models make them."""
    (x,) = randoms(torch.bfloat16, (3, 130, 3 * 4 * 64))
    q, k, v = (t.reshape(3, 130, 4, 64).transpose(1, 2) for t in x.split(4 * 64, -1))
    assert q.stride() == (130 * 768, 64, 768, 1)
    for op in (FLASH, EFFICIENT, CUDNN):
        check_all(op, q, k, v, causal=True)


# The WGMMA kernel of compute capability 9.0: more than 64 queries, no bias. On other GPUs the same tests hold.

WGMMA_SHAPES = [
    (4, 16, 4096, 128), (2, 32, 2048, 64), (1, 20, 1500, 64), (1, 12, 197, 64), (16, 16, 512, 64), (1, 8, 128, 128),
    (2, 6, 1000, 96), (2, 5, 900, 192), (2, 8, 1300, 256), (64, 12, 128, 64), (24, 12, 256, 64), (8, 12, 1100, 64),
    (5, 11, 1500, 64), (5, 16, 384, 128), (3, 16, 1000, 128),
]  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", WGMMA_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_prefill(dtype: torch.dtype, shape: tuple[int, ...], causal: bool) -> None:
    """Heads split out of a projection, as models have them; several tiles a CTA; the same bits every time. Three heads
    are compared."""
    batch, heads, length, width = shape
    q, k, v = (t.transpose(1, 2) for t in randoms(dtype, *[(batch, length, heads, width)] * 3, seed=length))
    got = {op: sdpa(op, q, k, v, causal=causal) for op in (FLASH, EFFICIENT, CUDNN)}
    for i in range(3):
        at = (i * 5 + length) % batch, (i * 11 + length) % heads
        want = reference(*(t[at][None, None] for t in (q, k, v)), right=0 if causal else -1)
        for out, lse, *_ in got.values():
            close(out[at], want.out[0, 0], dtype)
            close_lse(lse[at].reshape(-1)[:length], want.lse[0, 0], 0.0)
    for _ in range(10):
        again = sdpa(FLASH, q, k, v, causal=causal)
        assert torch.equal(again[0], got[FLASH][0]) and torch.equal(again[1], got[FLASH][1])


@pytest.mark.parametrize("keys", [70, 400, 1000])
@pytest.mark.parametrize("queries", [600, 706])
@pytest.mark.parametrize("op", [FLASH, EFFICIENT, CUDNN])
def test_causal_row_blocks_that_begin_before_the_first_row(op: str, queries: int, keys: int) -> None:
    """Of 192 rows, for heads of 64: the incomplete one comes first. The diagonal ends in the corner, or begins there."""
    (q,) = randoms(torch.bfloat16, (16, 12, queries, 64), seed=1)
    k, v = randoms(torch.bfloat16, *[(16, 12, keys, 64)] * 2, seed=2)
    out, lse, *_ = sdpa(op, q, k, v, causal=True)
    want = reference(q, k, v, right=0, bottom_right=op == FLASH)
    close(out, want.out, torch.bfloat16)
    empty = {FLASH: math.inf, EFFICIENT: 0.0, CUDNN: -math.inf}[op]
    close_lse(lse.reshape(16, 12, -1)[..., :queries], want.lse, empty)
    if op == EFFICIENT:
        assert bool((lse[..., queries:] == math.inf).all())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_prefill_of_any_shape(data: st.DataObject) -> None:
    """Odd lengths and widths, shared key heads, strides, batches that repeat, both alignments of the diagonal."""
    draw = data.draw
    op, dtype = draw(st.sampled_from([FLASH, EFFICIENT, CUDNN])), draw(st.sampled_from(HALF))
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * (1 if op == EFFICIENT else draw(st.sampled_from([1, 2, 3])))
    batch, queries, keys = draw(st.integers(1, 3)), draw(st.integers(65, 700)), draw(st.integers(1, 900))
    width = draw(st.one_of(st.sampled_from([64, 96, 128, 192, 256]), st.integers(1, 256)))
    value_width = width if op == FLASH else draw(st.sampled_from([width, 8, 64, 100, 256]))
    operands = []
    for i, (h, n, d) in enumerate([(heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, value_width)]):
        layout = draw(st.sampled_from(["dense", "rows first", "padded", "one batch", "one head"]))
        if layout == "rows first":
            x = randoms(dtype, (batch, n, h, d), seed=i)[0].transpose(1, 2)
        elif layout == "padded":
            room = torch.full((batch, h, n + 3, (d + 15) // 8 * 8), math.nan, dtype=dtype, device="cuda")
            room[:, :, :n, :d] = randoms(dtype, (batch, h, n, d), seed=i)[0]
            x = room[:, :, :n, :d]
        elif layout == "one batch":
            x = randoms(dtype, (1, h, n, d), seed=i)[0].expand(batch, h, n, d)
        elif layout == "one head":
            x = randoms(dtype, (batch, 1, n, d), seed=i)[0].expand(batch, h, n, d)
        else:
            (x,) = randoms(dtype, (batch, h, n, d), seed=i)
        operands.append(x)
    scale = draw(st.sampled_from([None, 0.3, 2.0]))
    q, k, v = operands
    got = sdpa(op, q, k, v, causal=(causal := draw(st.booleans())), scale=scale)
    want = reference(q, k, v, right=0 if causal else -1, bottom_right=op == FLASH, scale=scale)
    close(got[0], want.out, dtype)
    empty = {FLASH: math.inf, EFFICIENT: 0.0, CUDNN: -math.inf}[op]
    close_lse(got[1].reshape(batch, heads, -1)[..., :queries], want.lse, empty)
    if op == EFFICIENT:
        assert bool((got[1][..., queries:] == math.inf).all())


def kernels(op: str, *operands: torch.Tensor, **options: Any) -> str:
    """The names of the kernels that the operator launches."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    sdpa(op, *operands, **options)
    with torch.profiler.profile(activities=activities) as profile:
        sdpa(op, *operands, **options)
        torch.cuda.synchronize()
    return " ".join(event.name for event in profile.events())


@pytest.mark.parametrize("op", [FLASH, EFFICIENT, CUDNN])
def test_which_kernel_serves(op: str) -> None:
    """WGMMA where the GPU and the problem allow it, mma.sync for everything else."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    q, k, v = randoms(torch.bfloat16, *[(1, 4, 1000, 64)] * 3)
    ran = kernels(op, q, k, v, causal=True)
    assert ("flash_attention_wgmma" in ran) is hopper and ("flash_attention_mma" in ran) is not hopper
    others = [kernels(op, q[:, :, :64], k, v), kernels(op, q, k, v, scale=-1.0)]
    if op != FLASH:
        others.append(kernels(op, q, k, v, bias=torch.zeros(1000, 1000, dtype=q.dtype, device="cuda")))
    for ran in others:
        assert "flash_attention_mma" in ran and "wgmma" not in ran


def test_without_log_sum_exp() -> None:
    q, k, v = randoms(torch.float32, (2, 2, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16))
    got = sdpa(EFFICIENT, q, k, v, lse=False)
    assert got[1].shape == (2, 2, 0)
    close(got[0], reference(q, k, v).out, torch.float32)
    for length in (5, 300):
        q, k, v = randoms(torch.float16, (2, 2, length, 64), (2, 2, 7, 64), (2, 2, 7, 64))
        got = sdpa(CUDNN, q, k, v, lse=False)
        assert got[1].shape == (2, 2, length, 1)
        close(got[0], reference(q, k, v).out, torch.float16)


# The operators below: [batch, length, heads, width].


def flash_forward(q: Any, k: Any, v: Any, *, out: Any = None, v2: bool = True, **given: Any) -> list[Any]:
    causal, ints = given.get("causal", False), given.get
    numbers = [None if ints(name) is None else (ints(name),) for name in ("scale", "left", "right")]
    args = [q, k, v, [ints("cum_q")], [ints("cum_k")], ints("max_q", q.shape[1]), ints("max_k", k.shape[1]), 0.0]
    args += [causal, False, *numbers, [ints("used_k")], [None]]
    if out is None:
        return (
            shim("_flash_attention_forward_v2", *args, [None], None) if v2 else shim("_flash_attention_forward", *args)
        )
    name = "_flash_attention_forward_no_dropout_inplace"
    return shim(f"{name}_v2", out, *args, [None], None) if v2 else shim(name, out, *args, [None])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(
    ("left", "right", "causal"), [(None, None, False), (20, 5, False), (33, None, True), (0, 0, False)]
)
def test_flash_forward(dtype: torch.dtype, v2: bool, left: int | None, right: int | None, causal: bool) -> None:
    q, k, v = randoms(dtype, (2, 150, 6, 64), (2, 310, 2, 64), (2, 310, 2, 64))
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    want = reference(
        *heads_first, left=-1 if left is None else left, right=0 if causal else -1 if right is None else right,
        bottom_right=True,
    )  # fmt: skip
    got = flash_forward(q, k, v, v2=v2, left=left, right=right, causal=causal)
    close(got[0].transpose(1, 2), want.out, dtype)
    like_empty_like(got[0], q)
    close_lse(got[1], want.lse, math.inf)
    room = torch.full((2, 150, 6, 80), 7.0, dtype=dtype, device="cuda")
    lse = flash_forward(q, k, v, out=room[..., :64], v2=v2, left=left, right=right, causal=causal)[0]
    close(room[..., :64].transpose(1, 2), want.out, dtype)
    assert bool((room[..., 64:] == 7).all())
    close_lse(lse, want.lse, math.inf)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_flash_forward_packed(dtype: torch.dtype, causal: bool) -> None:
    lengths_q, lengths_k = [5, 0, 200, 64, 1], [9, 4, 130, 0, 300]
    q, k, v = randoms(dtype, (sum(lengths_q), 4, 64), (sum(lengths_k), 2, 64), (sum(lengths_k), 2, 64))
    ends = [torch.tensor([0, *lengths]).cumsum(0).int().cuda() for lengths in (lengths_q, lengths_k)]
    got = flash_forward(q, k, v, cum_q=ends[0], cum_k=ends[1], max_q=200, max_k=300, causal=causal)
    assert got[0].shape == q.shape and got[1].shape == (4, sum(lengths_q))
    for n_q, n_k, at_q, at_k in zip(lengths_q, lengths_k, ends[0].tolist(), ends[1].tolist(), strict=False):
        one = [t[None, at : at + n].transpose(1, 2) for t, at, n in ((q, at_q, n_q), (k, at_k, n_k), (v, at_k, n_k))]
        if n_q == 0:
            continue
        want = reference(*one, right=0 if causal else -1, bottom_right=True)
        close(got[0][None, at_q : at_q + n_q].transpose(1, 2), want.out, dtype)
        close_lse(got[1][None, :, at_q : at_q + n_q], want.lse, math.inf)


def test_flash_forward_used_keys() -> None:
    q, k, v = randoms(torch.bfloat16, (3, 4, 8, 64), (3, 500, 2, 64), (3, 500, 2, 64))
    used = torch.tensor([500, 77, 0], dtype=torch.int32).cuda()
    got = flash_forward(q, k, v, used_k=used, causal=True)
    for i, n in enumerate(used.tolist()):
        one = [t[i : i + 1].transpose(1, 2) for t in (q, k[:, :n], v[:, :n])]
        want = reference(*one, right=0, bottom_right=True)
        close(got[0][i : i + 1].transpose(1, 2), want.out, torch.bfloat16)
        close_lse(got[1][i : i + 1], want.lse, math.inf)


@pytest.mark.parametrize("mask", [0, 1, 2])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_efficient_forward(dtype: torch.dtype, mask: int) -> None:
    q, k, v = randoms(dtype, (2, 70, 3, 40), (2, 130, 3, 40), (2, 130, 3, 24))
    (bias,) = randoms(dtype, (2, 3, 70, 130))
    op = "_efficient_attention_forward"
    got = shim(op, q, k, v, [bias], [None], [None], None, None, 0.0, mask, True, (0.25,), [None], None)
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    want = reference(*heads_first, bias=bias, right=0 if mask else -1, bottom_right=mask == 2, scale=0.25)
    assert got[0].is_contiguous() and got[4:] == [70, 130]
    close(got[0].transpose(1, 2), want.out, dtype)
    assert got[1].shape == (2, 3, 96)
    close_lse(got[1][..., :70], want.lse, 0.0)
    assert bool((got[1][..., 70:] == math.inf).all())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_efficient_forward_packed(dtype: torch.dtype) -> None:
    lengths_q, lengths_k = [5, 0, 100], [9, 4, 130]
    q, k, v = randoms(dtype, (1, 105, 2, 64), (1, 143, 2, 64), (1, 143, 2, 64))
    ends = [torch.tensor([0, *lengths]).cumsum(0).int().cuda() for lengths in (lengths_q, lengths_k)]
    op = "_efficient_attention_forward"
    got = shim(op, q, k, v, [None], [ends[0]], [ends[1]], (100,), (130,), 0.0, 1, True, None, [None], None)
    assert got[1].shape == (3, 2, 128) and got[4:] == [100, 130]
    for i, (n_q, n_k, at_q, at_k) in enumerate(
        zip(lengths_q, lengths_k, ends[0].tolist(), ends[1].tolist(), strict=False)
    ):
        assert bool((got[1][i, :, n_q:] == math.inf).all())
        one = [t[:, at : at + n].transpose(1, 2) for t, at, n in ((q, at_q, n_q), (k, at_k, n_k), (v, at_k, n_k))]
        want = reference(*one, right=0)
        close(got[0][:, at_q : at_q + n_q].transpose(1, 2), want.out, dtype)
        close_lse(got[1][i : i + 1, :, :n_q], want.lse, 0.0)


@pytest.mark.parametrize("op", [FLASH, EFFICIENT, CUDNN])
def test_against_torch(op: str) -> None:
    """The same operator of torch, where this build of it has one: shapes, strides and values."""
    q, k, v = randoms(torch.bfloat16, (2, 4, 96, 64), (2, 4, 96, 64), (2, 4, 96, 64))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    try:
        if op == FLASH:
            want = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)
        elif op == EFFICIENT:
            want = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, is_causal=True)
        else:
            want = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, is_causal=True)
    except RuntimeError as error:
        pytest.skip(f"torch: {error}")
    got = sdpa(op, q, k, v, causal=True)
    assert got[0].shape == want[0].shape and got[0].stride() == want[0].stride()
    torch.testing.assert_close(got[0], want[0], rtol=2e-2, atol=2e-2)
    if op != CUDNN:
        assert got[1].shape == want[1].shape and got[1].stride() == want[1].stride()
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize("queries", [1, 300])
def test_in_a_cuda_graph(op: str, dtype: torch.dtype, queries: int) -> None:
    """Captured once and replayed on new contents; with split keys (one query) and without."""
    q, k, v = randoms(dtype, (1, 4, queries, 64), (1, 4, 4000, 64), (1, 4, 4000, 64))
    out: list[Any] = []
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        use_torch_stream()
        sdpa(op, q, k, v)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        use_torch_stream()
        out = sdpa(op, q, k, v)
    use_torch_stream()
    for seed in (1, 2):
        for t, fresh in zip((q, k, v), randoms(dtype, q.shape, k.shape, v.shape, seed=seed), strict=True):
            t.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        close(out[0], reference(q, k, v).out, dtype)
