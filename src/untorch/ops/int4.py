"""``untorch::int4_linear``: a linear layer whose weight is stored in four bits, with a scale and a zero a group.

y = x · Wᵀ + bias, where W [n, k] has w = (q − 8)·scale + zero, q from 0 to 15, and a group is ``group_size`` inputs of
one output. q is stored in the layout of ``int4_layout``, scale and zero side by side as [k / group_size][n][2].

libuntorch.so computes it, for torch's tensors as in files (``native``). The reference here, which makes the whole
weight in float32, is for the dtypes and devices that the library does not serve.

Graphs hold the operator as one node: no pass and no constant folding sees a weight that is unpacked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from untorch.ops import native
from untorch.ops.describe import kind_of
from untorch.ops.int4_layout import INNER_K_TILES, K_TILE, LANES, N_TILE, unpack_int4

__all__ = ["C_SHIMS", "GROUP_SIZES", "OPERATOR", "dequantize_int4", "int4_linear", "int4_linear_reference"]

GROUP_SIZES = (32, 64, 128, 256)
_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# AOTInductor declares all of them, and calls the one of the model's device.
C_SHIMS = [
    f"AOTITorchError aoti_torch_{device}_int4_linear(AtenTensorHandle x, AtenTensorHandle weight, "
    f"AtenTensorHandle scale_and_zero, int64_t group_size, AtenTensorHandle* bias, AtenTensorHandle* ret0)"
    for device in ("cpu", "cuda")
]


def dequantize_int4(
    weight: torch.Tensor, scale_and_zero: torch.Tensor, group_size: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight [n, k] that packed int32 ``weight`` and ``scale_and_zero`` stand for, computed in ``dtype``."""
    values = unpack_int4(weight)
    n, k = values.shape
    grouped = values.to(dtype).reshape(n, k // group_size, group_size) - 8
    scale, zero = scale_and_zero.to(dtype).permute(2, 1, 0).unsqueeze(-1)
    weights: torch.Tensor = (grouped * scale + zero).reshape(n, k)
    return weights


@torch.library.custom_op("untorch::int4_linear", mutates_args=())
def int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_and_zero: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · Wᵀ + bias for x [..., k_in]; gives [..., n] in x's dtype, contiguous.

    x: floating point, the last dimension contiguous. k_in may be less than the weight's k, which was padded then: the
        weights behind it are multiplied by nothing.
    weight: int32 [n / 8][k / (16·t)][32][t / 2] with t = 2, 4 or 8, contiguous.
    scale_and_zero: bfloat16, float16 or float32 [k / group_size][n][2], contiguous.
    group_size: 32, 64, 128 or 256; divides k.
    bias: [n] in x's dtype, or None.

    Sums are in float32, for float64 in that. Raises ValueError; RuntimeError for what the GPU cannot do.
    """
    _check(x, weight, scale_and_zero, group_size, bias)
    if native.serves("int4_linear", x):
        out = x.new_empty((*x.shape[:-1], weight.shape[0] * N_TILE))
        native.call("int4_linear", out, x, weight, scale_and_zero, group_size, (bias,))
        return out
    return int4_linear_reference(x, weight, scale_and_zero, group_size, bias)


def int4_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_and_zero: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator in torch's own operators, on any device, with the whole weight in float32 or float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    matrix = dequantize_int4(weight, scale_and_zero, group_size, wide)[:, : x.shape[-1]]
    y = F.linear(x.to(wide), matrix, None if bias is None else bias.to(wide))
    return y.to(x.dtype).contiguous()


@int4_linear.register_fake
def _int4_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_and_zero: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    _check(x, weight, scale_and_zero, group_size, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0] * N_TILE))


def _check(
    x: torch.Tensor, weight: torch.Tensor, scale_and_zero: torch.Tensor, group_size: int, bias: torch.Tensor | None
) -> None:
    if weight.dtype != torch.int32 or weight.dim() != 4 or weight.shape[2] != LANES or not weight.is_contiguous():
        raise ValueError(
            f"int4_linear: weight: expected a contiguous int32 tensor [n / 8][k / (16 · inner_k_tiles)][32]"
            f"[inner_k_tiles / 2], got {kind_of(weight)}"
        )
    if 2 * weight.shape[3] not in INNER_K_TILES:
        raise ValueError(f"int4_linear: weight: expected inner_k_tiles of 2, 4 or 8, got {2 * weight.shape[3]}")
    n, k = weight.shape[0] * N_TILE, weight.shape[1] * weight.shape[3] * 2 * K_TILE
    if group_size not in GROUP_SIZES or k % group_size:
        raise ValueError(
            f"int4_linear: group_size: expected 32, 64, 128 or 256, and a divisor of the weight's k = {k}, got "
            f"{group_size}"
        )
    _expect("scale_and_zero", scale_and_zero, (k // group_size, n, 2), _SCALE_DTYPES)
    if x.dim() < 1 or not x.dtype.is_floating_point:
        raise ValueError(f"int4_linear: x: expected floating point [..., k], got {kind_of(x)}")
    if x.shape[-1] > k:
        raise ValueError(
            f"int4_linear: x: expected at most the weight's k = {k} in the last dimension, got {kind_of(x)}"
        )
    stride = x.stride(-1)  # one that varies cannot be judged before the call
    if isinstance(stride, int) and stride != 1 and x.shape[-1] > 1:
        raise ValueError(f"int4_linear: x: expected a contiguous last dimension, got the stride {stride}: copy it")
    if bias is not None:
        _expect("bias", bias, (n,), (x.dtype,))
    for name, tensor in (("weight", weight), ("scale_and_zero", scale_and_zero), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"int4_linear: {name}: expected the device of x, {x.device}, got {tensor.device}")


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"int4_linear: {name}: expected contiguous {expected} {list(shape)}, got {kind_of(tensor)}")


OPERATOR = torch.ops.untorch.int4_linear.default
