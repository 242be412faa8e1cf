"""``untorch::decoder_linears``: the linear layers of a decoder between one attention and the next.

    hidden       = residual + x · oᵀ
    activated    = silu(g) · u,  g and u the halves of rms_norm(hidden) · gate_upᵀ
    residual_out = hidden + activated · downᵀ
    out          = rms_norm(residual_out) · nextᵀ + next_bias      without ``next``: rms_norm(residual_out)

rms_norm(v) = weight · v / √(mean(v²) + eps). Weights [n, k] are all dense, or all in int4 (``int4_linear``).

For one token on sm_90 and newer GPUs libuntorch.so computes it by one persistent kernel; for others by the kernels of
the layers, with one between two of them. CPUs have the reference here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from untorch.ops import native
from untorch.ops.describe import kind_of
from untorch.ops.int4 import GROUP_SIZES, dequantize_int4
from untorch.ops.int4_layout import INNER_K_TILES, K_TILE, LANES, N_TILE

__all__ = ["C_SHIM", "OPERATOR", "decoder_linears", "decoder_linears_reference"]

C_SHIM = (
    "AOTITorchError aoti_torch_cuda_decoder_linears(AtenTensorHandle x, AtenTensorHandle residual, "
    "AtenTensorHandle o_weight, AtenTensorHandle* o_scales, AtenTensorHandle norm, AtenTensorHandle gate_up_weight, "
    "AtenTensorHandle* gate_up_scales, AtenTensorHandle down_weight, AtenTensorHandle* down_scales, "
    "AtenTensorHandle next_norm, AtenTensorHandle* next_weight, AtenTensorHandle* next_scales, "
    "AtenTensorHandle* next_bias, int64_t group_size, double eps, double next_eps, AtenTensorHandle* ret0, "
    "AtenTensorHandle* ret1)"
)
_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DENSE = torch.contiguous_format


@torch.library.custom_op("untorch::decoder_linears", mutates_args=())
def decoder_linears(
    x: torch.Tensor,
    residual: torch.Tensor,
    o_weight: torch.Tensor,
    o_scales: torch.Tensor | None,
    norm: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_scales: torch.Tensor | None,
    next_norm: torch.Tensor,
    next_weight: torch.Tensor | None,
    next_scales: torch.Tensor | None,
    next_bias: torch.Tensor | None,
    group_size: int,
    eps: float,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [tokens, n] and residual_out [tokens, width], in x's dtype, contiguous.

    x: floating point [tokens, k]; residual: [tokens, width]; norm, next_norm: [width]. All are of one dtype.
    o_weight [width, k], gate_up_weight [2 · i, width], the gate's rows first, down_weight [width, i], next_weight
        [n, width] or None: with a group_size of 0 of x's dtype, contiguous, and scales are None; else int32 with scales
        and zeros, as ``int4_linear`` has them, in groups of 32, 64, 128 or 256.
    next_bias: [n] in x's dtype, or None.

    Sums are in float32. On GPUs and in the reference hidden, silu(g) · u, residual_out and out are rounded to x's
    dtype; where a GPU computes one layer after the other, so are the results of the layers and norms. Raises
    ValueError; RuntimeError for what the GPU cannot do.
    """
    given = (
        x, residual, o_weight, o_scales, norm, gate_up_weight, gate_up_scales, down_weight, down_scales, next_norm,
        next_weight, next_scales, next_bias, group_size,
    )  # fmt: skip
    outputs = _check(*given)
    if not x.is_cuda or not native.serves("decoder_linears", x):
        return decoder_linears_reference(*given, eps, next_eps)
    out, residual_out = x.new_empty((x.shape[0], outputs)), torch.empty_like(residual, memory_format=_DENSE)
    native.call(
        "decoder_linears", out, residual_out, x, residual, o_weight, (o_scales,), norm, gate_up_weight,
        (gate_up_scales,), down_weight, (down_scales,), next_norm, (next_weight,), (next_scales,), (next_bias,),
        group_size, float(eps), float(next_eps),
    )  # fmt: skip
    return out, residual_out


