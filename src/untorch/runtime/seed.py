"""``manual_seed``: one seed for the random operators of the native library and for those that are Python kernels."""

from __future__ import annotations

from untorch import _core
from untorch.runtime import registry
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["initial_seed", "manual_seed"]


def initial_seed() -> int:
    """The seed of the process's generator: the last one of ``manual_seed``, or the one that it started with."""
    return _core.initial_seed()


def manual_seed(seed: int) -> None:
    """Seed every random operator of the process.

    Operators with a C function then draw the numbers that eager PyTorch draws after ``torch.manual_seed(seed)``; Python
    kernels (multinomial and the like) repeat their own.

    Args:
        seed: From 0 to 2**64 - 1.

    Raises:
        ArgumentTypeError: The seed is no integer.
        InvalidArgumentError: The seed is outside that range.
    """
    text = f"manual_seed: expected an integer from 0 to 2**64 - 1 for `seed`, got {seed!r}"
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentTypeError(text)
    if not 0 <= seed < 2**64:
        raise InvalidArgumentError(text)
    _core.manual_seed(seed)
    registry.manual_seed(seed)
