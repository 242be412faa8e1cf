"""Chooses what computes a GEMM with ``matmul="auto"``: the runtime's operator, or a Triton template and its tile.

Templates fuse the pointwise operators of the epilogue, which saves a launch and a round trip through memory. On a GPU,
Inductor times them beside the operator. For a cross-compilation target, a tuning file has the fastest for such a GEMM;
else a model of the GPU estimates it:

- An SM reaches a share of its peak that grows with the tile's arithmetic intensity and with the warps on it. Occupancy
  is limited by threads, registers and shared memory.
- Each step along k waits for memory once for all stages of the pipeline.
- Operands and results go through memory once, at the bandwidth that this many SMs reach.
- The runtime's library has the tiles below, split-K, and is closer to the GPU's peak; for small M it has GEMV kernels,
  which memory bandwidth bounds.

With dynamic sizes, one tile would have to serve all of them: without a tuning file the operator stays.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from untorch.export.gpus import LATENCY, GpuModel

__all__ = ["INDUCTOR_OPTIONS", "LIBRARY", "Gemm", "Tile", "choosing", "estimate_library", "estimate_tile", "timing"]

INDUCTOR_OPTIONS = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "max_autotune_conv_backends": "ATEN",  # convolutions stay the runtime's
    "triton.autotune_cublasLt": False,  # its way to add a bias has no C function
}
LIBRARY = {"library": True}  # the runtime's operator, in a tuning file

_LAUNCH = 2e-6  # seconds that a kernel costs, whatever it does
_MEMORY = 0.85  # of the data sheet's bandwidth
_BEST_TEMPLATE, _BEST_LIBRARY = 0.7, 0.82  # of the data sheet's rate
_WARPS = 8  # that keep an SM busy
_BEST_SIDE = 64.0  # rows · columns / (rows + columns) of a tile from which it is reached
_FLOAT32 = 16.0  # how many times slower float32 GEMMs are
_GEMV_M = 16  # the largest M of the runtime's GEMV kernels
_TIE = 1.05  # estimates are no better than that: the library stays


@dataclass(frozen=True)
class Gemm:
    """batch times [m, k] · [k, n], with elements of so many bytes."""

    m: int
    n: int
    k: int
    batch: int = 1
    element: int = 2

    @property
    def bytes_moved(self) -> int:
        """Of operands and results, once each."""
        return self.batch * self.element * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class Tile:
    """A CTA tile: m, n, k of a step; pipeline stages in shared memory; warps; parts of k (split-K)."""

    m: int
    n: int
    k: int
    stages: int = 3
    warps: int = 4
    parts: int = 1


_LIBRARY_TILES = [
    Tile(m, n, k, stages, 8 if m * n > 8192 else 4, parts)
    for m, n in ((32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
    for k, stages in ((32, 4), (64, 3), (64, 4), (64, 6), (128, 4))
    for parts in (1, 2, 4, 8)
]


def estimate_tile(gpu: GpuModel, gemm: Gemm, tile: Tile, best: float = _BEST_TEMPLATE) -> float:
    """Seconds of the GEMM with such tiles; infinity where they do not fit. Good for a ranking, not for a forecast."""
    shared = (tile.m + tile.n) * tile.k * gemm.element * tile.stages
    if shared > gpu.shared_memory:
        return math.inf
    registers = 64 + tile.m * tile.n // (32 * tile.warps)  # of a thread
    if registers > 255:
        return math.inf
    depth = -(-gemm.k // tile.parts)
    ctas = -(-gemm.m // tile.m) * -(-gemm.n // tile.n) * gemm.batch * tile.parts
    steps = -(-depth // tile.k)
    share = best * math.sqrt(min(tile.m * tile.n / (tile.m + tile.n) / _BEST_SIDE, 1.0))
    rate = gpu.matrix_rate * 1e12 / gpu.sms / (_FLOAT32 if gemm.element == 4 else 1.0)
    work = 2.0 * tile.m * tile.n * tile.k * steps

    def wave(count: int) -> float:
        each = -(-count // gpu.sms)
        if each == 0:
            return 0.0
        waits = LATENCY * (1 + (steps - 1) / max(tile.stages - 1, 1))
        return max(each * work / (rate * share * min(each * tile.warps / _WARPS, 1.0)), waits)

    wave_size = gpu.sms * max(gpu.resident_ctas(tile.warps, registers, shared), 1)
    multiplying = ctas // wave_size * wave(wave_size) + wave(ctas % wave_size)
    sums = 0.0 if tile.parts == 1 else _LAUNCH + 8.0 * tile.parts * gemm.m * gemm.n / (gpu.bandwidth * 1e9)
    moving = gemm.bytes_moved / (gpu.bandwidth_for(min(ctas, wave_size)) * _MEMORY)
    return _LAUNCH + sums + max(multiplying, moving)


def estimate_library(gpu: GpuModel, gemm: Gemm) -> float:
    """Seconds of the runtime's operator, which takes the best of its tiles."""
    times = [estimate_tile(gpu, gemm, tile, _BEST_LIBRARY) for tile in _LIBRARY_TILES]
    if gemm.m <= _GEMV_M:
        times.append(_LAUNCH + LATENCY + gemm.bytes_moved / (gpu.bandwidth * 1e9 * _MEMORY))
    return min(times)


