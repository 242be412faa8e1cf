"""What paged_prefill and paged_prefill_decode refuse, and with which words. Needs no GPU: the addresses are made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.cuda.made_up import made_up, other, refused
from tests.native.shim import Opt, ShimError, delete, handle, lib, raise_on

PREFILL, DECODE = "aoti_torch_cuda_paged_prefill", "aoti_torch_cuda_paged_prefill_decode"
BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64
NAMES = ("q", "pool", "block_table", "cu_seqlens_q", "seqlens_k", "sinks", "offset")


def arguments(**changes: Any) -> list[Any]:
    given: dict[str, Any] = {
        "q": made_up(40, 4, 64, dtype=BF16), "pool": made_up(5, 2 * 2 * 16 * 64, dtype=BF16),
        "block_table": made_up(2, 3, dtype=I32), "cu_seqlens_q": made_up(3, dtype=I32),
        "seqlens_k": made_up(2, dtype=I32), "sinks": made_up(4), "offset": made_up(1, dtype=I64), "block": 16,
        "heads_kv": 2, "scale": 0.125, "window": 0, "chunk": 0, "few": 4,
    }  # fmt: skip
    given |= changes
    return [Opt(value) if name == "sinks" else value for name, value in given.items()]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"q": made_up(40, 4, 64)},
            "argument 'q' must be bfloat16 or float16, contiguous, [tokens, heads, width], got float32 [40, 4, 64]",
        ),
        ({"q": made_up(4, 64, dtype=BF16)}, "argument 'q' must be bfloat16 or float16, contiguous, [tokens, heads"),
        (
            {"q": made_up(40, 4, 20, dtype=BF16)},
            "argument 'q' must have a width that is a multiple of 8, at most 256, got 20",
        ),
        (
            {"q": made_up(40, 4, 264, dtype=BF16)},
            "argument 'q' must have a width that is a multiple of 8, at most 256, got 264",
        ),
        ({"heads_kv": 3}, "4 heads do not divide into 3 KV heads"),
        ({"heads_kv": 0}, "4 heads do not divide into 0 KV heads"),
        ({"block": 24}, "argument 'block' must be a multiple of 16, got 24"),
        (
            {"pool": made_up(5, 4096, dtype=torch.float16)},
            "argument 'pool' must be bfloat16 [blocks, elements] with dense blocks, got float16 [5, 4096]",
        ),
        (
            {"pool": made_up(5, 4100, dtype=BF16)},
            "argument 'pool' must have blocks of a multiple of 64 elements, with room for 4096, got 5 of 4100 with a "
            "stride of 4100",
        ),
        ({"pool": made_up(5, 2048, dtype=BF16)}, "argument 'pool' must have blocks of a multiple of 64 elements, with"),
        ({"pool": made_up(0, 4096, dtype=BF16)}, "argument 'pool' must have blocks of a multiple of 64 elements, with"),
        ({"offset": made_up(2, dtype=I64)}, "argument 'offset' must be one int64, got int64 [2]"),
        ({"offset": made_up(1, dtype=I32)}, "argument 'offset' must be one int64, got int32 [1]"),
        (
            {"block_table": made_up(6, dtype=I32)},
            "argument 'block_table' must be [sequences, columns], got shape [6]",
        ),
        (
            {"block_table": made_up(2, 3, dtype=I64)},
            "argument 'block_table' must be int32, contiguous, of shape [2, 3], got int64 [2, 3]",
        ),
        (
            {"cu_seqlens_q": made_up(2, dtype=I32)},
            "argument 'cu_seqlens_q' must be int32, contiguous, of shape [3], got int32 [2]",
        ),
        (
            {"seqlens_k": made_up(3, dtype=I32)},
            "argument 'seqlens_k' must be int32, contiguous, of shape [2], got int32 [3]",
        ),
        ({"scale": 0.0}, "argument 'scale' must be positive, got 0"),
        ({"sinks": made_up(3)}, "argument 'sinks' must be float32, contiguous, of shape [4]"),
    ],
)
def test_refusals(changes: dict[str, Any], expected: str) -> None:
    assert refused(PREFILL, *arguments(**changes)).startswith(f"paged_prefill: {expected}")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scale": 0.0}, "argument 'scale' must be positive, got 0"),
        (
            {"q": made_up(40, 4, 128, dtype=BF16), "few": 0, "pool": made_up(5, 2 * 2 * 16 * 128, dtype=BF16)},
            "expected a width of 64 or 128, at most 8 heads for each KV head, and 'few' above 0, got 128, 2 and 0",
        ),
        (
            {"q": made_up(2, 4, 32, dtype=BF16)},
            "expected a width of 64 or 128, at most 8 heads for each KV head, and 'few' above 0, got 32, 2 and 4",
        ),
        (
            {"q": made_up(2, 18, 64, dtype=BF16), "sinks": None},
            "expected a width of 64 or 128, at most 8 heads for each KV head, and 'few' above 0, got 64, 9 and 4",
        ),
    ],
)  # fmt: skip
def test_refusals_of_decode(changes: dict[str, Any], expected: str) -> None:
    """Steps of at most as many tokens as sequences, which have no prompt, and others."""
    assert refused(DECODE, *arguments(**changes), 1) == f"paged_prefill_decode: {expected}"


@pytest.mark.parametrize("name", NAMES[1:])
def test_several_devices(name: str) -> None:
    tensors = dict(zip(NAMES, arguments()[:7], strict=True))
    before = tensors[name].value if name == "sinks" else tensors[name]
    elsewhere = other(before) if before.dtype == torch.float32 else other(before).to(before.dtype)
    expected = "paged_prefill: operands are on cuda:0 and cuda:1, expected one device"
    assert refused(PREFILL, *arguments(**{name: elsewhere})) == expected


@pytest.mark.parametrize("name", NAMES)
def test_operands_on_the_cpu(name: str) -> None:
    tensors = dict(zip(NAMES, arguments()[:7], strict=True))
    before = tensors[name].value if name == "sinks" else tensors[name]
    on_cpu = torch.zeros(before.shape, dtype=before.dtype)
    expected = f"paged_prefill: argument '{name}' is on cpu, expected cuda"
    assert refused(PREFILL, *arguments(**{name: on_cpu})) == expected


def test_no_place_for_the_result() -> None:
    handles = [handle(arg.value if isinstance(arg, Opt) else arg) for arg in arguments()[:7]]
    numbers = [ctypes.c_int64(16), ctypes.c_int64(2), ctypes.c_double(0.125), *[ctypes.c_int64(0)] * 3]
    with pytest.raises(ShimError, match="^paged_prefill: output pointer is null$"):
        raise_on(getattr(lib, PREFILL)(*handles[:5], ctypes.c_void_p(), handles[6], *numbers, None))
    for h in handles:
        delete(h)
