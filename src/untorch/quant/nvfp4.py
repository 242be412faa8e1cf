"""How a weight becomes NVFP4: a scale for the matrix, one for each block of 16 rounded to E4M3, and codes in E2M1.

Rounding to nearest (RTN) gives each block the scale that makes its largest value 6. The search tries the scales of E4M3
around that one too, as clipping the largest value, or placing it at 4, can be better for the others, and keeps the one
with the least squared error. ``ops.nvfp4_layout`` has the codes and the layouts. On CPUs a kernel of libuntorch.so does
it (``native/kernels/cpu/quantize``): torch's operators take 40 times its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from untorch.ops import native
from untorch.ops.chunks import chunks
from untorch.ops.nvfp4_layout import (
    BLOCK_SIZE,
    E2M1_MAX,
    dequantize_nvfp4,
    pack_nvfp4,
    rows_of_global_scale,
)
from untorch.quant.methods import has_kernel, is_finite, relative_norm
from untorch.runtime.errors import InvalidArgumentError

__all__ = [
    "NVFP4_METHODS", "NVFP4Weight", "concatenate_nvfp4", "nvfp4_error", "quantize_nvfp4", "quantize_nvfp4_errors",
    "reconcile_nvfp4",
]  # fmt: skip

NVFP4_METHODS = ("search", "rtn")
E4M3_MAX = 448.0
_E4M3_TINY = 2.0**-9
_E4M3_MAX_CODE = 126
_FLOAT_TINY = torch.finfo(torch.float32).tiny
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Steps of E4M3 from RTN's scale. Above it the largest value becomes 4 instead of 6, which is 1.5 times: 4 or 5 steps.
_STEPS = (-2, -1, 1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class NVFP4Weight:
    """A weight in NVFP4: w = e2m1 · block_scale · global_scale.

    packed: uint8 [..., n, k / 2], the even k in the lower nibble; k is a multiple of 16.
    block_scale: float8_e4m3fn [..., n, k / 16].
    global_scale: float32 [...], a multiplier; or [..., n] or [..., 1]: one for each row.
    """

    packed: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [..., n, k] with the padding of k."""
        return dequantize_nvfp4(self.packed, self.block_scale, self.global_scale, dtype)


def quantize_nvfp4(
    weight: torch.Tensor, *, search: bool = True, global_scale: float | torch.Tensor | None = None
) -> NVFP4Weight:
    """``weight`` in NVFP4, on its device; the results do not depend on the number of threads.

    Args:
        weight: float32, bfloat16 or float16 [..., n, k]. k that is no multiple of 16 is padded with zeros.
        search: Choose each block's scale for the least squared error, never worse than without; else it is that which
            makes the block's largest value 6. Values are rounded to nearest, ties to the even mantissa.
        global_scale: The multiplier of all blocks, above 0, one number or a float32 tensor [...] of one for each
            matrix. None: the matrix's largest absolute value over 6 · 448, so that the largest block scale is E4M3's.

    Raises:
        InvalidArgumentError: Another dtype or shape, values that are not finite, or such a global scale.
    """
    if weight.dim() < 2 or weight.dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"quantize_nvfp4: weight: expected float32, bfloat16 or float16 [..., n, k], got "
            f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
        )
    scale = None if global_scale is None else _given(global_scale, tuple(weight.shape[:-2]), weight.device)
    return _quantize(weight, scale, search)[0]


def quantize_nvfp4_errors(weight: torch.Tensor, search: bool) -> tuple[NVFP4Weight, float, float | None]:
    """[..., n, k] in NVFP4, the relative error over all matrices, and that without the search, if there is one."""
    made, sums = _quantize(weight, None, search)
    if sums is None:
        nearest = _error(weight, _quantize(weight, None, search=False)[0]) if search else None
        return made, _error(weight, made), nearest
    wrong, nearest_wrong, whole = sums.sum(0).tolist()
    return made, relative_norm(wrong, whole), relative_norm(nearest_wrong, whole) if search else None


