"""untorch runs PyTorch models that were compiled ahead of time, without PyTorch.

``untorch.load(path)`` opens a ``.pt2`` file; ``untorch.export`` (needs torch, never imported from here) makes one.
"""

from untorch._core import Tensor, initial_seed
from untorch.runtime.errors import (
    ClosedError,
    InvalidArgumentError,
    InvalidFileError,
    ModelError,
    OutOfMemoryError,
    UnsupportedError,
    UntorchError,
)
from untorch.runtime.graph import Graph
from untorch.runtime.program import Method, Program, load
from untorch.runtime.registry import register_kernel
from untorch.runtime.seed import manual_seed
from untorch.runtime.stream import stream

__version__ = "0.1.0"

__all__ = [
    "ClosedError",
    "Graph",
    "InvalidArgumentError",
    "InvalidFileError",
    "Method",
    "ModelError",
    "OutOfMemoryError",
    "Program",
    "Tensor",
    "UnsupportedError",
    "UntorchError",
    "initial_seed",
    "load",
    "manual_seed",
    "register_kernel",
    "stream",
]
