"""The grouped GEMM that transformers' mixtures of experts call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.kernels.arrays import Array, kernel, promoted

KERNELS: dict[str, Callable[..., Any]] = {}


@kernel(KERNELS, "transformers::grouped_mm_fallback")
def grouped_mm_fallback(input: Array, weight: Array, offs: Array) -> Array:
    """input (tokens, K), sorted by expert, times weight (experts, K, N); offs (experts): where each one's rows end.

    Half types are multiplied in float32. Rows behind the last expert's are 0.
    """
    if input.ndim != 2 or weight.ndim != 3 or weight.shape[1] != input.shape[1] or offs.shape != weight.shape[:1]:
        raise InvalidArgumentError(
            "transformers::grouped_mm_fallback: expected input (tokens, K), weight (experts, K, N) and offs (experts), "
            f"got the shapes {input.shape}, {weight.shape} and {offs.shape}"
        )
    y = numpy.zeros((input.shape[0], weight.shape[2]), input.dtype)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        if not start <= end <= input.shape[0]:
            raise InvalidArgumentError(
                "transformers::grouped_mm_fallback: argument `offs`: must not decrease and stay within "
                f"{input.shape[0]}, got {end} at {expert}"
            )
        if start < end:
            y[start:end] = promoted(input[start:end]) @ promoted(weight[expert])
        start = end
    return y
