"""A fake CUDA driver: the device, the Triton driver and the convolution layouts of a GPU that is compiled for."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from untorch.export.gpus import GpuModel

__all__ = ["FAKE_DEVICE", "Convolution", "Driver", "Properties"]

FAKE_DEVICE = torch.device("cuda", 0)


class Properties:
    """What torch.cuda.get_device_properties gives."""

    def __init__(self, gpu: GpuModel) -> None:
        self.name = f"NVIDIA {gpu.name}"
        self.major, self.minor = gpu.capability
        self.multi_processor_count = gpu.sms
        self.total_memory = gpu.memory
        self.L2_cache_size = gpu.l2
        self.shared_memory_per_block = 48 << 10
        self.shared_memory_per_block_optin = gpu.shared_memory
        self.shared_memory_per_multiprocessor = gpu.shared_memory + 1024
        self.regs_per_multiprocessor = gpu.registers
        self.max_threads_per_multi_processor = gpu.threads
        self.max_threads_per_block = 1024
        self.warp_size = 32
        self.gcnArchName = ""
        self.is_integrated = False


class _Utils:
    """The part of Triton's driver that inspects kernels."""

    def __init__(self, gpu: GpuModel) -> None:
        self._gpu = gpu

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, spilled registers, most threads) of a kernel, which is not loaded."""
        import triton

        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            done = subprocess.run(
                [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        usage = re.search(r"REG:(\d+) STACK:(\d+)", done)
        if usage is None:
            raise RuntimeError(f"cuobjdump does not report the registers of {name}: {done[:200]}")
        return 1, 1, int(usage[1]), int(usage[2]) // 4, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Under the names that Triton has for them."""
        return {
            "max_shared_mem": self._gpu.shared_memory, "max_num_regs": self._gpu.registers, "warpSize": 32,
            "multiprocessor_count": self._gpu.sms, "sm_clock_rate": 0, "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }  # fmt: skip


class _Launcher:
    """Takes the place of what would launch a kernel."""

    global_scratch_size, global_scratch_align, profile_scratch_size = 0, 1, 0

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a kernel was to be launched while cross-compiling, where there is no GPU")


class Driver:
    """Triton's driver for the target."""

    launcher_cls = _Launcher

    def __init__(self, gpu: GpuModel) -> None:
        self._gpu = gpu
        self.utils = _Utils(gpu)

    def get_current_target(self) -> Any:
        """What Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        major, minor = self._gpu.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """Its number."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_current_stream(self, device: int | None = None) -> int:
        """The null stream."""
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        """(9, 0) for sm_90."""
        return self._gpu.capability

    def get_active_torch_device(self) -> torch.device:
        """As torch names it."""
        return FAKE_DEVICE

    @staticmethod
    def is_active() -> bool:
        """It is the one to take."""
        return True


class Convolution:
    """The layout of a convolution's result, by the rule of native/shims/convolution.cpp, which is cuDNN's."""

    @staticmethod
    def select(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        output_padding: Any,
        groups: int,
        bias_sizes: Any = None,
    ) -> bool:
        """Whether cuDNN would be asked; torch hands that on to ``memory_format``."""
        if weight.dim() == 3 or input.dtype == torch.float64 or input.numel() == 0 or weight.numel() == 0:
            return False
        return not (transposed and any(extra >= step for extra, step in zip(output_padding, stride, strict=False)))

    @staticmethod
    def memory_format(input: torch.Tensor, weight: torch.Tensor, by_library: bool) -> torch.memory_format:
        """Channels last where one of the operands is."""
        from torch._prims_common import suggest_memory_format

        formats = [suggest_memory_format(tensor) for tensor in (input, weight)] if by_library else []
        return next((found for found in formats if found != torch.contiguous_format), torch.contiguous_format)
