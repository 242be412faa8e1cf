"""``untorch::nvfp4_linear``: a linear layer whose weight is stored in NVFP4.

y = x · Wᵀ + bias, where W [n, k] is w = e2m1 · block_scale · global_scale: four bits, a scale for each 16 inputs of an
output, and a scale for all or for each output. ``nvfp4_layout`` has the codes and both of their layouts.

libuntorch.so computes it, for torch's tensors as in files (``native``). The reference here, which makes the whole
weight in float32 whatever ``prefill`` asks for, is for the dtypes and devices that the library does not serve.

Graphs hold the operator as one node: no pass and no constant folding sees a weight that is unpacked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from untorch.ops import native
from untorch.ops.describe import kind_of
from untorch.ops.int4_layout import INNER_K_TILES, K_TILE, LANES, N_TILE
from untorch.ops.nvfp4_layout import BLOCK_SIZE, dequantize_nvfp4

__all__ = ["C_SHIMS", "OPERATOR", "PREFILLS", "nvfp4_linear", "nvfp4_linear_reference"]

PREFILLS = ("exact", "fp8", "fp4")

# AOTInductor declares all of them, and calls the one of the model's device.
C_SHIMS = [
    f"AOTITorchError aoti_torch_{device}_nvfp4_linear(AtenTensorHandle x, AtenTensorHandle weight_packed, "
    f"AtenTensorHandle block_scale, AtenTensorHandle global_scale, AtenTensorHandle* bias, const char* prefill, "
    f"AtenTensorHandle* ret0)"
    for device in ("cpu", "cuda")
]


@torch.library.custom_op("untorch::nvfp4_linear", mutates_args=())
def nvfp4_linear(
    x: torch.Tensor,
    weight_packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    prefill: str = "exact",
) -> torch.Tensor:
    """x · Wᵀ + bias for x [..., k_in]; gives [..., n] in x's dtype, contiguous.

    x: floating point, the last dimension contiguous. k_in may be less than the weight's k, which was padded then: the
        weights behind it are multiplied by nothing.
    weight_packed: uint8 [n, k / 2], as files have it, or int32 [n / 8][k / (16·t)][32][t / 2] with t = 2, 4 or 8, for
        tensor cores; contiguous. k is a multiple of 16.
    block_scale: float8_e4m3fn [n, k / 16], contiguous.
    global_scale: float32 [] or [1], or [n]: one for each row, contiguous.
    bias: [n] in x's dtype, or None.
    prefill: how a C function for a GPU may compute GEMMs with large M, which are compute-bound. "exact": with x as it
        is. "fp8": x and the weight are rounded to float8_e4m3fn, in rows with a float32 scale each, on
        GPUs from compute capability 8.9 on. "fp4": x is rounded to NVFP4, in rows with a float32 scale each, on GPUs
        that multiply two such operands (sm_100, sm_103, sm_120, sm_121). Other GPUs refuse them. The CPU, and the
        reference on any device, are exact.

    Sums are in float32, for float64 in that. On GPUs the tiles with t = 8 are the fast layout. Raises ValueError;
    RuntimeError for what the GPU cannot do.
    """
    n = _check(x, weight_packed, block_scale, global_scale, bias, prefill)
    if native.serves("nvfp4_linear", x):
        out = x.new_empty((*x.shape[:-1], n))
        text = native.Text(prefill.encode())
        native.call("nvfp4_linear", out, x, weight_packed, block_scale, global_scale, (bias,), text)
        return out
    return nvfp4_linear_reference(x, weight_packed, block_scale, global_scale, bias)


def nvfp4_linear_reference(
    x: torch.Tensor,
    weight_packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator in torch's own operators, on any device, with the whole weight in float32 or float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    matrix = dequantize_nvfp4(weight_packed, block_scale, global_scale, wide)[:, : x.shape[-1]]
    y = F.linear(x.to(wide), matrix, None if bias is None else bias.to(wide))
    return y.to(x.dtype).contiguous()


@nvfp4_linear.register_fake
def _nvfp4_linear_fake(
    x: torch.Tensor,
    weight_packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    prefill: str = "exact",
) -> torch.Tensor:
    n = _check(x, weight_packed, block_scale, global_scale, bias, prefill)
    return x.new_empty((*x.shape[:-1], n))


def _check(
    x: torch.Tensor,
    weight_packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    prefill: str,
) -> int:
    """The weight's n. Raises ValueError."""
    if prefill not in PREFILLS:
        known = ", ".join(repr(name) for name in PREFILLS)
        raise ValueError(f"nvfp4_linear: prefill: expected one of {known}, got {prefill!r}")
    n, k = _weight_shape(weight_packed)
    _expect("block_scale", block_scale, ((n, k // BLOCK_SIZE),), torch.float8_e4m3fn)
    _expect("global_scale", global_scale, ((), (1,), (n,)), torch.float32)
    if x.dim() < 1 or not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise ValueError(f"nvfp4_linear: x: expected floating point [..., k], 16 bits or more, got {kind_of(x)}")
    if x.shape[-1] > k:
        raise ValueError(
            f"nvfp4_linear: x: expected at most the weight's k = {k} in the last dimension, got {kind_of(x)}"
        )
    stride = x.stride(-1)  # one that varies cannot be judged before the call
    if isinstance(stride, int) and stride != 1 and x.shape[-1] > 1:
        raise ValueError(f"nvfp4_linear: x: expected a contiguous last dimension, got the stride {stride}: copy it")
    if bias is not None:
        _expect("bias", bias, ((n,),), x.dtype)
    tensors = {
        "weight_packed": weight_packed, "block_scale": block_scale, "global_scale": global_scale, "bias": bias,
    }  # fmt: skip
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"nvfp4_linear: {name}: expected the device of x, {x.device}, got {tensor.device}")
    return n


def _weight_shape(packed: torch.Tensor) -> tuple[int, int]:
    """(n, k) of the packed weight."""
    if packed.dtype == torch.uint8 and packed.dim() == 2 and packed.is_contiguous():
        if 2 * packed.shape[1] % BLOCK_SIZE:
            raise ValueError(
                f"nvfp4_linear: weight_packed: expected k a multiple of {BLOCK_SIZE}, got {kind_of(packed)} for k = "
                f"{2 * packed.shape[1]}"
            )
        return packed.shape[0], 2 * packed.shape[1]
    if packed.dtype != torch.int32 or packed.dim() != 4 or packed.shape[2] != LANES or not packed.is_contiguous():
        raise ValueError(
            f"nvfp4_linear: weight_packed: expected a contiguous uint8 tensor [n, k / 2] or int32 tensor [n / 8]"
            f"[k / (16 · inner_k_tiles)][32][inner_k_tiles / 2], got {kind_of(packed)}"
        )
    if 2 * packed.shape[3] not in INNER_K_TILES:
        raise ValueError(f"nvfp4_linear: weight_packed: expected inner_k_tiles of 2, 4 or 8, got {2 * packed.shape[3]}")
    return packed.shape[0] * N_TILE, packed.shape[1] * packed.shape[3] * 2 * K_TILE


def _expect(name: str, tensor: torch.Tensor, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) not in shapes or tensor.dtype != dtype or not tensor.is_contiguous():
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"nvfp4_linear: {name}: expected contiguous {str(dtype).removeprefix('torch.')} {expected}, got "
            f"{kind_of(tensor)}"
        )


OPERATOR = torch.ops.untorch.nvfp4_linear.default
