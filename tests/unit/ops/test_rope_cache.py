"""untorch::rope_cache_triton: the reference against transformers' functions, the kernel in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreter import INTERPRETED, run_interpreted
from untorch.ops.attention.rope_operator import OPERATOR, launch_rope_cache, rotated
from untorch.ops.kv_pages import Pages, block_elements

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
KV = [None, torch.int8, torch.float8_e4m3fn]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
compiling = pytest.mark.skipif(INTERPRETED, reason="Triton interprets")


def arguments(
    tokens: int = 5, heads: int = 4, heads_kv: int = 2, width: int = 16, width_v: int = 16, rotary: int | None = None,
    norms: tuple[bool, bool] = (True, True), interleaved: bool = False, dtype: torch.dtype = torch.float32,
    kv: torch.dtype | None = None, block: int = 16, seed: int = 0, one_tensor: bool = False, offset: int = 32,
) -> dict[str, Any]:  # fmt: skip
    """Of the operator. one_tensor: q, k and v are slices of one result."""
    g = torch.Generator().manual_seed(seed)
    sizes = (heads * width, heads_kv * width, heads_kv * width_v)
    if one_tensor:
        parts = torch.randn(tokens, sum(sizes), generator=g).to(dtype).split(sizes, -1)
    else:
        parts = tuple(torch.randn(tokens, size, generator=g).to(dtype) for size in sizes)
    q, k, v = (x.view(tokens, n, -1) for x, n in zip(parts, (heads, heads_kv, heads_kv), strict=True))
    rotary = width if rotary is None else rotary
    blocks = -(-tokens // block) + 2
    elements = offset + block_elements(kv or dtype, heads_kv, block, width, width_v) + (0 if kv is None else 16)
    pool = torch.randn(blocks, elements, generator=g)
    slots = torch.randperm(blocks * block, generator=g)[:tokens]
    weights = [torch.randn(width, generator=g).to(dtype) if has else None for has in norms]
    return {
        "q": q, "k": k, "v": v, "q_weight": weights[0], "k_weight": weights[1],
        "cos": torch.randn(tokens, rotary, generator=g).to(dtype), "sin": torch.randn(tokens, rotary, generator=g).to(dtype),
        "pool": pool.to(dtype) if kv is None else pool.to(torch.int8).view(kv), "slot_mapping": slots,
        "offset": torch.tensor([offset])[0], "aligned": offset % 16 == 0, "block": block, "eps": 1e-5,
        "interleaved": interleaved,
    }  # fmt: skip


@compiling
@pytest.mark.filterwarnings("ignore")
def test_the_reference_is_what_transformers_compute() -> None:
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as turn_neighbours
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(7, 4, 16, generator=g), torch.randn(7, 2, 16, generator=g)
    norm = LlamaRMSNorm(16, 1e-5)
    torch.nn.init.normal_(norm.weight)
    angles = torch.randn(7, 8, generator=g)
    for rotary, turn in ((16, apply_rotary_pos_emb), (8, turn_neighbours)):
        half = angles[:, : rotary // 2]
        tables = torch.cat((half, half), -1)
        cos, sin = tables.cos()[None], tables.sin()[None]
        expected = turn(*(norm(x)[None].transpose(1, 2) for x in (q, k)), cos, sin)
        used = tables if turn is apply_rotary_pos_emb else half.repeat_interleave(2, -1)
        for x, wanted in zip((q, k), expected, strict=True):
            found = rotated(x, norm.weight, used.cos(), used.sin(), 1e-5, turn is turn_neighbours)
            torch.testing.assert_close(found, wanted[0].transpose(0, 1))


@compiling
@pytest.mark.parametrize("kv", KV)
def test_what_is_written(kv: torch.dtype | None) -> None:
    given = arguments(kv=kv)
    given["slot_mapping"][1:3] = torch.tensor([-1, 1 << 20])
    before = given["pool"].clone()
    out = OPERATOR(**given)
    torch.testing.assert_close(
        out, rotated(given["q"], *(given[n] for n in ("q_weight", "cos", "sin", "eps", "interleaved")))
    )
    keys = rotated(given["k"], *(given[n] for n in ("k_weight", "cos", "sin", "eps", "interleaved")))
    expected = before.clone()
    kept = torch.tensor([0, 3, 4])
    slots = given["slot_mapping"][kept]
    Pages(expected, 32, 16, 2, 16, 16).write(slots // 16, slots % 16, keys[kept], given["v"][kept])
    assert torch.equal(given["pool"].view(torch.uint8), expected.view(torch.uint8))
    assert not torch.equal(given["pool"].view(torch.uint8), before.view(torch.uint8))


@compiling
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": torch.zeros(5, 64)}, "expected q [tokens, heads, width], k [tokens, heads_kv, width] and v"),
        ({"k": torch.zeros(5, 2, 24)}, "got torch.float32 (5, 4, 16), torch.float32 (5, 2, 24) and torch.float32"),
        ({"v": torch.zeros(5, 1, 16)}, "expected as many heads in v as the 2 of k, got 1"),
        ({"k_weight": torch.zeros(8)}, "k_weight: expected [16], got (8,)"),
        ({"sin": torch.zeros(5, 7)}, "sin: expected [tokens, rotary] with an even number to 16, for both the same, got (5, 7)"),
    ],
)  # fmt: skip
def test_errors(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
        OPERATOR(**(arguments() | changes))
    assert text in str(caught.value)


def verify(given: dict[str, Any]) -> None:
    reference = dict(given, pool=given["pool"].clone())
    expected = OPERATOR(**reference)
    found = launch_rope_cache(**given, wrap=lambda kernel: kernel)
    tolerance = TOLERANCE[given["q"].dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    pool, wanted = given["pool"], reference["pool"]
    if pool.dtype == given["q"].dtype:
        torch.testing.assert_close(pool, wanted, rtol=tolerance, atol=tolerance)
        return
    # A sum in another order may change a code by one.
    shape = int(given["offset"]), 16, given["k"].shape[1], given["k"].shape[2], given["v"].shape[2]
    pages = torch.arange(pool.shape[0])
    for a, b in zip(Pages(pool, *shape).read(pages), Pages(wanted, *shape).read(pages), strict=True):
        close = (a - b).abs() <= 0.07 * b.abs().amax(-1, keepdim=True)
        assert (close | (a == b) | (a.isnan() & b.isnan())).all()


@interpreted
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(10, 30))]
)
def test_any_arguments(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    width = pick(8, 16, 24, 48, 64)
    heads_kv = pick(1, 2, 3)
    given = arguments(
        int(rng.integers(1, 200)), heads_kv * pick(1, 2, 5), heads_kv, width, pick(8, 20, 32), pick(width, width // 2),
        (pick(True, False), pick(True, False)), pick(True, False), pick(torch.float32, torch.float16), pick(*KV),
        16, seed, pick(True, False), pick(0, 32),
    )  # fmt: skip
    if rng.random() < 0.5:
        given["slot_mapping"][rng.integers(len(given["slot_mapping"]))] = pick(-1, 1 << 40)
    verify(given)


@interpreted
def test_an_offset_that_is_not_aligned() -> None:
    verify(arguments(offset=3))


TYPES = {"slots_ptr": "*i64", "offset_ptr": "*i64"}


@compiling
@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype", "kv"), [
    (80, "bf16", None), (90, "bf16", None), (120, "fp32", None), (90, "bf16", torch.float8_e4m3fn), (80, "fp16", torch.int8),
])  # fmt: skip
def test_compiles(capability: int, dtype: str, kv: torch.dtype | None) -> None:
    from tests.unit.ops.test_paged_attention_kernels import TRITON_TYPES, compiled
    from untorch.ops.attention.rope_cache import rope_cache
    from untorch.ops.kv_pages import LARGEST_CODE

    constants = {
        "HEADS": 4, "HEADS_KV": 2, "BLOCK": 16, "WIDTH": 128, "WIDTH_V": 128, "ROTARY": 128, "INTERLEAVED": False,
        "NORM_Q": True, "NORM_K": True, "EPS": 1e-6, "BLOCK_D": 128, "BLOCK_DV": 128, "BLOCK_T": 16, "ALIGNED": True,
        "LARGEST": 0.0 if kv is None else LARGEST_CODE[kv],
    }  # fmt: skip
    done = compiled(rope_cache, capability, constants, 4, 1, dtype, TRITON_TYPES[kv])
    assert "ld.global.v" in done.asm["ptx"]  # vectors


@compiling
@pytest.mark.parametrize("kv", KV)
def test_pytorch_sees_what_it_writes(kv: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its analysis fails, PyTorch takes every argument for written: it would copy them at each layer."""
    import triton
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    written: list[str] = []

    class Wrapped:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launched(*args: Any, **named: Any) -> None:
                names = [parameter.name for parameter in self.kernel.params]
                given = dict(zip(names, args, strict=False)) | {k: v for k, v in named.items() if k in names}
                tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
                numbers = kernel_side_table.add_constant_args({k: v for k, v in given.items() if k not in tensors})
                number = kernel_side_table.add_kernel(self.kernel)
                written.extend(get_mutated_tensors(number, numbers, tensors, {}))

            return launched

    launch_rope_cache(**arguments(width=64, width_v=64, dtype=torch.bfloat16, kv=kv), wrap=Wrapped)
    assert sorted(written) == ["out_ptr", "pool_ptr"]


@compiling
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@compiling
@pytest.mark.exhaustive
def test_further_arguments_in_the_interpreter() -> None:
    run_interpreted(__file__, "exhaustive")
