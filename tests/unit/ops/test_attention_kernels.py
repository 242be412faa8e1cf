"""The attention kernels in Triton's interpreter, against float64; and that they compile for the GPUs they are for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.interpreter import INTERPRETED, run_interpreted

pytest.importorskip("triton")

# Triton 3.6's interpreter takes arrays of one element for numbers, and computes nonsense with bfloat16.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """``layout``: "bhld" as it is, "blhd" heads split out of a projection, "odd" no stride is a multiple of 16."""

    queries: int
    keys: int
    width: int = 16
    width_v: int | None = None
    batch: int = 2
    heads: int = 2
    heads_kv: int = 2
    dtype: torch.dtype = torch.float16
    mask: str = "none"
    causal: bool = False
    scale: float | None = None
    layout: str = "bhld"


CASES = [
    Case(40, 40),
    Case(1, 1),
    Case(33, 47, width=20, width_v=24, causal=True),
    Case(40, 20, causal=True),
    Case(20, 70, causal=True, layout="blhd"),
    Case(64, 64, causal=True, heads=5, batch=1, heads_kv=1),
    Case(17, 50, heads=6, heads_kv=2, layout="odd"),
    Case(40, 40, dtype=torch.float32, width=12, scale=0.7),
    Case(40, 40, scale=-0.3, causal=True),
    Case(40, 40, scale=0.0),
    Case(40, 0),
    Case(33, 40, mask="bool"),
    Case(33, 40, mask="bool rows", causal=True),
    Case(33, 40, mask="additive", layout="blhd"),
    Case(33, 40, mask="lowest", dtype=torch.float32),
    Case(33, 40, mask="keys", heads=4, heads_kv=1),
    Case(33, 40, mask="transposed"),
    Case(2, 300, heads=8, heads_kv=2, mask="cache"),
    Case(1, 300, heads=8, heads_kv=2, mask="window", batch=1),
]  # fmt: skip


def tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def tensor(heads: int, length: int, width: int) -> torch.Tensor:
        if case.layout == "blhd":
            value = torch.randn((case.batch, length, heads, width), generator=generator).transpose(1, 2)
        elif case.layout == "odd":
            value = torch.randn((case.batch, heads, length + 1, width + 3), generator=generator)[:, :, 1:, 1:-2]
        else:
            value = torch.randn((case.batch, heads, length, width), generator=generator)
        return value.to(case.dtype)

    q = tensor(case.heads, case.queries, case.width)
    k = tensor(case.heads_kv, case.keys, case.width)
    v = tensor(case.heads_kv, case.keys, case.width_v or case.width)
    shape = (case.batch, case.heads, case.queries, case.keys)
    seen = torch.rand(shape, generator=generator) > 0.4
    seen[:, :, 0] = False
    masks: dict[str, Any] = {
        "none": lambda: None,
        "bool": lambda: seen,
        "bool rows": lambda: seen[0, 0],
        "additive": lambda: torch.where(seen, torch.randn(shape, generator=generator), -math.inf).to(case.dtype),
        "lowest": lambda: torch.where(seen, 0.0, torch.finfo(case.dtype).min).to(case.dtype),
        "keys": lambda: seen[:, :1, 1:2],
        "transposed": lambda: torch.randn(shape, generator=generator).mT.contiguous().mT.to(case.dtype),
        "cache": lambda: (torch.arange(case.keys) < 37)[None],
        "window": lambda: torch.where((torch.arange(case.keys) - 150).abs() < 30, 0.0, -math.inf)[None],
    }
    return q, k, v, masks[case.mask]()


def expected(case: Case, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    from untorch.ops.attention.reference import attention_reference

    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return attention_reference(q.double(), k.double(), v.double(), mask, case.causal, case.scale)


TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(case: Case) -> None:
    from untorch.ops.attention.configs import PrefillConfig
    from untorch.ops.attention.launch import launch_prefill

    q, k, v, mask = tensors(case)
    for config in (PrefillConfig(16, 16, 4, 2), PrefillConfig(32, 16, 4, 2), PrefillConfig(16, 32, 4, 2)):
        got = launch_prefill(q, k, v, mask, case.causal, case.scale, config, lambda kernel: kernel)
        assert got.dtype == q.dtype and got.transpose(1, 2).is_contiguous()
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(got.double(), expected(case, q, k, v, mask), rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
@pytest.mark.parametrize("case", [case for case in CASES if not case.causal], ids=str)
def test_decode(case: Case) -> None:
    from untorch.ops.attention.configs import DecodeConfig
    from untorch.ops.attention.launch import launch_decode, uses_decode

    q, k, v, mask = tensors(case)
    if not uses_decode(q, k, v, False):
        pytest.skip("many queries")
    for processors in (1, 4, 30):
        got = launch_decode(q, k, v, mask, case.scale, DecodeConfig(16, 4, 2, 2), processors, lambda kernel: kernel)
        assert got.dtype == q.dtype and got.transpose(1, 2).is_contiguous()
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(got.double(), expected(case, q, k, v, mask), rtol=tolerance, atol=tolerance)


def compiled(
    kernel: Any,
    capability: int,
    constants: dict[str, Any],
    warps: int,
    stages: int,
    size: int,
    stride_divisor: int = 16,
) -> Any:
    """The kernel for a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            wide = size == 4 or name in ("parts_ptr", "peaks_ptr", "totals_ptr")
            signature[name] = "*i1" if name == "mask_ptr" else "*fp32" if wide else "*bf16"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i64" if name in ("queries", "keys") else "i32"
            if name.startswith("stride_") and stride_divisor == 16:  # Triton looks for no other
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def constants(width: int, size: int, mask: int, **others: Any) -> dict[str, Any]:
    widths = {"WIDTH": width, "WIDTH_V": width, "BLOCK_D": width, "BLOCK_DV": width}
    flags = {"EVEN": False, "ALIGN": 16, "PRECISE": size == 4, "NEGATE": False, "MASK": mask, "SCALE": 0.2}
    return widths | flags | others


