"""Errors of the build half. Those of the run half are in ``untorch.runtime.errors``."""

from __future__ import annotations

from untorch.runtime.errors import UnsupportedError, UntorchError
from untorch.validation import OptionError

__all__ = ["CompileError", "OptionError", "UnsupportedOperatorsError", "VerificationError"]


class CompileError(UntorchError, RuntimeError):
    """torch.export, a pass or AOTInductor failed; the original error is the cause."""


class UnsupportedOperatorsError(UnsupportedError):
    """The compiled model needs operators that the runtime does not have. ``missing`` lists all of them."""

    def __init__(self, message: str, missing: tuple[object, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class VerificationError(UntorchError, RuntimeError):
    """The written file does not load, does not run, or gives other results than eager PyTorch."""
