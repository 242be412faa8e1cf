"""What multiplies matrices in a method with ``matmul="auto"``: the runtime's operator, or a Triton template's tile.

Templates take the pointwise operators behind a product into their own kernel, which saves a launch and two ways through
memory. On a GPU, Inductor times them beside the operator. Where none can be timed, a tuning file says what was the
fastest for such a product; else a model of the GPU estimates it:

- A multiprocessor multiplies at a share of its rate that grows with tiles, as operands come once for each of their rows
  and columns, and with the warps there. Blocks share one as far as threads, registers and shared memory allow.
- Each step along k waits for memory once for all stages that are under way.
- Operands and results go through memory once, as fast as so many multiprocessors can use it.
- The runtime's library has the tiles below, can divide k between blocks, and is closer to the GPU's peak; and it has
  kernels for few rows, which memory alone bounds.

Where sizes are dynamic, one tile would have to serve all of them: without a tuning file the operator stays.
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

__all__ = ["INDUCTOR_OPTIONS", "LIBRARY", "Product", "Tile", "choosing", "estimate_library", "estimate_tile", "timing"]

INDUCTOR_OPTIONS = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "max_autotune_conv_backends": "ATEN",  # convolutions stay the runtime's
    "triton.autotune_cublasLt": False,  # its way to add a bias has no C function
}
LIBRARY = {"library": True}  # a tuning file's word for the runtime's operator

_LAUNCH = 2e-6  # seconds that a kernel costs, whatever it does
_MEMORY = 0.85  # of the data sheet's bandwidth
_BEST_TEMPLATE, _BEST_LIBRARY = 0.7, 0.82  # of the data sheet's rate
_WARPS = 8  # from which a multiprocessor is busy
_BEST_SIDE = 64.0  # rows · columns / (rows + columns) of a tile from which it is reached
_FLOAT32 = 16.0  # how many times slower products of float32 are
_FEW_ROWS = 16  # that the runtime has kernels of its own for
_TIE = 1.05  # estimates are no better than that: the library stays


@dataclass(frozen=True)
class Product:
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
    """A block's part of a product: rows, columns, depth of a step; steps in shared memory; warps; parts of k."""

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


