"""How a weight becomes four bits: rounding to nearest (RTN), also without zeros, and half-quadratic quantisation (HQQ).

Both see a weight [n, k] as groups [n, k / group_size, group_size] and choose a scale and a zero for each, for
w ≈ (q − 8)·scale + zero with q from 0 to 15. All of it is element-wise torch and sums over groups, so torch's threads
share the work, and the results do not depend on how the rows are cut into chunks. On CPUs kernels of libuntorch.so
compute HQQ's zeros and all values (``native/kernels/cpu/quantize``): torch's operators take 5 to 40 times their time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from untorch.ops import native
from untorch.ops.chunks import chunks
from untorch.ops.int4_layout import LANES, N_TILE, pack_int4

__all__ = [
    "METHODS", "has_kernel", "hqq_reference", "is_finite", "quantize_int4", "quantize_int4_reference",
    "quantize_weight", "relative_error", "relative_norm",
]  # fmt: skip

_LEVELS = 15
# HQQ's constants, as published: the norm of the error, the weight β of the quadratic part, its growth, iterations.
_NORM = 0.7
_BETA = 10.0
_BETA_GROWTH = 1.01
_ITERATIONS = 20
_KERNEL_GROUP = 1024  # the largest that the kernels take
_BLOCK = 128  # inputs that are packed together
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernel(weight: torch.Tensor) -> bool:
    """Whether the kernels of libuntorch.so round this weight: a matrix on a CPU whose rows are dense."""
    return (
        weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.dtype in _KERNEL_DTYPES
        and weight.numel() > 0
        and (weight.shape[1] == 1 or weight.stride(1) == 1)
    )


def quantize_int4(
    weight: torch.Tensor, group_size: int, method: str, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The packed weight, scale and zero, padded to n × k, and the relative error."""
    if not has_kernel(weight):
        return quantize_int4_reference(weight, group_size, method, n, k)
    weight = weight.detach()
    groups = k // group_size
    packed = torch.empty((n // N_TILE, k // _BLOCK, LANES, 4), dtype=torch.int32)
    scale_and_zero = torch.empty((groups, n, 2), dtype=weight.dtype)
    sums = torch.empty((weight.shape[0], 2), dtype=torch.float64)
    if method != "rtn":  # whose scales the kernel finds itself
        for part in chunks(weight, k):
            if method == "hqq":
                found = torch.empty((part.stop - part.start, groups, 2))
                native.call("hqq", found, weight[part].float(), group_size)
            else:
                padded = torch.nn.functional.pad(weight[part].float(), (0, k - weight.shape[1]))
                found = torch.cat(METHODS[method](padded.reshape(-1, groups, group_size), None), -1)
            scale_and_zero[:, part] = found.to(weight.dtype).transpose(0, 1)
    native.call("quantize_int4", packed, scale_and_zero, sums, weight, group_size, int(method == "rtn"))
    return packed, scale_and_zero, relative_norm(*sums.sum(0).tolist())


def quantize_int4_reference(
    weight: torch.Tensor, group_size: int, method: str, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """As ``quantize_int4``, by torch's operators: bit for bit with RTN."""
    values, scale_and_zero = quantize_weight(weight, group_size, method, k)
    error = relative_error(weight, values, scale_and_zero, group_size)
    values = torch.nn.functional.pad(values, (0, 0, 0, n - weight.shape[0]), value=8)
    return pack_int4(values), torch.nn.functional.pad(scale_and_zero, (0, 0, 0, n - weight.shape[0])), error


def quantize_weight(
    weight: torch.Tensor, group_size: int, method: str, padded_k: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values q, uint8 [n, padded_k], and scale and zero, [padded_k / group_size][n][2] in the weight's dtype.

    ``padded_k`` is a multiple of the group size. What is behind k does not influence the groups; those with nothing
    but padding have scale and zero 0. q is chosen for the scale and zero as they are stored, rounded.
    """
    n, k = weight.shape
    padded_k = k if padded_k is None else padded_k
    groups = padded_k // group_size
    values = torch.empty((n, padded_k), dtype=torch.uint8, device=weight.device)
    scale_and_zero = torch.empty((groups, n, 2), dtype=weight.dtype, device=weight.device)
    lengths = (k - group_size * torch.arange(groups, device=weight.device)).clamp(0, group_size)
    inside = torch.arange(group_size, device=weight.device) < lengths.unsqueeze(1)
    mask = None if k == padded_k else inside
    for rows in chunks(weight, padded_k):
        part = torch.nn.functional.pad(weight[rows].float(), (0, padded_k - k)).reshape(-1, groups, group_size)
        scale, zero = METHODS[method](part, mask)
        if mask is not None:
            empty = (lengths == 0).unsqueeze(-1)
            scale, zero = scale.masked_fill(empty, 0.0), zero.masked_fill(empty, 0.0)
        stored = torch.cat((scale, zero), -1).to(weight.dtype)
        scale_and_zero[:, rows] = stored.transpose(0, 1)
        scale, zero = stored[..., :1].float(), stored[..., 1:].float()
        # A scale of 0 (a group of equal values) makes 0/0, or infinity where the zero was rounded: q = 8 is then right.
        steps = torch.where(scale == 0, 0.0, (part - zero) / scale)
        values[rows] = steps.round_().add_(8).clamp_(0, _LEVELS).to(torch.uint8).flatten(1)
    return values, scale_and_zero


def relative_error(weight: torch.Tensor, values: torch.Tensor, scale_and_zero: torch.Tensor, group_size: int) -> float:
    """‖W' − W‖ / ‖W‖ over all weights (Frobenius norms, rows summed in float64); 0 where both are 0."""
    k = weight.shape[1]
    wrong, whole = 0.0, 0.0
    for rows in chunks(weight, values.shape[1]):
        part = weight[rows].float()
        q = values[rows].float().reshape(part.shape[0], -1, group_size) - 8
        scale, zero = scale_and_zero[:, rows].float().permute(2, 1, 0).unsqueeze(-1)
        difference = torch.addcmul(zero, q, scale).flatten(1)[:, :k].sub_(part)
        wrong += float(torch.linalg.vector_norm(difference, dim=1).double().square_().sum())
        whole += float(torch.linalg.vector_norm(part, dim=1).double().square_().sum())
    return relative_norm(wrong, whole)


def relative_norm(wrong: float, whole: float) -> float:
    """Of sums of squares; 0 where both are 0."""
    return float((wrong / whole) ** 0.5) if whole else 0.0 if not wrong else float("inf")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite: the least and the largest tell, and take a thirtieth of ``isfinite``'s time."""
    return not tensor.numel() or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def _range(part: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest value of each group, [rows, groups, 1]; 0 for a group of padding."""
    if mask is None:
        return part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
    low = part.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    high = part.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    return low.nan_to_num(posinf=0.0), high.nan_to_num(neginf=0.0)


def _rtn(part: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The least value becomes q = 0, the largest q = 15."""
    low, high = _range(part, mask)
    scale = (high - low) / _LEVELS
    return scale, low + 8 * scale


def _symmetric(part: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The value of the largest magnitude becomes q = 0, and 0 stays 0: no zeros."""
    most = part.gather(-1, part.abs().argmax(-1, keepdim=True))
    return most / -8, torch.zeros_like(most)


def _hqq(part: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``hqq_reference``, by the library's kernel where the weight is on a CPU."""
    rows, groups, size = part.shape
    if part.device.type != "cpu" or size > _KERNEL_GROUP or not part.numel():
        return hqq_reference(part, mask)
    k = groups * size if mask is None else int(mask.sum())
    found = torch.empty((rows, groups, 2))
    native.call("hqq", found, part.flatten(1)[:, :k], size)
    return found[..., :1], found[..., 1:]


def hqq_reference(part: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-quadratic quantisation (Badri and Shaji, 2023): RTN's scale, and a zero for a small p-norm of the error.

    With s = 1 / scale and z = 8 − zero / scale, alternates
        q = clamp(round(w·s + z)),   r = (q − z) / s,   e = shrink(w − r),   z = mean over the group of q − (w − e)·s,
    where shrink(x) = sign(x)·max(|x| − |x|^(p − 1) / β, 0), and β grows. A group stops when its mean absolute error no
    longer falls, and keeps its best zero. As published, z starts rounded.
    """
    scale, zero = _rtn(part, mask)
    constant = scale == 0
    s = 1 / scale.masked_fill(constant, 1.0)
    z = (8 - zero * s).round_()
    count = part.shape[-1] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (values if mask is None else values * mask).sum(-1, keepdim=True) / count

    scaled = part * s
    best, least = z, torch.full_like(z, torch.inf)
    running = ~constant
    beta = _BETA
    for _ in range(_ITERATIONS):
        q = (scaled + z).round_().clamp_(0, _LEVELS)
        error = part - (q - z) / s
        size = error.abs()
        now = mean(size)
        running = running & (now < least)
        if not bool(running.any()):
            break
        best, least = torch.where(running, z, best), torch.where(running, now, least)
        shrunk = torch.copysign(torch.relu_(size - size.pow(_NORM - 1).div_(beta)), error)
        z = mean(q - (part - shrunk) * s)
        beta *= _BETA_GROWTH
    return scale, torch.where(constant, zero, (8 - best) / s)


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]] = {
    "hqq": _hqq,
    "rtn": _rtn,
    "symmetric": _symmetric,
}
