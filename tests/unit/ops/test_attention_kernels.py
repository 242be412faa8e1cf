"""The attention kernels in Triton's interpreter, against float64; and that they compile for the GPUs they are for."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

HERE = Path(__file__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
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
    from untorch.ops.attention.launch import DECODE_ROWS, launch_decode

    q, k, v, mask = tensors(case)
    if case.heads // case.heads_kv * case.queries > DECODE_ROWS:
        pytest.skip("many queries")
    for processors in (1, 4, 30):
        got = launch_decode(q, k, v, mask, case.scale, DecodeConfig(16, 4, 2, 2), processors, lambda kernel: kernel)
        assert got.dtype == q.dtype and got.transpose(1, 2).is_contiguous()
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(got.double(), expected(case, q, k, v, mask), rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(INTERPRETED, reason="runs the others")
def test_in_the_interpreter() -> None:
    """Triton reads the variable when it is imported, so the tests above run in a process of their own."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--override-ini=addopts=--import-mode=importlib", str(HERE)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
