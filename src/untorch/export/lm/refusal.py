"""Errors of a model's own code while it is checked: refusals that name the layer. Models that are doubtful on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from torch import nn

from untorch.export.errors import CompileError
from untorch.runtime.errors import UntorchError

__all__ = ["MaskError", "refusals"]

# On an H200 tokens of a tiny one differed from PyTorch's, and an index was out of bounds. Why is not known.


class MaskError(CompileError):
    """A model's code reads the mask that stands in for its own."""


@contextmanager
def refusals(model: nn.Module, architecture: str, where: str) -> Iterator[None]:
    """Raises CompileError, with the module whose forward failed. where: "over pages".

    Not for what torch.export traces: its own exceptions have to reach it.
    """
    try:
        yield
    except MaskError as error:
        raise CompileError(f"{architecture}: {_failed(error.__traceback__, model)}: {error}") from error
    except UntorchError:
        raise
    except Exception as error:
        layer = _failed(error.__traceback__, model)
        raise CompileError(f"{architecture}: {layer} fails {where}: {type(error).__name__}: {error}") from error


def _failed(traceback: TracebackType | None, model: nn.Module) -> str:
    """The innermost of the model's modules in whose code the error was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    found = "its forward"
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            found = f"{names[id(module)]} ({type(module).__name__})"
        traceback = traceback.tb_next
    return found
