"""What the CUDA attention operators refuse, and with which words. Needs no GPU: the tensors' address is made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.shim import CODES, ShimError, delete, lib, raise_on

ADDRESS = 1 << 20
Shape = tuple[int, ...]


def fake(shape: Shape, dtype: torch.dtype = torch.float16, strides: Shape | None = None) -> ctypes.c_void_p:
    """A handle on CUDA memory that is never touched."""
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    out = ctypes.c_void_p()
    sizes, steps = (ctypes.c_int64 * max(len(shape), 1))(*shape), (ctypes.c_int64 * max(len(shape), 1))(*strides)
    raise_on(
        lib.aoti_torch_create_tensor_from_blob(
            ctypes.c_void_p(ADDRESS), ctypes.c_int64(len(shape)), sizes, steps, ctypes.c_int64(0),
            ctypes.c_int32(CODES[dtype]), ctypes.c_int32(1), ctypes.c_int32(0), ctypes.byref(out),
        )
    )  # fmt: skip
    return out


def on_cpu(shape: Shape) -> ctypes.c_void_p:
    from tests.native.shim import handle

    return handle(torch.zeros(shape, dtype=torch.float16))


def refused(name: str, args: list[Any], slots: int, expected: str) -> None:
    """Calls a shim with ``slots`` output pointers and expects this text. ``None`` is a null pointer."""
    keep: list[Any] = []
    c_args: list[Any] = []
    for arg in args:
        if isinstance(arg, tuple):  # an optional tensor: a pointer to its handle
            keep.append(arg[0])
            c_args.append(ctypes.byref(arg[0]))
        elif isinstance(arg, bool):
            c_args.append(ctypes.c_int32(arg))
        elif isinstance(arg, int):
            c_args.append(ctypes.c_int64(arg))
        elif isinstance(arg, float):
            c_args.append(ctypes.c_double(arg))
        elif arg is None:
            c_args.append(ctypes.c_void_p())
        else:
            c_args.append(arg)
    out = [ctypes.c_int64() for _ in range(slots)]
    try:
        with pytest.raises(ShimError) as error:
            raise_on(getattr(lib, f"aoti_torch_cuda_{name}")(*c_args, *map(ctypes.byref, out)))
    finally:
        for arg in args:
            h = arg[0] if isinstance(arg, tuple) else arg
            if isinstance(h, ctypes.c_void_p) and h.value:
                delete(h)
    assert str(error.value) == expected, str(error.value)


FLASH, EFFICIENT, CUDNN = (f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))


def sdpa(op: str, q: Any, k: Any, v: Any, expected: str, bias: Any = None, dropout: float = 0.0) -> None:
    tail: list[Any]
    if op == FLASH:
        tail, slots = [dropout, False, False, None], 9
    elif op == EFFICIENT:
        tail, slots = [bias, False, dropout, False, None], 4
    else:
        tail, slots = [bias, False, dropout, False, False, None], 9
    refused(op, [q, k, v, *tail], slots, f"{op}: {expected}")


@pytest.mark.parametrize("op", [FLASH, EFFICIENT, CUDNN])
def test_operands(op: str) -> None:
    shape = (2, 4, 8, 64)
    sdpa(op, None, fake(shape), fake(shape), "argument 'query' is null")
    sdpa(op, fake(shape), None, fake(shape), "argument 'key' is null")
    sdpa(op, fake(shape), fake(shape), on_cpu(shape), "argument 'value' is on cpu, expected cuda")
    sdpa(
        op, fake((4, 8, 64)), fake(shape), fake(shape),
        "argument 'query' must be 4-D (batch, heads, length, width), got shape [4, 8, 64]",
    )  # fmt: skip
    sdpa(
        op, fake(shape), fake((8, 64)), fake(shape),
        "argument 'key' must be 4-D (batch, heads, length, width), got shape [8, 64]",
    )  # fmt: skip
    sdpa(
        op, fake(shape), fake(shape, torch.bfloat16), fake(shape),
        "argument 'key' must be float16 like 'query', got bfloat16",
    )  # fmt: skip
    sdpa(
        op, fake(shape), fake((2, 4, 8, 32)), fake(shape),
        "argument 'key' must have the width 64 of 'query', got shape [2, 4, 8, 32]",
    )  # fmt: skip
    sdpa(
        op, fake(shape), fake((2, 4, 9, 64)), fake(shape),
        "'key' and 'value' must agree in heads and length, got [2, 4, 9, 64] and [2, 4, 8, 64]",
    )  # fmt: skip
    sdpa(
        op, fake(shape), fake((1, 4, 8, 64)), fake((1, 4, 8, 64)),
        "the batch sizes differ: 'query' is [2, 4, 8, 64], 'key' is [1, 4, 8, 64], 'value' is [1, 4, 8, 64]",
    )  # fmt: skip
    sdpa(
        op, fake((2, 4, 8, 513)), fake((2, 4, 8, 513)), fake((2, 4, 8, 513)),
        "argument 'query' must have a width of 1 to 512, got shape [2, 4, 8, 513]",
    )  # fmt: skip
    sdpa(
        op, fake(shape), fake(shape), fake(shape),
        "dropout_p must be 0, got 0.1; export the model in eval mode", dropout=0.1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "dtype", "served"),
    [
        (FLASH, torch.float32, "float16 or bfloat16"),
        (CUDNN, torch.float32, "float16 or bfloat16"),
        (EFFICIENT, torch.float64, "float16, bfloat16 or float32"),
    ],
)
def test_dtypes(op: str, dtype: torch.dtype, served: str) -> None:
    q, k, v = (fake((1, 2, 3, 8), dtype) for _ in range(3))
    sdpa(op, q, k, v, f"argument 'query' must be {served}, got {str(dtype).removeprefix('torch.')}")


def test_heads() -> None:
    for op in (FLASH, CUDNN):
        sdpa(
            op, fake((1, 6, 3, 8)), fake((1, 4, 3, 8)), fake((1, 4, 3, 8)),
            "the 6 heads of 'query' must be a multiple of the 4 heads of 'key'",
        )  # fmt: skip
    sdpa(
        EFFICIENT, fake((1, 6, 3, 8)), fake((1, 3, 3, 8)), fake((1, 3, 3, 8)),
        "'query' and 'key' must have the same number of heads, got 6 and 3",
    )  # fmt: skip
    sdpa(
        FLASH, fake((1, 6, 3, 8)), fake((1, 6, 3, 8)), fake((1, 6, 3, 16)),
        "argument 'value' must have the width 8 of 'query', got shape [1, 6, 3, 16]",
    )  # fmt: skip


@pytest.mark.parametrize("op", [EFFICIENT, CUDNN])
def test_bias(op: str) -> None:
    def three() -> list[ctypes.c_void_p]:
        return [fake((2, 4, 8, 64)) for _ in range(3)]

    sdpa(
        op, *three(), "argument 'attn_bias' must be float16 like 'query', got float32",
        bias=(fake((2, 4, 8, 8), torch.float32),),
    )  # fmt: skip
    sdpa(
        op, *three(), "argument 'attn_bias' of shape [3, 1, 8, 8] does not broadcast to [2, 4, 8, 8]",
        bias=(fake((3, 1, 8, 8)),),
    )  # fmt: skip
    sdpa(
        op, *three(), "argument 'attn_bias' must have at most 4 dimensions, got shape [1, 2, 4, 8, 8]",
        bias=(fake((1, 2, 4, 8, 8)),),
    )  # fmt: skip


def forward(expected: str, *, shape: Shape = (2, 8, 4, 64), out: Any = None, **given: Any) -> None:
    """_flash_attention_forward_v2, or the in-place operator when there is an ``out``."""
    op = "_flash_attention_forward" if out is None else "_flash_attention_forward_no_dropout_inplace"
    optional = [
        given.get(name)
        for name in (
            "scale", "window_size_left", "window_size_right", "seqused_k", "alibi_slopes", "block_table", "num_splits",
        )
    ]  # fmt: skip
    args: list[Any] = [fake(shape), fake(shape), fake(shape), given.get("cum_seq_q"), given.get("cum_seq_k")]
    args += [given.get("max_q", 8), 8, given.get("dropout_p", 0.0), False, given.get("debug", False), *optional]
    if out is None:
        refused(f"{op}_v2", args, 5, f"{op}: {expected}")
    else:
        refused(f"{op}_v2", [out, *args], 1, f"{op}: {expected}")


def test_flash_forward() -> None:
    ints = torch.int32
    forward("argument 'query' must be 4-D (batch, length, heads, width), got shape [8, 4, 64]", shape=(8, 4, 64))
    forward("argument 'alibi_slopes' is not served; it must be absent", alibi_slopes=(fake((4,), torch.float32),))
    forward("argument 'block_table' is not served; it must be absent", block_table=(fake((2, 4), ints),))
    forward("'cum_seq_q' and 'cum_seq_k' must be both given or both absent", cum_seq_q=(fake((3,), ints),))
    forward(
        "return_debug_mask must be false; it needs dropout, which is not served", debug=True
    )  # fmt: skip
    forward(
        "argument 'query' must be 3-D (total length, heads, width), got shape [2, 8, 4, 64]",
        cum_seq_q=(fake((3,), ints),), cum_seq_k=(fake((3,), ints),),
    )  # fmt: skip
    forward(
        "argument 'cum_seq_k' must be int32, got int64",
        shape=(16, 4, 64), cum_seq_q=(fake((3,), ints),), cum_seq_k=(fake((3,), torch.int64),),
    )  # fmt: skip
    forward(
        "argument 'cum_seq_k' must be 1-D with 3 values and no gaps, got shape [4] and strides [1]",
        shape=(16, 4, 64), cum_seq_q=(fake((3,), ints),), cum_seq_k=(fake((4,), ints),),
    )  # fmt: skip
    forward(
        "argument 'max_q' must be from 0 to 536870912, got -1",
        shape=(16, 4, 64), cum_seq_q=(fake((3,), ints),), cum_seq_k=(fake((3,), ints),), max_q=-1,
    )  # fmt: skip
    forward(
        "argument 'seqused_k' must be 1-D with 2 values and no gaps, got shape [2] and strides [2]",
        seqused_k=(fake((2,), ints, (2,)),),
    )  # fmt: skip


def test_flash_forward_in_place() -> None:
    forward(
        "argument 'out' must have the shape [2, 8, 4, 64] and the dtype float16 of 'query', "
        "got [2, 8, 4, 32] and float16",
        out=fake((2, 8, 4, 32)),
    )  # fmt: skip
    forward(
        "the last dimension of argument 'out' must have stride 1, got strides [4096, 512, 128, 2]",
        out=fake((2, 8, 4, 64), strides=(4096, 512, 128, 2)),
    )  # fmt: skip


def efficient(expected: str, shape: Shape = (2, 8, 4, 64), mask: int = 0, dropout: float = 0.0, **given: Any) -> None:
    op = "_efficient_attention_forward"
    args: list[Any] = [fake(shape), fake(shape), fake(shape), given.get("bias")]
    args += [
        given.get("cu_seqlens_q"),
        given.get("cu_seqlens_k"),
        given.get("max_seqlen_q"),
        None,
        dropout,
        mask,
        False,
    ]
    args += [None, None, given.get("window_size")]
    refused(op, args, 6, f"{op}: {expected}")


def test_efficient_forward() -> None:
    lengths = ((fake((3,), torch.int32),), (fake((3,), torch.int32),))
    efficient(
        "argument 'custom_mask_type' must be 0 (none), 1 (causal, top left) or 2 (causal, bottom right), got 3", mask=3
    )
    efficient("dropout_p must be 0, got 0.5; export the model in eval mode", dropout=0.5)
    window = ctypes.c_int64(4)
    efficient("argument 'window_size' is not served; it must be absent", window_size=ctypes.byref(window))
    efficient(
        "with 'cu_seqlens_q' argument 'query' must have a batch of 1, got shape [2, 8, 4, 64]",
        cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1],
    )  # fmt: skip
    lengths = ((fake((3,), torch.int32),), (fake((3,), torch.int32),))
    efficient(
        "'cu_seqlens_q' needs 'max_seqlen_q'", shape=(1, 8, 4, 64), cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1]
    )
