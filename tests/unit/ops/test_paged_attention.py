"""untorch::paged_attention as an operator: its schema and fake, and the reference against plain attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.native.test_paged_attention import KV, batch
from untorch.ops.kv_pages import LARGEST_CODE
from untorch.ops.paged_attention import OPERATOR, paged_attention


@pytest.mark.parametrize(("dtype", "kv"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)])
@pytest.mark.parametrize("reads_only", [False, True])
def test_opcheck(dtype: torch.dtype, kv: torch.dtype | None, reads_only: bool) -> None:
    given = batch([(5, 20), (1, 33), (0, 4)], 4, 2, 16, 8, dtype=dtype, padding=2, kv=kv)
    given["sinks"] = torch.randn(4)
    if reads_only:
        given["k"] = given["v"] = None
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPERATOR, tuple(given.values()), test_utils=checks)


@pytest.mark.parametrize("window", [0, 5])
def test_the_reference_is_attention(window: int) -> None:
    given = batch([(20, 20)], 4, 2, 16, 16)
    given["window"] = window
    out = paged_attention(**given)
    q, k, v = (given[name].transpose(0, 1) for name in "qkv")
    i, j = torch.arange(20)[:, None], torch.arange(20)[None]
    mask = (j <= i) & (i - window < j) if window else j <= i
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), attn_mask=mask
    )
    torch.testing.assert_close(out.transpose(0, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv", KV[1:])
@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_codes_against_floats(kv: torch.dtype, scale: float) -> None:
    """The bound of the error follows from the codes: half a step of each key and value."""
    given = batch([(30, 30)], 4, 2, 16, 12, kv=kv)
    given["scale"] = scale
    floats = batch([(30, 30)], 4, 2, 16, 12) | {name: given[name] for name in ("q", "k", "v", "scale")}
    found, exact = paged_attention(**given), paged_attention(**floats)
    # Of the largest element of a row: 0.5 / 127 with a scale 2^-7 too large, or 16 / 448 at the top of FP8.
    step = 0.5 / 127 * (1 + 2**-7) if kv == torch.int8 else 16 / LARGEST_CODE[kv] * (1 + 2**-7)
    k_error, v_error = (given[name].abs().amax() * step for name in "kv")
    score_error = scale * given["q"].abs().sum(-1).amax() * k_error
    # Scores that are off by e change a weight by a factor of e^2e at most.
    bound = v_error + given["v"].abs().amax() * (torch.exp(2 * score_error) - 1)
    difference = (found - exact).abs().max()
    assert 0 < difference <= bound
    if scale == 0.2:
        assert difference < (0.03 if kv == torch.int8 else 0.2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.zeros(3, 2, 8).double()}, "q: expected float32, bfloat16 or float16 [tokens, heads, 8], got "
                                               "torch.float64 (3, 2, 8)"),
        ({"heads_kv": 3}, "2 heads do not divide into 3 KV heads"),
        ({"block": 20}, "block: expected a multiple of 16, got 20"),
        ({"v": None}, "expected both k and v, or neither"),
        ({"pool": torch.zeros(2, 256).double()}, "pool: expected [blocks, elements] of one of torch.float32, torch.int8, "
                                                 "torch.float8_e4m3fn, got torch.float64 (2, 256)"),
        ({"pool": torch.zeros(2, 328, dtype=torch.int8)}, "pool: expected an offset and a stride that are multiples of "
                                                          "16 in torch.int8, got 0 and 328"),
        ({"pool": torch.zeros(2, 512, dtype=torch.int8), "offset": 8}, "pool: expected an offset and a stride that are "
                                                                       "multiples of 16 in torch.int8, got 8 and 512"),
        ({"pool": torch.zeros(2, 304, dtype=torch.int8)}, "pool: expected blocks of 320 elements or more, got 304"),
        ({"pool": torch.zeros(2, 9)}, "pool: expected blocks of 256 elements or more, got 9"),
        ({"block_table": torch.zeros(3)}, "block_table: expected [sequences, columns], got (3,)"),
        ({"slot_mapping": torch.tensor([0, 48, 2])}, "slot_mapping: expected less than 48"),
    ],
)  # fmt: skip
def test_errors(change: dict[str, Any], text: str) -> None:
    given = {**batch([(3, 3)], 2, 1, 8, 8), **change}
    with pytest.raises(ValueError, match="paged_attention") as caught:
        paged_attention(**given)
    assert str(caught.value) == f"paged_attention: {text}"
