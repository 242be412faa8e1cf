"""Chooses a Triton kernel's configuration for a cross-compilation target; reads and writes tuning files.

Inductor gives each kernel a few configurations: elements of a CTA along x, y and the reduction, and its warps. On a GPU
they are timed. Without one, a tuning file has the fastest for the same kernel on such a GPU; else a roofline model
estimates them, as generated kernels are bound by memory bandwidth:

- Occupancy: threads, registers and shared memory limit the CTAs of a wave.
- Each iteration of a CTA's loop has one memory latency; then bytes move at the bandwidth that this many SMs reach.
- Rows of a tile that are shorter than a memory sector cost a whole one.
- Register spills cost time.

Hand-written kernels have configurations in their authors' order: the first with the fewest spills is taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from untorch.export.gpus import LATENCY, GpuModel
from untorch.export.patches import kept_kernels
from untorch.runtime.errors import InvalidArgumentError

__all__ = [
    "Candidate",
    "Choices",
    "Work",
    "choose",
    "estimate",
    "kernel_key",
    "read_tuning",
    "recording",
    "write_tuning",
]

# {architecture: {key of a kernel: {"kernel": its name, "config": …}}}
Choices = dict[str, dict[str, dict[str, Any]]]

_FORMAT = "untorch tuning"
_SECTOR = 32  # bytes of memory that come together
_SPILL = 1 / 32  # of the time, for each register
_TIE = 1.02  # estimates are no better than that: Inductor's own order decides


@dataclass(frozen=True)
class Work:
    """What a kernel does: sizes along x, y and z; the length of its reduction, 1 for none; bytes of an element's loads
    and stores; whether the reduction is over the contiguous dimension.
    """

    sizes: tuple[int, ...]
    reduction: int = 1
    bytes_an_element: float = 8.0
    reduces_rows: bool = True


@dataclass(frozen=True)
class Candidate:
    """A compiled configuration. blocks: elements of a CTA along x, y and z; reduction: those of one iteration of it."""

    blocks: tuple[int, ...]
    reduction: int = 1
    warps: int = 4
    registers: int = 32
    spills: int = 0
    shared_memory: int = 0


def estimate(gpu: GpuModel, work: Work, candidate: Candidate) -> float:
    """Seconds of the kernel with this configuration; good for a ranking, not for a forecast."""
    ctas = math.prod(-(-size // max(block, 1)) for size, block in zip(work.sizes, candidate.blocks, strict=True))
    resident = gpu.resident_ctas(candidate.warps, candidate.registers, candidate.shared_memory)
    wave_size = gpu.sms * max(resident, 1)
    iterations = -(-work.reduction // max(candidate.reduction, 1))
    tile = math.prod(candidate.blocks) * min(candidate.reduction, work.reduction) * work.bytes_an_element
    cost = tile * iterations * _waste(work, candidate)

    def wave(count: int) -> float:
        if count == 0:
            return 0.0
        return LATENCY * iterations + count * cost / gpu.bandwidth_for(count)

    seconds = ctas // wave_size * wave(wave_size) + wave(ctas % wave_size)
    return seconds * (1 + candidate.spills * _SPILL)


def _waste(work: Work, candidate: Candidate) -> float:
    """How many times more bytes move than are used, as short rows of a tile take whole sectors."""

    def of(elements: int, size: int) -> float:
        width = min(elements, size) * min(work.bytes_an_element, 4.0)
        return max(_SECTOR / width, 1.0) if size > elements else 1.0

    if work.reduction > 1:
        return of(candidate.reduction, work.reduction) if work.reduces_rows else of(candidate.blocks[0], work.sizes[0])
    # Tiles in two dimensions are for operands whose rows go either way.
    parts = [of(block, size) for block, size in zip(candidate.blocks, work.sizes, strict=True)]
    return math.fsum(parts) / len(parts)


def kernel_key(source: str, sizes: Mapping[str, int] | None, signature: Mapping[str, Any]) -> str:
    """The key of a kernel: a hash of its code without its name, its sizes and its arguments' types."""
    code = re.sub(r"\bdef \w+\(", "def kernel(", source, count=1)
    parts = [code, sorted((sizes or {}).items()), [str(kind) for kind in signature.values()]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def choose(gpu: GpuModel, kernel: Any, tuning: Mapping[str, Mapping[str, Any]]) -> Any:
    """Of a CachingAutotuner's launchers the one to keep. ``tuning``: what a file has for this architecture."""
    launchers = list(kernel.launchers)
    known = tuning.get(_key_of(kernel))
    if known is not None:
        for launcher in launchers:
            if _config_of(launcher) == known["config"]:
                return launcher
    if kernel.custom_kernel or not kernel.size_hints:
        return min(launchers, key=lambda launcher: launcher.n_spills)
    work = _work_of(kernel)
    times = [estimate(gpu, work, _candidate_of(launcher, work)) for launcher in launchers]
    return next(launcher for launcher, time in zip(launchers, times, strict=True) if time <= min(times) * _TIE)


@contextlib.contextmanager
def recording(architecture: str, saves: bool = True) -> Iterator[Choices]:
    """Fills what it gives with the configuration of each kernel that Inductor keeps meanwhile.

    saves: Inductor is to have the compiled kernel, too.
    """
    found: Choices = {architecture: {}}

    def keep(kernel: Any, launcher: Any) -> None:
        name = str(kernel.inductor_meta.get("kernel_name") or kernel.fn.__name__)
        found[architecture][_key_of(kernel)] = {"kernel": name, "config": _config_of(launcher)}

    with kept_kernels(keep, saves):
        yield found


def read_tuning(path: str | os.PathLike[str]) -> Choices:
    """The choices of a file that ``write_tuning`` made. Raises InvalidArgumentError with the file's name."""
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"tuning file {os.fspath(path)!r} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT or document.get("version") != 1:
        raise InvalidArgumentError(
            f"tuning file {os.fspath(path)!r}: expected a file that `untorch tune` wrote, of version 1, got "
            f"something else"
        )
    choices: Choices = document["choices"]
    return choices


def write_tuning(path: str | os.PathLike[str], choices: Choices) -> None:
    """Writes the choices to a file, beside those that it has; of a kernel that it has the new one counts.

    Raises InvalidArgumentError if there is a file of another kind.
    """
    target = Path(path)
    merged = read_tuning(target) if target.exists() else {}
    for architecture, kernels in choices.items():
        merged[architecture] = {**merged.get(architecture, {}), **kernels}
    document = {"format": _FORMAT, "version": 1, "choices": merged}
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    partial.replace(target)


def _key_of(kernel: Any) -> str:
    return kernel_key(kernel.fn.src, kernel.size_hints, kernel.triton_meta.get("signature", {}))


def _config_of(launcher: Any) -> dict[str, Any]:
    config = launcher.config
    values = {name: value for name, value in config.kwargs.items() if isinstance(value, bool | int | float | str)}
    return {**values, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _work_of(kernel: Any) -> Work:
    sizes = {name.rstrip("_"): int(size) for name, size in kernel.size_hints.items()}
    meta = kernel.inductor_meta
    kinds = [str(kind) for kind in kernel.triton_meta.get("signature", {}).values() if str(kind).startswith("*")]
    widths = [int(found[0]) / 8 for kind in kinds if (found := re.findall(r"\d+", kind))] or [4.0]
    moved = max(int(meta.get("num_load", 1)), 1) + (0 if "r0" in sizes else int(meta.get("num_store", 1)))
    hint = str(getattr(meta.get("reduction_hint"), "name", meta.get("reduction_hint", "")))
    return Work(
        sizes=tuple(sizes[axis] for axis in ("x", "y", "z") if axis in sizes),
        reduction=math.prod(size for axis, size in sizes.items() if axis.startswith("r")),
        bytes_an_element=sum(widths) / len(widths) * moved,
        reduces_rows="OUTER" not in hint,
    )


def _candidate_of(launcher: Any, work: Work) -> Candidate:
    config = launcher.config
    names = ("XBLOCK", "YBLOCK", "ZBLOCK")[: len(work.sizes)]
    loops = [int(value) for name, value in config.kwargs.items() if re.fullmatch(r"R\d?_?BLOCK", name)]
    return Candidate(
        blocks=tuple(int(config.kwargs.get(name, 1)) for name in names),
        reduction=math.prod(loops) if loops else work.reduction,  # without a size it is one iteration
        warps=config.num_warps,
        registers=int(getattr(launcher, "n_regs", None) or 32),
        spills=int(launcher.n_spills or 0),
        shared_memory=int(getattr(launcher, "shared", None) or 0),
    )
