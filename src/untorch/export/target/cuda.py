"""The target CUDA with its GPU in this machine, where kernels are compiled and timed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from untorch.export import toolkit
from untorch.export.host_cpu import HostCpu
from untorch.export.kernel_choice import read_tuning, recording
from untorch.export.kernel_sources import keeping_sources
from untorch.export.matmul_choice import INDUCTOR_OPTIONS, timing
from untorch.export.patches import toolkit_folder
from untorch.export.target.base import AotCompile, InductorRun, Produced, Target, compile_here
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from untorch.export.method import Method
    from untorch.export.options import ExportOptions

__all__ = ["CudaTarget", "GpuCode"]

_DEVICE = re.compile(r"cuda(?::(\d{1,4}))?")


@dataclass(frozen=True)
class GpuCode(Target):
    """What code for NVIDIA GPUs has in common, wherever it is compiled.

    gpu_architecture: "sm_90".
    """

    device = "cuda"
    gpu_architecture: str

    @property
    def architecture(self) -> str:
        """The GPU architecture of the code."""
        return self.gpu_architecture

    def check_request(self, method: Method) -> None:
        """A file that record_tuning adds to must be one of tunings."""
        record = method.options.record_tuning
        if record is not None and Path(record).exists():
            read_tuning(record)

    @contextlib.contextmanager
    def compile_context(self, reads_shared_buffers: bool = False) -> Iterator[None]:
        """With the toolkit's folder."""
        with super().compile_context(reads_shared_buffers), toolkit_folder():
            yield

    def inductor_config(self, options: ExportOptions) -> dict[str, Any]:
        """One file: the kernels lie in the library."""
        config: dict[str, Any] = {"aot_inductor.embed_kernel_binary": True}
        return config | INDUCTOR_OPTIONS if options.matmul == "auto" else config

    def manifest_fields(self) -> dict[str, Any]:
        """The architecture, the version of the assembler that made the code, and where PyTorch would use TF32."""
        ptxas = toolkit.ptxas_version(self.architecture)
        return {"gpu_architecture": self.architecture, "ptxas": ptxas, "tf32": _tf32_settings()}


def _tf32_settings() -> dict[str, bool]:
    """What torch.backends allows for float32 convolutions and GEMMs on CUDA."""
    backends: Any = torch.backends
    kinds = {"convolution": backends.cudnn.conv, "matmul": backends.cuda.matmul}
    return {name: kind.fp32_precision == "tf32" for name, kind in kinds.items()}


@dataclass(frozen=True)
class CudaTarget(GpuCode):
    """The GPU ``index_device``, as torch calls it ("cuda:0"), on which the method's tensors lie."""

    index_device: str

    @classmethod
    def resolve(cls, device: object, arch: object, host: HostCpu) -> CudaTarget | None:
        """For device="cuda" or "cuda:1" without an arch."""
        match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
        if arch is not None or match is None:
            return None
        if torch.version.cuda is None:
            raise UnsupportedError(
                f"export: device={device!r} needs PyTorch with CUDA, and {torch.__version__} was built without it: "
                f"install a CUDA build on a machine with an NVIDIA GPU, or name the GPU to compile for: arch='sm_90'"
            )
        if not torch.cuda.is_available():
            raise UnsupportedError(
                f"export: device={device!r} needs a GPU on the build machine, since kernels are compiled and tuned on "
                f"it, and torch finds none: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or name the GPU to compile "
                f"for: arch='sm_90'"
            )
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if match[1] is None else int(match[1])
        if index >= count:
            raise InvalidArgumentError(
                f"export: device={device!r}: this machine has {count} GPU{'s' if count > 1 else ''}, the last is "
                f"cuda:{count - 1}"
            )
        toolkit.cuda_home()
        toolkit.driver_library()
        major, minor = torch.cuda.get_device_capability(index)
        return cls(f"sm_{major}{minor}", f"cuda:{index}", host=host)

    @property
    def tensor_home(self) -> str:
        """The GPU."""
        return self.index_device

    def check_request(self, method: Method) -> None:
        """Kernels are timed, so a tuning file is refused."""
        super().check_request(method)
        if method.options.tuning is not None:
            read_tuning(method.options.tuning)
            raise InvalidArgumentError(
                f"method {method.name!r}: option tuning: a tuning file is for a cross-compilation target, "
                f"arch='sm_90': on a GPU kernels are timed"
            )

    @contextlib.contextmanager
    def compile_context(self, reads_shared_buffers: bool = False) -> Iterator[None]:
        """With this GPU as the current device."""
        with super().compile_context(reads_shared_buffers), torch.cuda.device(self.index_device):
            yield

    def retries_with_math_attention(self, options: ExportOptions) -> bool:
        """torch.export asks the fused operator on the GPU for strides, which may tie sizes that vary."""
        return options.attention != "native"

    def inductor_config(self, options: ExportOptions) -> dict[str, Any]:
        """Kernels are compiled by torch's own pool of processes."""
        return super().inductor_config(options) | {"compile_threads": None}

    def link_libraries(self, folder: Path) -> None:
        """The driver."""
        (folder / "libcuda.so").symlink_to(toolkit.driver_library())

    def begin_inductor(
        self, method: Method, aot_compile: AotCompile, example: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> InductorRun:
        """In this process; the fastest configurations are recorded."""
        with (
            recording(self.architecture) as choices, keeping_sources() as sources,
            timing(choices[self.architecture]),
        ):  # fmt: skip
            paths, tensors = compile_here(method, aot_compile, example)
        return InductorRun.of(Produced(paths, tensors, frozenset(), choices, sources))