def _quantize(
    weight: torch.Tensor, scale: torch.Tensor | None, search: bool
) -> tuple[NVFP4Weight, torch.Tensor | None]:
    """[..., n, k] in NVFP4 with the matrices' global scales [...], or their own; on CPUs also the kernel's sums."""
    if not is_finite(weight):
        raise InvalidArgumentError("quantize_nvfp4: weight: it has values that are not finite")
    *batch, n, k = weight.shape
    if scale is None:
        scale = _global_scale(weight)
    blocks = -(-k // BLOCK_SIZE)
    flat, per_row = weight.reshape(math.prod(batch) * n, k), scale.unsqueeze(-1).expand(*batch, n).reshape(-1)
    packed, block_scale, sums = _quantize_rows(flat, per_row, search)
    made = NVFP4Weight(
        packed.reshape(*batch, n, packed.shape[1]), block_scale.reshape(*batch, n, blocks), scale.reshape(tuple(batch))
    )
    return made, sums


def _error(weight: torch.Tensor, made: NVFP4Weight) -> float:
    """``nvfp4_error`` over all matrices of [..., n, k]."""
    scales = made.global_scale.unsqueeze(-1).expand(weight.shape[:-1]).flatten()
    rows = NVFP4Weight(made.packed.flatten(0, -2), made.block_scale.flatten(0, -2), scales)
    return nvfp4_error(weight.flatten(0, -2), rows)


def _quantize_rows(
    weight: torch.Tensor, scales: torch.Tensor, search: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """packed and block_scale of rows [n, k] with global scales [n]; on CPUs also the kernel's sums."""
    if not has_kernel(weight):
        return (*quantize_rows_reference(weight, scales, search), None)
    n, blocks = weight.shape[0], -(-weight.shape[1] // BLOCK_SIZE)
    packed = torch.empty((n, blocks * BLOCK_SIZE // 2), dtype=torch.uint8)
    block_scale = torch.empty((n, blocks), dtype=torch.uint8)
    sums = torch.empty((n, 3), dtype=torch.float64)
    native.call("quantize_nvfp4", packed, block_scale, sums, weight.detach(), scales.contiguous(), int(search))
    return packed, block_scale.view(torch.float8_e4m3fn), sums


def quantize_rows_reference(
    flat: torch.Tensor, per_row: torch.Tensor, search: bool
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """packed and block_scale by torch's operators, on any device."""
    k = flat.shape[1]
    blocks = -(-k // BLOCK_SIZE)
    packed = torch.empty((flat.shape[0], blocks * BLOCK_SIZE // 2), dtype=torch.uint8, device=flat.device)
    block_scale = torch.empty((flat.shape[0], blocks), dtype=torch.float8_e4m3fn, device=flat.device)
    for rows in chunks(flat, blocks * BLOCK_SIZE):
        part = torch.nn.functional.pad(flat[rows].float(), (0, blocks * BLOCK_SIZE - k))
        target = (part / per_row[rows, None]).reshape(part.shape[0], blocks, BLOCK_SIZE)
        chosen = _nearest_scale(target)
        if search:
            exact = part.double() / per_row[rows, None].double()
            chosen = _search(exact.reshape(target.shape), target, chosen)
        block_scale[rows] = chosen
        packed[rows] = pack_nvfp4(_codes(target, chosen.float())).flatten(1)
    return packed, block_scale


def nvfp4_error(weight: torch.Tensor, quantized: NVFP4Weight) -> float:
    """‖W' − W‖ / ‖W‖ over a matrix [n, k] (Frobenius norms, summed in float64); 0 where both are 0."""
    wrong, whole = 0.0, 0.0
    k = weight.shape[1]
    scales = rows_of_global_scale("nvfp4_error", quantized.global_scale, (weight.shape[0],)).expand(weight.shape[0])
    for rows in chunks(weight, 2 * quantized.packed.shape[1]):
        part = weight[rows].double()
        restored = dequantize_nvfp4(
            quantized.packed[rows], quantized.block_scale[rows], scales[rows], torch.float64
        )[:, :k]  # fmt: skip
        wrong += float((restored - part).square_().sum())
        whole += float(part.square_().sum())
    return relative_norm(wrong, whole)


def reconcile_nvfp4(weights: Sequence[NVFP4Weight]) -> list[NVFP4Weight]:
    """The weights with one global scale, the largest of theirs, for kernels that take a single one: gate and up.

    Codes stay. Block scales become block_scale · global_scale / largest, rounded to E4M3 once; those of the weight with
    the largest stay as they are. ``concatenate_nvfp4`` needs no rounding. Global scales are one for each matrix, of one
    shape [...]. Raises InvalidArgumentError.
    """
    scales = [_of_matrices("reconcile_nvfp4", weights, weight) for weight in weights]
    largest = torch.stack(scales).amax(0) if scales else torch.empty(0)
    result = []
    for weight, scale in zip(weights, scales, strict=True):
        ratio = (scale.double() / largest.double()).masked_fill(largest == 0, 1.0)
        rescaled = (weight.block_scale.double() * ratio[..., None, None]).to(torch.float32)
        result.append(NVFP4Weight(weight.packed, rescaled.to(torch.float8_e4m3fn), largest))
    return result


def concatenate_nvfp4(weights: Sequence[NVFP4Weight]) -> NVFP4Weight:
    """The weights one below the other, [..., Σ n, k], as one with a global scale for each row; nothing is rounded.

    Their k and what is before n must agree. Raises InvalidArgumentError.
    """
    shapes = {(*weight.packed.shape[:-2], weight.packed.shape[-1]) for weight in weights}
    if len(shapes) != 1:
        raise InvalidArgumentError(
            f"concatenate_nvfp4: weights: expected one or more that differ in n only, got packed "
            f"{', '.join(str(list(weight.packed.shape)) for weight in weights) or 'none'}"
        )
    rows = [
        rows_of_global_scale("concatenate_nvfp4", weight.global_scale, weight.packed.shape[:-1])
        .expand(weight.packed.shape[:-1])
        for weight in weights
    ]  # fmt: skip
    # Not every device concatenates float8.
    scales = torch.cat([weight.block_scale.view(torch.uint8) for weight in weights], -2).view(torch.float8_e4m3fn)
    return NVFP4Weight(torch.cat([weight.packed for weight in weights], -2), scales, torch.cat(rows, -1))


def _of_matrices(function: str, weights: Sequence[NVFP4Weight], weight: NVFP4Weight) -> torch.Tensor:
    """The global scales [...] of ``weight``, whose batch must be that of all."""
    batch, scale = weight.packed.shape[:-2], weight.global_scale
    if scale.shape == (*batch, 1) and scale.shape != batch:
        scale = scale.squeeze(-1)
    if scale.shape != batch or batch != weights[0].packed.shape[:-2]:
        raise InvalidArgumentError(
            f"{function}: weights: expected one global scale for each matrix, and the same number of matrices, got "
            f"global scales {list(weight.global_scale.shape)} for packed {list(weight.packed.shape)}"
        )
    return scale


def _global_scale(weight: torch.Tensor) -> torch.Tensor:
    """The largest absolute value over 6 · 448, for each matrix; 1 for one of zeros."""
    if weight.numel() == 0:
        return torch.ones(weight.shape[:-2], dtype=torch.float32, device=weight.device)
    largest = weight.abs().amax((-2, -1)).float()
    scale = (largest / (E2M1_MAX * E4M3_MAX)).clamp(min=_FLOAT_TINY)
    return torch.where(largest == 0, 1.0, scale)


def _given(global_scale: float | torch.Tensor, batch: tuple[int, ...], device: torch.device) -> torch.Tensor:
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=device)
    if scale.dim() and tuple(scale.shape) != batch:
        raise InvalidArgumentError(
            f"quantize_nvfp4: global_scale: expected one number or {list(batch)}, got {list(scale.shape)}"
        )
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise InvalidArgumentError(f"quantize_nvfp4: global_scale: expected finite float32 above 0, got {global_scale}")
    return scale.expand(batch).contiguous()


def _nearest_scale(target: torch.Tensor) -> torch.Tensor:
    """The E4M3 scale that makes each block's largest value 6; a block that is not all zeros gets the least at least."""
    largest = target.abs().amax(-1)
    scale = torch.where(largest == 0, 0.0, (largest / E2M1_MAX).clamp(_E4M3_TINY, E4M3_MAX))
    return scale.to(torch.float8_e4m3fn)


def _search(exact: torch.Tensor, target: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """Of ``nearest`` and the scales some steps from it, the one of least squared error for each block.

    ``exact`` is ``target`` in float64: it has the last word, where float32 would see a gain that is none.
    """
    start = nearest.view(torch.uint8).to(torch.int16)
    size, first = target.abs(), nearest.float()
    best, least = first, _squared_error(size, size, first)
    for step in _STEPS:
        scale = (start + step).clamp(1, _E4M3_MAX_CODE).to(torch.uint8).view(torch.float8_e4m3fn).float()
        error = _squared_error(size, size, scale)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    exact = exact.abs()
    better = _squared_error(exact, size, best) < _squared_error(exact, size, first)
    return torch.where(better, best, first).to(torch.float8_e4m3fn)


def _squared_error(exact: torch.Tensor, size: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of absolute values [..., blocks, 16], rounded from ``size`` with the block's scale [..., blocks]."""
    low, middle, high = _round(size, scale)
    values = low.mul_(0.5).add_(middle).add_(high, alpha=2).sub_(6)
    return (values * scale.unsqueeze(-1) - exact).square_().sum(-1)


def _codes(target: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The codes of values [..., blocks, 16], uint8; zeros have no sign."""
    low, middle, high = _round(target.abs(), scale)
    code = low.add_(middle).add_(high).sub_(4).to(torch.uint8)
    return code | (((target < 0) & (code > 0)).to(torch.uint8) << 3)


def _round(size: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """size / scale rounded to E2M1's absolute values, at most 6, as how far it reaches into three ranges.

    Up to 2 values are 0.5 apart, up to 4 they are 1 apart, and up to 6, 2. With low, middle and high the steps in each,
    from 0 to 4, 2 to 4 and 2 to 3, the value is low / 2 + middle + 2·high − 6 and the code low + middle + high − 4. In
    all of them even steps have even codes, so rounding a half to even takes a tie to the even mantissa. Comparisons
    would be slower.
    """
    # Blocks of zeros have the scale 0.
    quotient = size / scale.clamp(min=_E4M3_TINY).unsqueeze(-1)
    low = quotient.clamp(max=2).mul_(2).round_()
    middle = quotient.clamp(2, 4).round_()
    return low, middle, quotient.clamp_(4, 6).mul_(0.5).round_()
