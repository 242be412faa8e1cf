"""The models of the GPU tests, and their packages: each is compiled once for all tests and test processes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from untorch.archive import MANIFEST, ArchiveReader, ArchiveWriter
from untorch.export import export

N = 1 << 20
HEAVY_WEIGHTS = 64 << 20  # elements; 256 MiB


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Chain(nn.Module):
    """x + 20 · y. Long enough that the GPU is still at it when the call returns; exact in float32."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = x
        for _ in range(20):
            total = torch.cumsum(total, 0) * 0 + total + y
        return total, {"double": x * 2, "sum": x + y}


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += x
        return self.calls * 1


class Outer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x[:, None] * x[None, :], 1)


class Filter(nn.Module):
    """Transforms to a spectrum and back, whole and by windows."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.hann_window(64, device=x.device)
        spectrum = torch.stft(x, 64, 16, window=window, return_complex=True)
        whole = torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=x.shape[-1])
        return whole, torch.istft(spectrum, 64, 16, window=window, length=x.shape[-1])


class Nonzero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x)


class Echo(nn.Module):
    """The input itself: its address tells whether a graph read the caller's memory or a copy."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x * 2 + 1


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.rand_like(x), F.dropout(x, 0.5, training=True)


class Heavy(nn.Module):
    """256 MiB of weights, next to no work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.arange(HEAVY_WEIGHTS) % 1000).float(), requires_grad=False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.weight[index] * 2


class Gemm(nn.Module):
    """For sizes far beyond the runtime's own small-M kernels: cuBLAS computes it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y


class Sound(nn.Module):
    """How speech encoders begin: convolutions over time, which cuDNN runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(128, 384, 3, padding=1), nn.Conv1d(384, 384, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gelu = nn.functional.gelu
        return gelu(self.second(gelu(self.first(x))))


class View:
    """A tensor by the CUDA array interface alone, with no stream that a consumer would have to wait for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, "version": 3, "stream": None}


def exported(folder: Path, name: str, module: Any, args: tuple[Any, ...] | None, **options: Any) -> Path:
    """``folder/name.pt2``, exported for CUDA by the first process; others wait. ``module`` may be several methods."""
    given = {"methods": module} if isinstance(module, dict) else {"model": module, "args": args}
    return _once(folder, name, lambda path: export(**given, path=path, device="cuda", progress=False, **options))


def stock(folder: Path, name: str, module: nn.Module, args: tuple[Any, ...], **options: Any) -> Path:
    """The same by PyTorch's own packager; the arguments lie on the GPU."""

    def make(path: Path) -> None:
        with torch.no_grad():
            program = torch.export.export(module.cuda(), args, **options)
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs={"aot_inductor.check_lowerbound": False}
            )

    return _once(folder, name, make)


def _once(folder: Path, name: str, make: Callable[[Path], Any]) -> Path:
    path = folder / f"{name}.pt2"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            place = folder / f"making-{name}"
            place.mkdir(exist_ok=True)
            make(place / path.name)
            os.replace(place / path.name, path)
    return path


def mlp_module() -> nn.Module:
    """The module that ``mlp`` and ``stock_mlp`` were made from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mlp().eval()


def mlp_batch() -> Any:
    return ({0: Dim("batch", min=1, max=512)},)


def reference(module: nn.Module, x: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.as_tensor(x).cpu().float())


def close(got: Any, want: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(got).cpu(), want, rtol=1e-4, atol=1e-4)


def rewritten(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """A copy of a package, each entry as ``change(name, data)`` says."""
    manifest = None  # a stock package has none
    with ArchiveReader(source) as archive, ArchiveWriter(target) as out:
        for entry in archive:
            if entry.name not in ("archive_format", "archive_version", "byteorder", ".data/version") and (
                entry.name != ".data/serialization_id"
            ):
                data = change(entry.name, archive.read(entry.name))
                if entry.name == MANIFEST:
                    manifest = json.loads(data)
                else:
                    out.write(entry.name, data)
        if manifest is not None:
            out.write_manifest(manifest)
    return target
