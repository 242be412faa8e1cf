"""``NVFP4Linear``: a linear layer with a weight in NVFP4, in place of an nn.Linear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from untorch.ops.int4_layout import INNER_K_TILES, K_TILE, LANES, N_TILE
from untorch.ops.nvfp4 import OPERATOR, PREFILLS
from untorch.ops.nvfp4_layout import BLOCK_SIZE, dequantize_nvfp4, pack_nvfp4_tiles, rows_of_global_scale
from untorch.quant.linear import padded_features
from untorch.quant.nvfp4 import NVFP4Weight
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["NVFP4Linear", "check_prefill", "tensors_of_layer"]


class NVFP4Linear(nn.Module):
    """y = x · Wᵀ + b with W in NVFP4: w = e2m1 · block_scale · global_scale.

    packed_weight: int32 [n / 8][k / (16·t)][32][t / 2] (``untorch.quant.pack_nvfp4_tiles``), where n and k are
        out_features and in_features, padded.
    block_scale: float8_e4m3fn [n, k / 16].
    global_scale: float32 [n], one for each output. A single one is repeated: AOTInductor would write a constant of
        one number anew at each call.
    bias: [out_features] in the dtype of the activations, or None.
    in_features, out_features: as nn.Linear has them.
    method: where the values come from, such as "search" or "modelopt".
    prefill: how GPUs may compute the GEMM at large M, "exact", "fp8" or "fp4": see ``untorch::nvfp4_linear``.

    Scales keep their dtypes when the module is cast (``module.half()``). It has no attribute ``weight``: code that
    reads the weight of a linear layer must not take the packed one for it.
    """

    group_size = BLOCK_SIZE
    packed_weight: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        packed_weight: torch.Tensor,
        block_scale: torch.Tensor,
        global_scale: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        in_features: int,
        out_features: int,
        method: str,
        prefill: str = "exact",
    ) -> None:
        super().__init__()
        check_prefill("NVFP4Linear", prefill)
        _check(packed_weight, block_scale, global_scale, bias, in_features, out_features)
        self.in_features, self.out_features, self.method = in_features, out_features, method
        self.prefill = prefill
        self.register_buffer("packed_weight", packed_weight)
        self.register_buffer("block_scale", block_scale)
        self.register_buffer("global_scale", global_scale)
        n = packed_weight.shape[0] * N_TILE
        if bias is not None and n != out_features:
            bias = nn.functional.pad(bias.detach(), (0, n - out_features))
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def from_weight(
        cls,
        weight: NVFP4Weight,
        bias: torch.Tensor | None,
        *,
        in_features: int,
        method: str,
        prefill: str = "exact",
    ) -> NVFP4Linear:
        """The layer of a matrix [out_features, k], of which ``in_features`` columns are no padding.

        Nothing is rounded. Raises InvalidArgumentError.
        """
        tensors = tensors_of_layer(weight)
        n = weight.packed.shape[0]
        return cls(*tensors, bias, in_features=in_features, out_features=n, method=method, prefill=prefill)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in the input's dtype."""
        if input.shape[-1] != self.in_features:
            raise InvalidArgumentError(
                f"NVFP4Linear: expected {self.in_features} features in the last dimension, got {tuple(input.shape)}"
            )
        x = input if statically_known_true(input.stride(-1) == 1) else input.contiguous()
        weight = self.packed_weight, self.block_scale, self.global_scale
        y: torch.Tensor = OPERATOR(x, *weight, self.bias, self.prefill)
        # A copy, as callers may take views that a slice does not allow.
        return y if y.shape[-1] == self.out_features else y[..., : self.out_features].contiguous()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [out_features, in_features] that this layer multiplies with."""
        weight = dequantize_nvfp4(self.packed_weight, self.block_scale, self.global_scale, dtype)
        return weight[: self.out_features, : self.in_features]

    @property
    def weight_nbytes(self) -> int:
        """The bytes of the packed weight with its scales."""
        tensors = (self.packed_weight, self.block_scale, self.global_scale)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def extra_repr(self) -> str:
        """As nn.Linear, with the method, and with prefill where it is not "exact"."""
        prefill = "" if self.prefill == "exact" else f", prefill={self.prefill!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"method={self.method!r}{prefill}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> NVFP4Linear:
        """What ``to`` and ``half`` call: scales move, and keep the dtypes that the format gives them."""
        scales = {"block_scale": self.block_scale, "global_scale": self.global_scale}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in scales.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self


def check_prefill(caller: str, prefill: str) -> None:
    """Raises InvalidArgumentError, in the name of ``caller``, where that is not known."""
    if prefill not in PREFILLS:
        known = ", ".join(repr(name) for name in PREFILLS)
        raise InvalidArgumentError(f"{caller}: prefill: expected one of {known}, got {prefill!r}")


def tensors_of_layer(weight: NVFP4Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed_weight, block_scale and global_scale of the layer of a matrix [n, k]. Raises InvalidArgumentError."""
    if weight.packed.dim() != 2 or weight.packed.dtype != torch.uint8:
        raise InvalidArgumentError(f"NVFP4Linear: weight: expected packed uint8 [n, k / 2], got {_kind(weight.packed)}")
    n, half_k = weight.packed.shape
    rows = rows_of_global_scale("NVFP4Linear", weight.global_scale, (n,)).expand(n)
    padded_n, padded_k = padded_features(2 * half_k, n, BLOCK_SIZE)
    more_n, more_k = padded_n - n, padded_k - 2 * half_k
    packed = nn.functional.pad(weight.packed, (0, more_k // 2, 0, more_n))
    # As bytes: not every device pads float8. The byte 0 is the scale 0.
    scales = nn.functional.pad(weight.block_scale.view(torch.uint8), (0, more_k // BLOCK_SIZE, 0, more_n))
    return pack_nvfp4_tiles(packed), scales.view(torch.float8_e4m3fn), nn.functional.pad(rows, (0, more_n))


def _check(
    packed_weight: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out_features: int,
) -> None:
    shape = tuple(packed_weight.shape)
    if packed_weight.dtype != torch.int32 or len(shape) != 4 or shape[2] != LANES or 2 * shape[3] not in INNER_K_TILES:
        raise InvalidArgumentError(
            f"NVFP4Linear: packed_weight: expected int32 [n / 8][k / (16 · inner_k_tiles)][32][inner_k_tiles / 2], got "
            f"{_kind(packed_weight)}"
        )
    n, k = shape[0] * N_TILE, shape[1] * shape[3] * 2 * K_TILE
    if not (n - N_TILE < out_features <= n) or not (0 < in_features <= k):
        raise InvalidArgumentError(
            f"NVFP4Linear: packed_weight: it holds {n} × {k} values, which do not fit {out_features} × {in_features} "
            f"features"
        )
    expected = {
        "block_scale": (block_scale, torch.float8_e4m3fn, [n, k // BLOCK_SIZE]),
        "global_scale": (global_scale, torch.float32, [n]),
    }
    for name, (tensor, dtype, sizes) in expected.items():
        if list(tensor.shape) != sizes or tensor.dtype != dtype:
            raise InvalidArgumentError(
                f"NVFP4Linear: {name}: expected {str(dtype).removeprefix('torch.')} {sizes}, got {_kind(tensor)}"
            )
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise InvalidArgumentError(f"NVFP4Linear: bias: expected [{out_features}], got {list(bias.shape)}")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
