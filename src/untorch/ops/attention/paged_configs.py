"""How the paged attention kernels are launched: widths as powers of two, tiles, warps and stages.

Up to 256 lanes the tiles are those of the kernels for contiguous keys (configs.py). They were not tuned for pages, and
those for wider heads are what fits into shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from untorch.ops.attention.configs import (
    DecodeConfig,
    PrefillConfig,
    block_width,
    decode_config,
    decode_rows,
    prefill_config,
)

__all__ = ["BUSY", "MAX_WIDTH", "MAX_WIDTH_V", "PagedConfig", "paged_config", "split_width"]

MAX_WIDTH, MAX_WIDTH_V = 576, 512
BUSY = 4  # sequences
_PREFILL_90_128 = PrefillConfig(128, 128, 8, 2)
_MAX_FLOAT32 = 256
_FIRST_WITH_FP8 = 89


@dataclass(frozen=True)
class PagedConfig:
    """Of both kernels.

    rows: BLOCK_M of decode. busy_programs: decode's programs an SM from BUSY sequences on.
    """

    prefill: PrefillConfig
    decode: DecodeConfig
    rows: int
    busy_programs: int


def split_width(width: int) -> tuple[int, int]:
    """Powers of two that hold a width together: 576 → 512, 64; 20 → 16, 16; 128 → 128, 0."""
    first = max(16, 1 << (width.bit_length() - 1))
    return first, block_width(width - first) if width > first else 0


def paged_config(
    capability: int, nbytes: int, width: int, width_v: int, group: int, *, fp8: bool = False
) -> PagedConfig:
    """For a compute capability (90), bytes an element of q, head widths, and heads of q for each KV head.

    fp8: whether the pages hold FP8. Raises ValueError for heads that do not fit into shared memory, and for FP8 on a
    GPU without conversions of it.
    """
    if fp8 and capability < _FIRST_WITH_FP8:
        raise ValueError(
            f"paged_attention: expected a GPU of sm_{_FIRST_WITH_FP8} or newer for keys and values in FP8, got "
            f"sm_{capability}: use int8 (kv_dtype='int8')"
        )
    most, most_v = (_MAX_FLOAT32, _MAX_FLOAT32) if nbytes == 4 else (MAX_WIDTH, MAX_WIDTH_V)
    if width > most or width_v > most_v:
        raise ValueError(
            f"paged_attention: expected heads of at most {most} for keys and {most_v} for values on a GPU"
            f"{' in float32' if nbytes == 4 else ''}, got {width} and {width_v}"
        )
    widest = block_width(max(width, width_v))
    if widest > 256:
        large = 90 <= capability < 120 or capability == 80
        prefill = PrefillConfig(64, 32, 8, 1) if large else PrefillConfig(32, 16, 4, 1)
        decode = DecodeConfig(32, 8, 1, 1) if large else DecodeConfig(16, 4, 1, 1)
        return PagedConfig(prefill, decode, 16, decode.programs)
    rows = min(decode_rows(nbytes, widest), max(16, 1 << (group - 1).bit_length()))
    decode = decode_config(capability, nbytes, widest)
    # µs on an H200 with 1 and 2 programs: 1 sequence of 150 keys 8.3 and 9.7, 8000 keys 16.2 and 15.0; 4 of 4000 keys
    # 32.5 and 26.8; 16 of 4000 keys 76.9 and 73.3.
    if 90 <= capability < 120 and (nbytes, widest) == (2, 128):
        return PagedConfig(_PREFILL_90_128, decode, rows, 2)
    return PagedConfig(prefill_config(capability, nbytes, widest, causal=True), decode, rows, decode.programs)