def estimate_tile(gpu: GpuModel, product: Product, tile: Tile, best: float = _BEST_TEMPLATE) -> float:
    """Seconds that the product takes by such tiles; infinity where they do not fit. Good for an order alone."""
    shared = (tile.m + tile.n) * tile.k * product.element * tile.stages
    if shared > gpu.shared_memory:
        return math.inf
    registers = 64 + tile.m * tile.n // (32 * tile.warps)  # of a thread
    if registers > 255:
        return math.inf
    depth = -(-product.k // tile.parts)
    blocks = -(-product.m // tile.m) * -(-product.n // tile.n) * product.batch * tile.parts
    steps = -(-depth // tile.k)
    share = best * math.sqrt(min(tile.m * tile.n / (tile.m + tile.n) / _BEST_SIDE, 1.0))
    rate = gpu.matrix_rate * 1e12 / gpu.multiprocessors / (_FLOAT32 if product.element == 4 else 1.0)
    work = 2.0 * tile.m * tile.n * tile.k * steps

    def wave(count: int) -> float:
        each = -(-count // gpu.multiprocessors)
        if each == 0:
            return 0.0
        waits = LATENCY * (1 + (steps - 1) / max(tile.stages - 1, 1))
        return max(each * work / (rate * share * min(each * tile.warps / _WARPS, 1.0)), waits)

    at_a_time = gpu.multiprocessors * max(gpu.resident_blocks(tile.warps, registers, shared), 1)
    multiplying = blocks // at_a_time * wave(at_a_time) + wave(blocks % at_a_time)
    sums = 0.0 if tile.parts == 1 else _LAUNCH + 8.0 * tile.parts * product.m * product.n / (gpu.bandwidth * 1e9)
    moving = product.bytes_moved / (gpu.bandwidth_for(min(blocks, at_a_time)) * _MEMORY)
    return _LAUNCH + sums + max(multiplying, moving)


def estimate_library(gpu: GpuModel, product: Product) -> float:
    """The same of the runtime's operator, which takes the best of its tiles."""
    times = [estimate_tile(gpu, product, tile, _BEST_LIBRARY) for tile in _LIBRARY_TILES]
    if product.m <= _FEW_ROWS:
        times.append(_LAUNCH + LATENCY + product.bytes_moved / (gpu.bandwidth * 1e9 * _MEMORY))
    return min(times)


@contextlib.contextmanager
def choosing(
    gpu: GpuModel, tuning: Mapping[str, Mapping[str, Any]], found: dict[str, dict[str, Any]]
) -> Iterator[None]:
    """Of each product's choices one is left to Inductor: what ``tuning`` has, else the estimate's best.

    found: gets what was taken, by the product's key.
    """
    from torch._inductor.select_algorithm import ExternKernelCaller, get_algorithm_selector_cache

    def one(choices: list[Any]) -> list[Any]:
        candidates = {choice: config for choice in choices if (config := _config_of(choice)) is not None}
        if len(choices) < 2:
            return choices
        if len(candidates) < 2 or LIBRARY not in candidates.values():  # another kind: the operator, where there is one
            return [next((choice for choice in choices if isinstance(choice, ExternKernelCaller)), choices[0])]
        name, product = _product_of(choices[0])
        known = tuning.get(name, {}).get("config", LIBRARY if _is_dynamic(choices[0]) else None)
        chosen = next((choice for choice, config in candidates.items() if config == known), None)
        if chosen is None:
            chosen = _best(gpu, product, candidates, _saved_behind(gpu, product))
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
    """found: gets the fastest of each product that Inductor times meanwhile."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    def keep(timings: dict[Any, float], *_: Any) -> None:
        known = {choice: config for choice in timings if (config := _config_of(choice)) is not None}
        if known:
            fastest = min(known, key=lambda choice: timings[choice])
            name, _product = _product_of(fastest)
            found[name] = {"kernel": name, "config": known[fastest]}

    functions = get_algorithm_selector_cache().feedback_saver_fns
    functions.append(keep)
    try:
        yield
    finally:
        functions.remove(keep)


def _best(gpu: GpuModel, product: Product, candidates: Mapping[Any, Mapping[str, Any]], saved: float) -> Any:
    library = next(choice for choice, config in candidates.items() if config == LIBRARY)
    best, least = library, estimate_library(gpu, product) / _TIE
    for choice, config in candidates.items():
        if config == LIBRARY:
            continue
        m, n, k = (config[f"BLOCK_{axis}"] for axis in "MNK")
        tile = Tile(m, n, k, config["num_stages"], config["num_warps"])
        seconds = estimate_tile(gpu, product, tile) - saved
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


def _product_of(choice: Any) -> tuple[str, Product]:
    """Its key in a tuning file, and its sizes."""
    from torch._inductor.virtualized import V

    def sizes(node: Any) -> tuple[int, ...]:
        return tuple(V.graph.sizevars.optimization_hints(node.get_size(), fallback=1))

    left, right = choice.input_nodes[-2:]
    (*batch, m, k), n = sizes(left), sizes(right)[-1]
    product = Product(m, n, k, math.prod(batch), left.get_dtype().itemsize)
    strides = ["columns" if node.get_stride()[-1] != 1 else "rows" for node in (left, right)]
    added = " + bias" if len(choice.input_nodes) > 2 else ""
    dtype = str(left.get_dtype()).removeprefix("torch.")
    return f"product {product.batch} x [{m}, {k}] {strides[0]} . [{k}, {n}] {strides[1]}{added}, {dtype}", product


def _is_dynamic(choice: Any) -> bool:
    sizes = [size for node in choice.input_nodes[-2:] for size in node.get_size()]
    return not all(isinstance(size, int) or size.is_number for size in sizes)


def _saved_behind(gpu: GpuModel, product: Product) -> float:
    """Seconds that a template saves because pointwise operators behind the product become part of it."""
    from torch._inductor.virtualized import V

    node = getattr(V.graph, "current_node", None)
    if not isinstance(node, fx.Node) or not _ends_in_memory(node):
        return 0.0
    result = product.batch * product.m * product.n * product.element
    return _LAUNCH + 2.0 * result / (gpu.bandwidth * 1e9 * _MEMORY)


def _ends_in_memory(product: fx.Node) -> bool:
    """Whether pointwise operators follow that no reduction would take into its own kernel."""
    waiting, seen, pointwise = list(product.users), {product}, False
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