SHARED = {80: 101376, 90: 232448}  # 80 stands for 86, 89 and 120, which have less


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets")
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("capability", [80, 90])
def test_prefill_compiles(capability: int, size: int, width: int) -> None:
    from untorch.ops.attention.configs import prefill_config
    from untorch.ops.attention.prefill import prefill

    for causal, mask, few in ((True, 0, False), (False, 1, False), (False, 1, True)):
        config = prefill_config(capability, size, width, causal, few)
        blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "CAUSAL": causal}
        values = constants(width, size, mask, **blocks)
        done = compiled(prefill, capability, values, config.num_warps, config.num_stages, size)
        assert done.metadata.shared <= SHARED[capability]
        if capability == 90 and size == 2:
            assert "wgmma.mma_async" in done.asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets")
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("capability", [80, 90])
def test_decode_compiles(capability: int, size: int, width: int) -> None:
    from untorch.ops.attention.configs import decode_config, decode_rows
    from untorch.ops.attention.decode import combine, decode

    config = decode_config(capability, size, width)
    for mask, rows in ((0, 16), (1, decode_rows(size, width))):
        values = constants(width, size, mask, BLOCK_M=rows, BLOCK_N=config.block_n, SINGLE=mask == 0)
        done = compiled(decode, capability, values, config.num_warps, config.num_stages, size)
        assert done.metadata.shared <= SHARED[capability]
    if capability == 80:
        compiled(combine, capability, {"WIDTH_V": width, "BLOCK_DV": width, "BLOCK_S": 32}, 4, 1, size)


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets")
@pytest.mark.parametrize("size", [2, 4])
def test_odd_widths_are_loaded_in_whole_words(size: int) -> None:
    """Strides of heads of 40 are no multiples of 16, but of 8."""
    from untorch.ops.attention.prefill import prefill

    values = constants(40, size, 0, BLOCK_D=64, BLOCK_DV=64, BLOCK_M=64, BLOCK_N=64, CAUSAL=False, EVEN=True, ALIGN=8)
    ptx = compiled(prefill, 90, values, 4, 2, size, stride_divisor=8).asm["ptx"]
    copies = [line for line in ptx.splitlines() if "cp.async.c" in line and ".shared.global" in line]
    assert copies
    assert all("0x10" in line for line in copies)


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets")
def test_ones_are_constants() -> None:
    """Triton and AOTInductor put arguments that are 1 into the code."""
    from untorch.ops.attention.decode import combine, decode
    from untorch.ops.attention.prefill import prefill

    ones = dict.fromkeys(("heads", "group", "pairs", "together", "queries", "keys", "stride_mn"), 1)
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "CAUSAL": True}
    compiled(prefill, 90, constants(64, 2, 2, **blocks, **ones), 4, 2, 2)
    ones = dict.fromkeys(("heads_kv", "group", "queries", "keys", "splits", "stride_mn"), 1)
    compiled(decode, 90, constants(64, 2, 1, BLOCK_M=16, BLOCK_N=64, SINGLE=False, **ones), 4, 2, 2)
    ones = dict.fromkeys(("heads_kv", "group", "queries", "splits"), 1)
    compiled(combine, 90, {"WIDTH_V": 64, "BLOCK_DV": 64, "BLOCK_S": 32, **ones}, 4, 1, 2)


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_pytorch_sees_what_they_write(causal: bool, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its analysis fails, PyTorch takes every argument for written: it copies them all, or fails to compile."""
    import triton
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
    from triton.backends.compiler import GPUTarget

    from untorch.ops.attention.configs import decode_config, prefill_config
    from untorch.ops.attention.launch import launch_decode, launch_prefill

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    written: dict[str, list[str]] = {}

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
                written[self.kernel.__name__] = get_mutated_tensors(number, numbers, tensors, {})

            return launched

    q, k = torch.randn(2, 8, 64, 64).half(), torch.randn(2, 2, 4096, 64).half()
    mask = torch.ones(2, 1, 64, 4096, dtype=torch.bool) if masked else None
    launch_prefill(q, k, k, mask, causal, None, prefill_config(90, 2, 64, causal), Wrapped)
    mask = None if mask is None else mask[:, :, :1]
    launch_decode(q[:, :, :1], k, k, mask, None, decode_config(90, 2, 64), 132, Wrapped)
    assert written == {
        "prefill": ["out_ptr"], "decode": ["parts_ptr", "peaks_ptr", "totals_ptr"], "combine": ["out_ptr"],
    }  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets")
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "splits"),
    [
        (1, 16, 2, True),
        (16, 128, 2, False),
        (16, 129, 2, True),
        (15, 15, 2, True),
        (8, 64, 4, False),
        (64, 513, 2, True),
    ],
)
def test_few_queries_over_few_keys_are_no_decode(queries: int, keys: int, heads: int, splits: bool) -> None:
    from untorch.ops.attention.launch import uses_decode

    q, k = torch.empty(1, heads, queries, 64).half(), torch.empty(1, 2, keys, 64).half()
    assert uses_decode(q, k, k, False) == splits
    assert not uses_decode(q, k, k, True)


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets")
def test_configs_of_few_queries() -> None:
    from untorch.ops.attention.configs import few_queries, prefill_config

    assert few_queries(12, 320, 132)
    assert not few_queries(12, 321 + 64, 132)
    assert prefill_config(90, 4, 64, False, few=True).block_m < prefill_config(90, 4, 64, False).block_m
    for capability, size in ((80, 4), (120, 4), (90, 2)):
        assert prefill_config(capability, size, 64, True, few=True) == prefill_config(capability, size, 64, True)


@pytest.mark.exhaustive
@pytest.mark.skipif(INTERPRETED, reason="runs the others")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)
