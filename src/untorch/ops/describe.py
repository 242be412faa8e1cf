"""How the operators' errors show what they were given."""

from __future__ import annotations

import torch

__all__ = ["kind_of"]


def kind_of(tensor: torch.Tensor) -> str:
    """ "int32 [4, 8]", and whether it is contiguous."""
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{contiguous}"
