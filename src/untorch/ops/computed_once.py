"""``untorch::computed_once``: its input, contiguous, in memory of its own.

Inductor computes an elementwise value anew for each Triton kernel of ours that reads it: the tables of a rotary
embedding would be written once a layer. Its lowering of this operator is a buffer that all readers share.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["OPERATOR", "computed_once", "register_lowering"]


@torch.library.custom_op("untorch::computed_once", mutates_args=())
def computed_once(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


@computed_once.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


OPERATOR = torch.ops.untorch.computed_once.default


@cache
def register_lowering() -> None:
    """Tells Inductor what the operator is; once, before the first compile."""
    from torch._inductor import ir, lowering

    @lowering.register_lowering(OPERATOR, type_promotion_kind=None)
    def lower(x: Any) -> Any:
        return ir.ExternKernel.copy_input(x)