def decoder_linears_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    o_weight: torch.Tensor,
    o_scales: torch.Tensor | None,
    norm: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_scales: torch.Tensor | None,
    next_norm: torch.Tensor,
    next_weight: torch.Tensor | None,
    next_scales: torch.Tensor | None,
    next_bias: torch.Tensor | None,
    group_size: int,
    eps: float,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in torch's own operators, on any device, with whole weights in float32 or float64."""
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)

    def linear(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        matrix = weight.to(wide) if scales is None else dequantize_int4(weight, scales, group_size, wide)
        return F.linear(x.to(wide), matrix)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        values = x.to(wide)
        return weight.to(wide) * values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()

    hidden = (residual.to(wide) + linear(x, o_weight, o_scales)).to(dtype)
    gate, up = linear(rms_norm(hidden, norm, eps), gate_up_weight, gate_up_scales).chunk(2, -1)
    activated = (F.silu(gate) * up).to(dtype)
    residual_out = (hidden.to(wide) + linear(activated, down_weight, down_scales)).to(dtype)
    out = rms_norm(residual_out, next_norm, next_eps)
    if next_weight is not None:
        out = linear(out, next_weight, next_scales)
        if next_bias is not None:
            out = out + next_bias.to(wide)
    return out.to(dtype).contiguous(), residual_out.contiguous()


@decoder_linears.register_fake
def _decoder_linears_fake(x: torch.Tensor, residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = _check(x, residual, *others[:-2])
    return x.new_empty((x.shape[0], outputs)), torch.empty_like(residual, memory_format=_DENSE)


def _check(
    x: torch.Tensor,
    residual: torch.Tensor,
    o_weight: torch.Tensor,
    o_scales: torch.Tensor | None,
    norm: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_scales: torch.Tensor | None,
    next_norm: torch.Tensor,
    next_weight: torch.Tensor | None,
    next_scales: torch.Tensor | None,
    next_bias: torch.Tensor | None,
    group_size: int,
) -> int:
    """The columns of ``out``."""
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise ValueError(f"decoder_linears: x: expected floating point [tokens, k], got {kind_of(x)}")
    dtype = str(x.dtype).removeprefix("torch.")
    if residual.dim() != 2 or residual.dtype != x.dtype or residual.shape[0] != x.shape[0]:
        raise ValueError(
            f"decoder_linears: residual: expected {dtype} [tokens, width] with as many tokens as x, got "
            f"{kind_of(residual)}"
        )
    if group_size not in (0, *GROUP_SIZES):
        raise ValueError(
            f"decoder_linears: group_size: expected 32, 64, 128 or 256 for int4 weights, or 0 for dense ones, got "
            f"{group_size}"
        )
    width = residual.shape[1]
    _check_weight("o", o_weight, o_scales, group_size, x.dtype, width, x.shape[1])
    rows = _check_weight("gate_up", gate_up_weight, gate_up_scales, group_size, x.dtype, None, width)
    if rows % 2:
        raise ValueError(f"decoder_linears: gate_up_weight: expected an even n, gate and up, got {rows}")
    _check_weight("down", down_weight, down_scales, group_size, x.dtype, width, rows // 2)
    outputs = width
    if next_weight is not None:
        outputs = _check_weight("next", next_weight, next_scales, group_size, x.dtype, None, width)
    elif next_scales is not None or next_bias is not None:
        raise ValueError("decoder_linears: next_scales, next_bias: expected None without next_weight")
    vectors = (("norm", norm, width), ("next_norm", next_norm, width), ("next_bias", next_bias, outputs))
    for name, tensor, size in vectors:
        if tensor is None:
            continue
        if tensor.dim() != 1 or tensor.shape[0] != size or tensor.dtype != x.dtype or not tensor.is_contiguous():
            raise ValueError(f"decoder_linears: {name}: expected contiguous {dtype} [{size}], got {kind_of(tensor)}")
    others = {
        "residual": residual, "o_weight": o_weight, "o_scales": o_scales, "norm": norm,
        "gate_up_weight": gate_up_weight, "gate_up_scales": gate_up_scales, "down_weight": down_weight,
        "down_scales": down_scales, "next_norm": next_norm, "next_weight": next_weight, "next_scales": next_scales,
        "next_bias": next_bias,
    }  # fmt: skip
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"decoder_linears: {name}: expected the device of x, {x.device}, got {tensor.device}")
    return outputs


def _check_weight(
    name: str, weight: torch.Tensor, scales: torch.Tensor | None, group_size: int, dtype: torch.dtype, n: int | None,
    k: int,
) -> int:  # fmt: skip
    """n of the weight, which must be that, if it is not None."""
    if group_size == 0:
        if scales is not None:
            raise ValueError(f"decoder_linears: {name}_scales: expected None with a group_size of 0")
        if weight.dim() != 2 or weight.dtype != dtype or not weight.is_contiguous():
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"decoder_linears: {name}_weight: expected contiguous {kind} [n, k], got {kind_of(weight)}"
            )
        found = int(weight.shape[0]), int(weight.shape[1])
    else:
        found = _check_int4(name, weight, scales, group_size)
    if found[1] != k or (n is not None and found[0] != n):
        raise ValueError(
            f"decoder_linears: {name}_weight: expected [{'n' if n is None else n}, {k}], got [{found[0]}, {found[1]}]"
        )
    return found[0]


def _check_int4(name: str, weight: torch.Tensor, scales: torch.Tensor | None, group_size: int) -> tuple[int, int]:
    if (
        weight.dtype != torch.int32 or weight.dim() != 4 or weight.shape[2] != LANES
        or 2 * weight.shape[3] not in INNER_K_TILES or not weight.is_contiguous()
    ):  # fmt: skip
        raise ValueError(
            f"decoder_linears: {name}_weight: expected contiguous int32 [n / 8][k / (16 · inner_k_tiles)][32]"
            f"[inner_k_tiles / 2] with a group_size of {group_size}, got {kind_of(weight)}"
        )
    n, k = weight.shape[0] * N_TILE, weight.shape[1] * weight.shape[3] * 2 * K_TILE
    if k % group_size:
        raise ValueError(
            f"decoder_linears: group_size: expected a divisor of {name}_weight's k = {k}, got {group_size}"
        )
    shape = (k // group_size, n, 2)
    if (
        scales is None or tuple(scales.shape) != shape or scales.dtype not in _SCALE_DTYPES
        or not scales.is_contiguous()
    ):  # fmt: skip
        got = "None" if scales is None else kind_of(scales)
        raise ValueError(
            f"decoder_linears: {name}_scales: expected contiguous bfloat16, float16 or float32 {list(shape)}, got {got}"
        )
    return n, k


OPERATOR = torch.ops.untorch.decoder_linears.default
