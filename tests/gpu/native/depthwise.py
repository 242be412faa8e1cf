"""Random depthwise convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[Any, ...]]


@st.composite
def depthwise_problems(draw: st.DrawFn, dtypes: Sequence[torch.dtype], least_dimensions: int) -> Problem:
    """Input, weight, bias and ATen's further arguments of kernels, strides and dilations of any size."""
    n, dtype = draw(st.integers(least_dimensions, 3)), draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    channels = draw(st.integers(2, 40))
    kernel = [draw(st.integers(1, 11)) for _ in range(n)]
    stride, dilation = ([draw(st.integers(1, 3)) for _ in range(n)] for _ in range(2))
    padding = [draw(st.integers(0, 2 * k)) for k in kernel]
    size = [
        draw(st.integers(max(1 + d * (k - 1) - 2 * p, 1), 34))
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    x = torch.randn(draw(st.integers(1, 2)), channels, *size, generator=generator).to(dtype)
    weight = torch.randn(channels, 1, *kernel, generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype) if draw(st.booleans()) else None
    return x, weight, bias, (stride, padding, dilation, False, [0] * n, channels)
