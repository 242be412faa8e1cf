"""Activations for GEMM tests, in every shape and stride that a caller may pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def rounded_once(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64, to the nearest of ``dtype``'s normal numbers. PyTorch rounds twice: to float32 on the way to half types."""
    fraction, exponent = torch.frexp(tensor)
    return torch.ldexp(torch.round(fraction * 2.0 ** _DIGITS[dtype]), exponent - _DIGITS[dtype])


_FORMS = ["rows", "wide", "repeated", "batch", "transposed batch", "vector", "offset"]


def drawn_rows(draw: Callable[..., Any], random: Callable[..., torch.Tensor], m: int, width: int) -> torch.Tensor:
    """[.., width] with m rows, or another number of them. random(*shape) makes a tensor on the device under test."""
    match draw(st.sampled_from(_FORMS)):
        case "wide":
            return random(m, width + 8)[:, :width]
        case "offset":
            return random(m, width + 3)[:, 3:]
        case "repeated":
            return random(width).expand(m, width)
        case "batch":
            return random(2, m, 1, width)
        case "transposed batch":
            return random(m, 3, width).transpose(0, 1)
        case "vector":
            return random(width)
        case _:
            return random(m, width)
