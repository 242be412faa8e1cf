"""How the attention kernels are launched: block sizes, warps and pipeline stages, by GPU, type and head size.

``benchmarks/gpu_attention_tune.py`` found those for 90 on an H200: in 16 bits at widths 64 and 128 (4096 queries and
keys; one query over 4096 and 65536 keys), in float32 at 32, 64 and 128 (64 to 1536 queries and keys, 2 to 1024 heads).
The others fit into shared memory and keep the matrix units busy by count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "DecodeConfig", "PrefillConfig", "block_width", "decode_config", "decode_rows", "few_queries", "prefill_config",
]  # fmt: skip


@dataclass(frozen=True)
class PrefillConfig:
    """Queries and keys of a block, warps of a program, and stages of the pipeline that loads keys and values."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodeConfig:
    """Keys of a block, warps, stages, and how many programs each SM should get."""

    block_n: int
    num_warps: int
    num_stages: int
    programs: int


# (bytes an element, block width, causal); the block width is the larger one of keys and values.
_PREFILL_90 = {
    (2, 16, False): PrefillConfig(64, 64, 4, 3),
    (2, 16, True): PrefillConfig(64, 64, 4, 3),
    (2, 32, False): PrefillConfig(64, 64, 4, 3),
    (2, 32, True): PrefillConfig(64, 64, 4, 3),
    (2, 64, False): PrefillConfig(64, 64, 4, 3),
    (2, 64, True): PrefillConfig(64, 64, 4, 3),
    (2, 128, False): PrefillConfig(64, 64, 4, 3),
    (2, 128, True): PrefillConfig(64, 64, 4, 3),
    (2, 256, False): PrefillConfig(128, 64, 8, 2),
    (2, 256, True): PrefillConfig(128, 64, 8, 2),
    (4, 64, False): PrefillConfig(32, 64, 4, 3),
    (4, 64, True): PrefillConfig(32, 64, 4, 3),
    (4, 128, False): PrefillConfig(32, 32, 4, 3),
    (4, 128, True): PrefillConfig(16, 64, 4, 2),
}
# (bytes an element, block width), where blocks of _FEW_BLOCK_M queries would leave half of the GPU idle.
_FEW_PREFILL_90 = {
    (4, 16): PrefillConfig(16, 128, 4, 2),
    (4, 32): PrefillConfig(16, 128, 4, 2),
    (4, 64): PrefillConfig(16, 128, 4, 2),
    (4, 128): PrefillConfig(16, 64, 4, 2),
}
_FEW_BLOCK_M = 64
_PREFILL_80 = {
    (2, 16): PrefillConfig(128, 64, 4, 3),
    (2, 32): PrefillConfig(128, 64, 4, 3),
    (2, 64): PrefillConfig(128, 64, 4, 3),
    (2, 128): PrefillConfig(128, 32, 4, 3),
    (2, 256): PrefillConfig(64, 32, 4, 2),
    (4, 16): PrefillConfig(64, 32, 4, 2),
    (4, 32): PrefillConfig(64, 32, 4, 2),
    (4, 64): PrefillConfig(64, 32, 4, 2),
    (4, 128): PrefillConfig(32, 32, 4, 2),
    (4, 256): PrefillConfig(32, 32, 8, 1),
}
_DECODE_90 = {
    (2, 16): DecodeConfig(128, 4, 4, 2),
    (2, 32): DecodeConfig(128, 4, 4, 2),
    (2, 64): DecodeConfig(128, 4, 3, 2),
    (2, 128): DecodeConfig(128, 4, 3, 1),
    (2, 256): DecodeConfig(32, 4, 3, 2),
}
_DECODE_80 = {
    (2, 16): DecodeConfig(128, 4, 4, 2),
    (2, 32): DecodeConfig(128, 4, 4, 2),
    (2, 64): DecodeConfig(64, 4, 3, 2),
    (2, 128): DecodeConfig(32, 4, 3, 2),
    (2, 256): DecodeConfig(32, 4, 2, 1),
    (4, 16): DecodeConfig(64, 4, 3, 2),
    (4, 32): DecodeConfig(64, 4, 3, 2),
    (4, 64): DecodeConfig(32, 4, 2, 2),
    (4, 128): DecodeConfig(16, 4, 2, 2),
    (4, 256): DecodeConfig(16, 4, 2, 1),
}


def block_width(width: int) -> int:
    """The lanes that a head size takes: a power of two from 16 on, as the matrix units want it."""
    return max(16, 1 << (width - 1).bit_length())


def prefill_config(capability: int, nbytes: int, width: int, causal: bool, few: bool = False) -> PrefillConfig:
    """For a compute capability (90), bytes an element, and a block width, 16 to 256.

    ``few``: that of ``few_queries``. GPUs from 120 on have as little shared memory as 86 and 89: what all tables but
    those for 90 keep to, 99 KiB.
    """
    if 90 <= capability < 120:
        if few and (found := _FEW_PREFILL_90.get((nbytes, width))) is not None:
            return found
        if (found := _PREFILL_90.get((nbytes, width, causal))) is not None:
            return found
    return _PREFILL_80[nbytes, width]


def few_queries(pairs: Any, queries: Any, processors: int) -> Any:
    """Whether ``pairs`` of a sequence and a head have less work than keeps ``processors`` busy, as a condition."""
    return pairs * ((queries + _FEW_BLOCK_M - 1) // _FEW_BLOCK_M) <= processors // 2


def decode_config(capability: int, nbytes: int, width: int) -> DecodeConfig:
    """Likewise for few queries."""
    if 90 <= capability < 120 and (found := _DECODE_90.get((nbytes, width))) is not None:
        return found
    return _DECODE_80[nbytes, width]


def decode_rows(nbytes: int, width: int) -> int:
    """The most rows, queries times heads that share keys, for which the decode kernel has shared memory."""
    return 64 if nbytes * width <= 512 else 16
