"""``Target``: what a method is compiled for, and everything that depends on it from tracing to linking.

A new target is one class in a file of its own, and its entry in ``TARGETS`` of this package.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from untorch.export.errors import CompileError
from untorch.export.explain import shorten
from untorch.export.host_cpu import HostCpu, resolve_host_cpu
from untorch.export.kernel_choice import Choices
from untorch.export.passes.report import PassReport
from untorch.export.patches import compile_patches
from untorch.runtime.errors import UntorchError

if TYPE_CHECKING:
    from untorch.export.method import Method
    from untorch.export.options import ExportOptions

__all__ = ["AotCompile", "InductorRun", "Produced", "Target", "compile_here"]

# AOTInductor on a graph and its example inputs: the names of files, and dictionaries of constants.
AotCompile = Callable[[fx.GraphModule, tuple[Any, ...], dict[str, Any]], list[Any]]


@dataclass
class Produced:
    """What AOTInductor made of a method.

    paths: its files. tensors: the constants' values by FQN. on_gpu: those of them that the code expects on the GPU,
    while they lie on the CPU here. choices, sources: the GPU kernels' configurations and their Python.
    """

    paths: list[str]
    tensors: dict[str, torch.Tensor]
    on_gpu: frozenset[str] = frozenset()
    choices: Choices = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class InductorRun:
    """AOTInductor at work on a method, perhaps beside this process.

    finish: waits for it, and gives what it made; raises CompileError, or errors of untorch's. is_done: whether it has
    ended. stop: ends it, where its end is not waited for.
    """

    finish: Callable[[], Produced]
    is_done: Callable[[], bool] = lambda: True
    stop: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, produced: Produced) -> InductorRun:
        """One that has ended."""
        return cls(lambda: produced)


def _native() -> HostCpu:
    return resolve_host_cpu("native")


@dataclass(frozen=True)
class Target(ABC):
    """A device that methods are compiled for, with the CPU that their host code runs on.

    device: where the compiled method runs, "cpu" or "cuda".
    compiles_beside: whether ``begin_inductor`` leaves the work to a process of its own.
    host: the CPU of the host code.
    """

    device: ClassVar[str]
    compiles_beside: ClassVar[bool] = False
    host: HostCpu = field(default_factory=_native, kw_only=True)

    @classmethod
    @abstractmethod
    def resolve(cls, device: object, arch: object, host: HostCpu) -> Target | None:
        """The target that export()'s ``device`` and ``arch`` ask for; None if that is another class's.

        Raises UnsupportedError or InvalidArgumentError if this machine cannot compile for it.
        """

    @property
    def architecture(self) -> str | None:
        """The GPU architecture of the code, "sm_90"; None for the CPU."""
        return None

    @property
    def code_name(self) -> str:
        """What tells the method's codes apart in a file: the GPU architecture, or the level of CPUs."""
        return self.architecture or self.host.name

    @property
    def tensor_home(self) -> str:
        """The torch device on which the method's tensors lie while it is compiled."""
        return "cpu"

    @property
    def tensor_device(self) -> str:
        """The type of ``tensor_home``: "cpu" or "cuda"."""
        return self.tensor_home.partition(":")[0]

    def check_request(self, method: Method) -> None:
        """Raises for options or tensors that do not fit the target, before anything is traced."""
        del method

    def check_graph(self, method: Method, passes: list[PassReport]) -> None:
        """Raises CompileError for operators that the passes left and that the target cannot compile."""
        del method, passes

    @contextlib.contextmanager
    def compile_context(self, reads_shared_buffers: bool = False) -> Iterator[None]:
        """In force while a method is traced and compiled: the patches, and the current device.

        reads_shared_buffers: the method reads buffers that other methods of the file write.
        """
        with torch.no_grad(), compile_patches(self.host, reads_shared_buffers):
            yield

    def retries_with_math_attention(self, options: ExportOptions) -> bool:
        """Whether a method that torch.export refuses is traced again without PyTorch's fused attention."""
        return False

    def inductor_config(self, options: ExportOptions) -> dict[str, Any]:
        """Inductor's settings for the target, above those of every target; None leaves one to torch."""
        return {}

    def link_libraries(self, folder: Path) -> None:
        """Puts libraries that the generated code links, beside libuntorch.so, into ``folder``."""
        del folder

    @abstractmethod
    def begin_inductor(
        self, method: Method, aot_compile: AotCompile, example: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> InductorRun:
        """Calls ``aot_compile`` on the method's graph, without waiting for it where the target compiles beside this
        process. Raises CompileError, or errors of untorch's.
        """

    def manifest_fields(self) -> dict[str, Any]:
        """What the manifest says about the GPU that the code is for."""
        return {}


def compile_here(
    method: Method, aot_compile: AotCompile, example: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The files and the constants' values of a compile in this process. Raises CompileError."""
    try:
        result = aot_compile(method.module, *example)
    except UntorchError:
        raise
    except Exception as error:
        reason = shorten(str(error) or type(error).__name__)
        raise CompileError(f"method {method.name!r}: AOTInductor failed: {reason}") from error
    paths = [item for item in result if isinstance(item, str)]
    tensors = {fqn: tensor for item in result if isinstance(item, dict) for fqn, (tensor, _) in item.items()}
    return paths, tensors
