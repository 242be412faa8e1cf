"""The seed of random operators: one for those in the native library and those that are Python kernels."""

from __future__ import annotations

from untorch import _core
from untorch.runtime import registry
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["manual_seed"]


def manual_seed(seed: int) -> None:
    """Seed every random operator of the process.

    Operators with a C function then draw the numbers that eager PyTorch draws after ``torch.manual_seed(seed)``; Python
    kernels (multinomial and the like) repeat their own.

    Args:
        seed: From 0 to 2**64 - 1.

    Raises:
        InvalidArgumentError: The seed is no integer in that range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidArgumentError(f"manual_seed: expected an integer from 0 to 2**64 - 1 for `seed`, got {seed!r}")
    _core.manual_seed(seed)
    registry.manual_seed(seed)
