"""``untorch::packed_linear``: a linear layer whose weight was packed for the matrix kernels at export.

y = activation(x · Wᵀ + bias) + residual, all of one dtype, with W [n, k] and zeros behind n:

    float32              [ceil(n / 16), k, 16]               packed[j, kk, i] = W[16·j + i, kk]
    bfloat16, float16    [ceil(n / 16), ceil(k / 2), 16, 2]  packed[j, p, i, h] = W[16·j + i, 2·p + h], zeros behind k

The 16 outputs that one vector holds lie side by side, so the kernel streams the weight from memory in order; pairs
along k are what instructions for the 16-bit dtypes multiply. The implementation here is the reference; libuntorch.so
has the fast one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from untorch.ops.activations import ACTIVATIONS, activate

__all__ = ["BLOCK", "C_SHIM", "OPERATOR", "pack_weight", "packed_linear", "unpack_weight"]

BLOCK = 16

# AOTInductor names the shim of a custom operator after the operator alone; the label puts our prefix on the symbol.
C_SHIM = (
    "AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle weight, "
    "AtenTensorHandle* bias, AtenTensorHandle* residual, const char* activation, int64_t out_features, "
    'AtenTensorHandle* ret0) __asm__("aoti_torch_cpu_untorch_packed_linear")'
)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Packs W [n, k] into a new contiguous tensor of the same dtype."""
    n, k = weight.shape
    blocks = -(-n // BLOCK)
    pairs = 2 if _is_half(weight.dtype) else 1
    padded = weight.new_zeros((blocks * BLOCK, -(-k // pairs) * pairs))
    padded[:n, :k] = weight
    if pairs == 1:
        return padded.reshape(blocks, BLOCK, k).transpose(1, 2).contiguous()
    return padded.reshape(blocks, BLOCK, -1, 2).transpose(1, 2).contiguous()


def unpack_weight(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of ``pack_weight``: W [n, k]."""
    rows = packed.transpose(1, 2).reshape(packed.shape[0] * BLOCK, -1)
    return rows[:out_features, :in_features]


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    out_features: int,
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"packed_linear: activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    blocks = -(-out_features // BLOCK)
    if x.dim() < 1:
        raise ValueError("packed_linear: x: expected at least one dimension, got a scalar")
    k = x.shape[-1]
    packed = (blocks, (k + 1) // 2, BLOCK, 2) if _is_half(x.dtype) else (blocks, k, BLOCK)
    _expect("weight", "the packed shape", weight, packed)
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"packed_linear: {name}: expected {x.dtype}, as x, got {tensor.dtype}")
    if bias is not None:
        _expect("bias", "the shape", bias, (out_features,))
    if residual is not None:
        _expect("residual", "the shape", residual, (*x.shape[:-1], out_features))


def _expect(name: str, what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dim() != len(shape) or any(a != b for a, b in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"packed_linear: {name}: expected {what} {shape}, got {tuple(tensor.shape)}")


@torch.library.custom_op("untorch::packed_linear", mutates_args=())
def packed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    out_features: int,
) -> torch.Tensor:
    """activation(x · Wᵀ + bias) + residual, for x [..., k] and the packed weight; gives [..., out_features]."""
    _check(x, weight, bias, residual, activation, out_features)
    y = activate(F.linear(x, unpack_weight(weight, out_features, x.shape[-1]), bias), activation)
    y = y if residual is None else y + residual
    return y.contiguous()


@packed_linear.register_fake
def _packed_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    out_features: int,
) -> torch.Tensor:
    _check(x, weight, bias, residual, activation, out_features)
    return x.new_empty((*x.shape[:-1], out_features))


OPERATOR = torch.ops.untorch.packed_linear.default