@contextlib.contextmanager
def choosing(
    gpu: GpuModel, tuning: Mapping[str, Mapping[str, Any]], found: dict[str, dict[str, Any]]
) -> Iterator[None]:
    """Leaves Inductor one choice for each GEMM: what ``tuning`` has, else the best estimate.

    found: gets what was taken, by the GEMM's key.
    """
    from torch._inductor.select_algorithm import ExternKernelCaller, get_algorithm_selector_cache

    def one(choices: list[Any]) -> list[Any]:
        candidates = {choice: config for choice in choices if (config := _config_of(choice)) is not None}
        if len(choices) < 2:
            return choices
        if len(candidates) < 2 or LIBRARY not in candidates.values():  # another kind: the operator, where there is one
            return [next((choice for choice in choices if isinstance(choice, ExternKernelCaller)), choices[0])]
        name, gemm = _gemm_of(choices[0])
        known = tuning.get(name, {}).get("config", LIBRARY if _is_dynamic(choices[0]) else None)
        chosen = next((choice for choice, config in candidates.items() if config == known), None)
        if chosen is None:
            chosen = _best(gpu, gemm, candidates, _saved_behind(gpu, gemm))
        found[name] = {"kernel": name, "config": candidates[chosen]}
        return [chosen]

    functions = get_algorithm_selector_cache().preprocessing_fns
    functions.append(one)
    try:
        yield
    finally:
        functions.remove(one)


@contextlib.contextmanager
def timing(found: dict[str, dict[str, Any]]) -> Iterator[None]:
    """found: gets the fastest choice of each GEMM that Inductor times meanwhile."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    def keep(timings: dict[Any, float], *_: Any) -> None:
        known = {choice: config for choice in timings if (config := _config_of(choice)) is not None}
        if known:
            fastest = min(known, key=lambda choice: timings[choice])
            name, _gemm = _gemm_of(fastest)
            found[name] = {"kernel": name, "config": known[fastest]}

    functions = get_algorithm_selector_cache().feedback_saver_fns
    functions.append(keep)
    try:
        yield
    finally:
        functions.remove(keep)


def _best(gpu: GpuModel, gemm: Gemm, candidates: Mapping[Any, Mapping[str, Any]], saved: float) -> Any:
    library = next(choice for choice, config in candidates.items() if config == LIBRARY)
    best, least = library, estimate_library(gpu, gemm) / _TIE
    for choice, config in candidates.items():
        if config == LIBRARY:
            continue
        m, n, k = (config[f"BLOCK_{axis}"] for axis in "MNK")
        tile = Tile(m, n, k, config["num_stages"], config["num_warps"])
        seconds = estimate_tile(gpu, gemm, tile) - saved
        if seconds < least:
            best, least = choice, seconds
    return best


def _config_of(choice: Any) -> dict[str, Any] | None:
    """What tells a choice from the others; None for a kind that is not taken without being timed."""
    from torch._inductor.select_algorithm import ExternKernelCaller, TritonTemplateCaller

    if isinstance(choice, ExternKernelCaller):
        return dict(LIBRARY) if choice.name in ("mm", "addmm", "bmm", "baddbmm") else None
    if not isinstance(choice, TritonTemplateCaller):
        return None
    tile = re.findall(r"\d+", str(choice.log_info.get("tile_shape", "")))
    if len(tile) != 3:
        return None
    values = dict(zip(("BLOCK_M", "BLOCK_K", "BLOCK_N"), map(int, tile), strict=True))
    return values | {name: choice.log_info.get(name) for name in ("GROUP_M", "num_stages", "num_warps")}


def _gemm_of(choice: Any) -> tuple[str, Gemm]:
    """Its key in a tuning file, and its sizes."""
    from torch._inductor.virtualized import V

    def sizes(node: Any) -> tuple[int, ...]:
        return tuple(V.graph.sizevars.optimization_hints(node.get_size(), fallback=1))

    left, right = choice.input_nodes[-2:]
    (*batch, m, k), n = sizes(left), sizes(right)[-1]
    gemm = Gemm(m, n, k, math.prod(batch), left.get_dtype().itemsize)
    strides = ["columns" if node.get_stride()[-1] != 1 else "rows" for node in (left, right)]
    added = " + bias" if len(choice.input_nodes) > 2 else ""
    dtype = str(left.get_dtype()).removeprefix("torch.")
    return f"gemm {gemm.batch} x [{m}, {k}] {strides[0]} . [{k}, {n}] {strides[1]}{added}, {dtype}", gemm


def _is_dynamic(choice: Any) -> bool:
    sizes = [size for node in choice.input_nodes[-2:] for size in node.get_size()]
    return not all(isinstance(size, int) or size.is_number for size in sizes)


def _saved_behind(gpu: GpuModel, gemm: Gemm) -> float:
    """Seconds that a template saves by fusing the pointwise operators of the epilogue."""
    from torch._inductor.virtualized import V

    node = getattr(V.graph, "current_node", None)
    if not isinstance(node, fx.Node) or not _ends_in_memory(node):
        return 0.0
    result = gemm.batch * gemm.m * gemm.n * gemm.element
    return _LAUNCH + 2.0 * result / (gpu.bandwidth * 1e9 * _MEMORY)


def _ends_in_memory(gemm: fx.Node) -> bool:
    """Whether pointwise operators follow that no reduction would take into its own kernel."""
    waiting, seen, pointwise = list(gemm.users), {gemm}, False
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise in tags:
            pointwise = True
        elif node.target is not operator.getitem and not _is_view(node):
            if _reduces(node):
                return False
            continue
        waiting.extend(node.users)
    return pointwise


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.alias_info is not None for argument in schema.arguments)


def _reduces(node: fx.Node) -> bool:
    name = str(node.target)
    return any(f"aten.{word}" in name for word in ("sum", "mean", "amax", "amin", "var", "argmax", "argmin", "prod"))
