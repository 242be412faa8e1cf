"""The target CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from untorch.export.errors import CompileError
from untorch.export.host_cpu import HostCpu
from untorch.export.kernel_choice import read_tuning
from untorch.export.target.base import AotCompile, InductorRun, Produced, Target, compile_here
from untorch.runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from untorch.export.method import Method

__all__ = ["CpuTarget"]


@dataclass(frozen=True)
class CpuTarget(Target):
    """The CPU ``host``."""

    device = "cpu"

    @classmethod
    def resolve(cls, device: object, arch: object, host: HostCpu) -> CpuTarget | None:
        """For device="cpu"."""
        return cls(host=host) if device == "cpu" and arch is None else None

    def check_request(self, method: Method) -> None:
        """Options of GPU kernels are refused."""
        options = method.options
        if options.tuning is not None:
            read_tuning(options.tuning)
            raise InvalidArgumentError(
                f"method {method.name!r}: option tuning: a tuning file is for a cross-compilation target, "
                f"arch='sm_90': a CPU has no kernels to choose"
            )
        if options.record_tuning is not None:
            raise InvalidArgumentError(
                f"method {method.name!r}: option record_tuning: a CPU has no kernels to choose, so there is nothing to "
                f"record: device='cuda' has configurations to choose from"
            )
        if options.matmul == "auto":
            raise CompileError(
                f"method {method.name!r}: option matmul: 'auto' is for CUDA, and this method is for the CPU: leave it "
                f"out"
            )

    def begin_inductor(
        self, method: Method, aot_compile: AotCompile, example: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> InductorRun:
        """In this process."""
        return InductorRun.of(Produced(*compile_here(method, aot_compile, example)))
