"""Runs PyTorch models that were compiled ahead of time, without PyTorch.

``untorch.load(path)`` opens a ``.pt2`` file. ``untorch.export.export`` makes one; it needs torch, and nothing in here
imports it.
"""

import typing as _typing

from untorch._core import Tensor
from untorch.runtime.arrays import empty, zeros
from untorch.runtime.errors import (
    ArgumentTypeError,
    ClosedError,
    DeviceLostError,
    FileIsDirectoryError,
    FileMissingError,
    FileOpenError,
    FilePermissionError,
    InvalidArgumentError,
    InvalidFileError,
    ModelError,
    OutOfMemoryError,
    SystemResourceError,
    UnknownMethodError,
    UnsupportedError,
    UntorchError,
    UntrustedError,
)
from untorch.runtime.method import Graph, Method
from untorch.runtime.program import Program, Session, load
from untorch.runtime.registry import register_kernel
from untorch.runtime.seed import initial_seed, manual_seed
from untorch.runtime.spec import SymbolicDim, TensorSpec
from untorch.runtime.stream import CurrentStream, current_stream, stream

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:
    from untorch import pipeline
    from untorch.predictor import Predictor
    from untorch.profiler import profile
    from untorch.trust.policy import Identity, TrustPolicy
else:  # for type checkers every name would exist

    def __getattr__(name: str) -> object:
        if name in ("Identity", "TrustPolicy"):  # their module imports others that take milliseconds
            from untorch.trust import policy

            return getattr(policy, name)
        if name == "Predictor":  # for other processes
            from untorch import predictor

            return predictor.Predictor
        if name == "profile":  # for those who look for time
            from untorch import profiler

            return profiler.profile
        if name == "pipeline":  # a module that can be called; its optional packages are imported where they are used
            import importlib

            return importlib.import_module("untorch.pipeline")
        if name in ("export", "quant", "ops"):
            raise AttributeError(f"untorch.{name} needs torch and is not imported with untorch: import untorch.{name}")
        if name in ("llm", "serve", "speech"):
            raise AttributeError(f"untorch.{name} is not imported with untorch: import untorch.{name}")
        raise AttributeError(f"module 'untorch' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def cmake_dir() -> str:
    """The directory of untorchConfig.cmake, for CMake: ``find_package(untorch)`` with ``-Duntorch_DIR=…``."""
    import pathlib

    return str(pathlib.Path(__file__).parent / "cmake")


__all__ = [
    "ArgumentTypeError",
    "ClosedError",
    "CurrentStream",
    "DeviceLostError",
    "FileIsDirectoryError",
    "FileMissingError",
    "FileOpenError",
    "FilePermissionError",
    "Graph",
    "Identity",
    "InvalidArgumentError",
    "InvalidFileError",
    "Method",
    "ModelError",
    "OutOfMemoryError",
    "Predictor",
    "Program",
    "Session",
    "SymbolicDim",
    "SystemResourceError",
    "Tensor",
    "TensorSpec",
    "TrustPolicy",
    "UnknownMethodError",
    "UnsupportedError",
    "UntorchError",
    "UntrustedError",
    "cmake_dir",
    "current_stream",
    "empty",
    "initial_seed",
    "load",
    "manual_seed",
    "pipeline",
    "profile",
    "register_kernel",
    "stream",
    "zeros",
]
