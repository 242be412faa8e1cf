"""``untorch::packed_linear``: a linear layer whose weight was packed for the matrix kernels at export.

y = activation(x · Wᵀ + bias) + residual, with W [n, k] stored as [ceil(n / 16), k, 16] and zeros behind n:
packed[j, kk, i] = W[16·j + i, kk]. The 16 outputs that one vector holds lie side by side, so the kernel streams the
weight from memory in order. The implementation here is the reference; libuntorch.so has the fast one.
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


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Packs W [n, k] into a new contiguous tensor [ceil(n / 16), k, 16] of the same dtype."""
    n, k = weight.shape
    blocks = -(-n // BLOCK)
    padded = weight.new_zeros((blocks * BLOCK, k))
    padded[:n] = weight
    return padded.reshape(blocks, BLOCK, k).transpose(1, 2).contiguous()


def unpack_weight(packed: torch.Tensor, out_features: int) -> torch.Tensor:
    """The inverse of ``pack_weight``: [ceil(n / 16), k, 16] to [n, k]."""
    blocks, k, _ = packed.shape
    return packed.transpose(1, 2).reshape(blocks * BLOCK, k)[:out_features]


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
    _expect("weight", "the packed shape", weight, (blocks, x.shape[-1], BLOCK))
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
    y = activate(F.linear(x, unpack_weight(weight, out_features), bias), activation)
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
