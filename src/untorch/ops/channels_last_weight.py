"""``untorch::channels_last_weight``: a convolution's weight [O, C, H, W] that is stored as [O, H, W, C].

Its value is row-major, so that tracing gives every result the strides that it had before. Inductor's lowering is the
view of the stored tensor: convolutions that Inductor computes channels last read it as it is.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["OPERATOR", "channels_last_weight", "register_lowering"]

_DIMS = (0, 3, 1, 2)


@torch.library.custom_op("untorch::channels_last_weight", mutates_args=())
def channels_last_weight(stored: torch.Tensor) -> torch.Tensor:
    """The row-major weight [O, C, H, W] of a stored one, [O, H, W, C]."""
    return stored.permute(_DIMS).contiguous()


@channels_last_weight.register_fake
def _(stored: torch.Tensor) -> torch.Tensor:
    return stored.new_empty([stored.shape[dim] for dim in _DIMS])


OPERATOR = torch.ops.untorch.channels_last_weight.default


@cache
def register_lowering() -> None:
    """Tells Inductor what the operator is; once, before the first compile."""
    from torch._inductor import lowering

    @lowering.register_lowering(OPERATOR, type_promotion_kind=None)
    def lower(stored: object) -> object:
        return lowering.lowerings[torch.ops.aten.permute](stored, list(_DIMS))
