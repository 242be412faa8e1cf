"""``untorch::w8a8_linear``: a linear layer with 8-bit weights, int8 or float8_e4m3fn, for GPUs.

y = x · Wᵀ + bias, where W [n, k] is q · scale, with float32 scales:

    [n]                  one an output, for int8 and float8
    [⌈n / 128⌉, blocks]  one for 128 × 128 weights, for float8; blocks = ⌈k / 128⌉, padded to a multiple of 4

Each row of x, or with scales of blocks each 128 values of a row, is rounded to the dtype of the weight when the
operator runs, symmetrically: s = max|x| / 127 or max|x| / 448, and x ≈ round(x / s) · s. The sums of int8 are in int32,
those of float8 in float32. A row with a value that is not finite gives NaN.

On GPUs up to ``EXACT_M`` rows keep 16 bits for int8, and for float8 12 significant ones, more than bfloat16 has:
reading the weight takes all the time there, and rounding x further would gain nothing. x is multiplied as it is where
there is no GEMM of these types: scales of blocks on other GPUs than sm_90; float8 before sm_89.

libuntorch.so computes it on CUDA, for torch's tensors as in files (``native``). The reference here, which rounds x, is
for CPUs, where no file has the operator.
"""

from __future__ import annotations

import torch

from untorch.ops import native
from untorch.ops.describe import kind_of

__all__ = [
    "C_SHIM", "EXACT_M", "INT8_MAX_K", "LARGEST", "OPERATOR", "SCALE_BLOCK", "SIZE_STEP", "block_scale_shape",
    "dequantize_w8", "round_rows", "w8a8_linear", "w8a8_linear_reference",
]  # fmt: skip

SIZE_STEP = 16  # of n and k
SCALE_BLOCK = 128
EXACT_M = 8
INT8_MAX_K = (2**31 - 1) // (127 * 128)  # sums of more do not fit int32
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_BLOCKS_STEP = 4  # of the scales of blocks along k, as cuBLASLt reads them

C_SHIM = (
    "AOTITorchError aoti_torch_cuda_w8a8_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, "
    "AtenTensorHandle* bias, AtenTensorHandle* ret0)"
)


@torch.library.custom_op("untorch::w8a8_linear", mutates_args=())
def w8a8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x · Wᵀ + bias for x [..., k_in]; gives [..., n] in x's dtype, contiguous.

    x: float32, bfloat16 or float16 (float64 in the reference), the last dimension contiguous. k_in may be less than the
        weight's k, which was padded then: the weights behind it are multiplied by nothing.
    weight: int8 or float8_e4m3fn [n, k], contiguous, n and k multiples of 16.
    scale: float32 [n], or ``block_scale_shape(n, k)`` for float8, contiguous.
    bias: [n] in x's dtype, or None.

    Raises ValueError; RuntimeError for what the GPU cannot do: it needs compute capability 8.0.
    """
    n = _check(x, weight, scale, bias)
    if x.device.type == "cuda" and native.serves("w8a8_linear", x):
        out = x.new_empty((*x.shape[:-1], n))
        native.call("w8a8_linear", out, x, weight, scale, (bias,))
        return out
    return w8a8_linear_reference(x, weight, scale, bias)


def w8a8_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The operator in torch's own operators, on any device, with the rows of x rounded.

    Sums are in float64, for x of 16 bits in float32.
    """
    dtype = torch.float32 if x.dtype.itemsize == 2 else torch.float64
    rounded = round_rows(x, weight.dtype, SCALE_BLOCK if scale.dim() == 2 else x.shape[-1])
    matrix = dequantize_w8(weight, scale, dtype)[:, : x.shape[-1]]
    y = rounded.to(dtype) @ matrix.T
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(x.dtype).contiguous()


def round_rows(x: torch.Tensor, dtype: torch.dtype, part: int) -> torch.Tensor:
    """x [..., k] as the operator rounds it to ``dtype``, in parts of so many values of a row; float64 [..., k]."""
    k = x.shape[-1]
    if x.numel() == 0:
        return x.double()
    parts = -(-k // part)
    values = torch.nn.functional.pad(x.float(), (0, parts * part - k)).reshape(*x.shape[:-1], parts, part)
    largest = values.abs().amax(-1, keepdim=True)
    scale = largest / LARGEST[dtype]
    # A number over a tensor would be its reciprocal times the number.
    steps = torch.where(largest == 0, 0.0, values * (torch.full_like(largest, LARGEST[dtype]) / largest))
    rounded = steps.round() if dtype == torch.int8 else steps.to(dtype).float()
    finite = torch.isfinite(values).all(-1, keepdim=True)
    made = torch.where(finite, rounded.double() * scale.double(), torch.nan)
    return made.flatten(-2)[..., :k]


def dequantize_w8(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [n, k] that the operator multiplies with."""
    n, k = weight.shape
    if scale.dim() == 1:
        factors = scale.unsqueeze(1)
    else:
        factors = scale.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return weight.to(dtype) * factors.to(dtype)


def block_scale_shape(n: int, k: int) -> tuple[int, int]:
    """The shape of the scales of blocks for a weight [n, k]."""
    blocks = -(-k // SCALE_BLOCK)
    return -(-n // SCALE_BLOCK), -(-blocks // _BLOCKS_STEP) * _BLOCKS_STEP


@w8a8_linear.register_fake
def _w8a8_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _check(x, weight, scale, bias)))


def _check(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> int:
    """The weight's n. Raises ValueError."""
    if weight.dim() != 2 or weight.dtype not in LARGEST or not weight.is_contiguous():
        raise ValueError(
            f"w8a8_linear: weight: expected contiguous int8 or float8_e4m3fn [n, k], got {kind_of(weight)}"
        )
    n, k = weight.shape
    if n % SIZE_STEP or k % SIZE_STEP:
        raise ValueError(f"w8a8_linear: weight: expected sizes that are multiples of {SIZE_STEP}, got [{n}, {k}]")
    shapes: tuple[tuple[int, ...], ...] = ((n,),)
    if weight.dtype == torch.float8_e4m3fn:
        shapes = (*shapes, block_scale_shape(n, k))
    _expect("scale", scale, shapes, torch.float32)
    if x.dim() < 1 or not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise ValueError(f"w8a8_linear: x: expected floating point [..., k], 16 bits or more, got {kind_of(x)}")
    if x.shape[-1] > k:
        raise ValueError(
            f"w8a8_linear: x: expected at most the weight's k = {k} in the last dimension, got {kind_of(x)}"
        )
    stride = x.stride(-1)  # one that varies cannot be judged before the call
    if isinstance(stride, int) and stride != 1 and x.shape[-1] > 1:
        raise ValueError(f"w8a8_linear: x: expected a contiguous last dimension, got the stride {stride}: copy it")
    if bias is not None:
        _expect("bias", bias, ((n,),), x.dtype)
    for name, tensor in {"weight": weight, "scale": scale, "bias": bias}.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"w8a8_linear: {name}: expected the device of x, {x.device}, got {tensor.device}")
    return n


def _expect(name: str, tensor: torch.Tensor, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) not in shapes or tensor.dtype != dtype or not tensor.is_contiguous():
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"w8a8_linear: {name}: expected contiguous {str(dtype).removeprefix('torch.')} {expected}, got "
            f"{kind_of(tensor)}"
        )


OPERATOR = torch.ops.untorch.w8a8_linear.default
