"""What CUDA's convolution, pooling, sampling, distances, transforms and linear algebra refuse, and with which words.

Needs no GPU: the tensors' address is made up, and every check comes before the first call into the driver.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.native.shim import CODES, ShimError, delete, handle, lib, raise_on

ADDRESS = 1 << 20
Shape = tuple[int, ...]


class Fake:
    """CUDA memory that is never touched."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self.shape = shape
        self.dtype = dtype

    def handle(self) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        strides = torch.empty(self.shape, device="meta").stride()
        n = len(self.shape)
        sizes, steps = (ctypes.c_int64 * max(n, 1))(*self.shape), (ctypes.c_int64 * max(n, 1))(*strides)
        raise_on(
            lib.aoti_torch_create_tensor_from_blob(
                ctypes.c_void_p(ADDRESS), ctypes.c_int64(n), sizes, steps, ctypes.c_int64(0),
                ctypes.c_int32(CODES[self.dtype]), ctypes.c_int32(1), ctypes.c_int32(0), ctypes.byref(out),
            )
        )  # fmt: skip
        return out


class Optional:
    """An optional tensor: a pointer to its handle."""

    def __init__(self, value: Fake | None) -> None:
        self.value = value


def refused(name: str, args: list[Any], expected: str, slots: int = 1) -> None:
    """Calls a shim and expects this text. Lists are passed with their length, ``None`` as a null pointer.

    ``name`` is an operator, whose CUDA name is called, or a whole C name that names no device.
    """
    owned: list[ctypes.c_void_p] = []
    keep: list[Any] = []
    c_args: list[Any] = []
    for arg in args:
        if isinstance(arg, Fake | torch.Tensor):
            owned.append(arg.handle() if isinstance(arg, Fake) else handle(arg))
            c_args.append(owned[-1])
        elif isinstance(arg, Optional):
            if arg.value is None:
                c_args.append(ctypes.c_void_p())
            else:
                owned.append(arg.value.handle())
                keep.append(owned[-1])
                c_args.append(ctypes.byref(keep[-1]))
        elif arg is None:
            c_args.append(ctypes.c_void_p())
        elif isinstance(arg, bool):
            c_args.append(ctypes.c_int32(arg))
        elif isinstance(arg, int):
            c_args.append(ctypes.c_int64(arg))
        elif isinstance(arg, float):
            c_args.append(ctypes.c_double(arg))
        else:
            c_args += [(ctypes.c_int64 * max(len(arg), 1))(*arg), ctypes.c_int64(len(arg))]
    out = [ctypes.c_void_p() for _ in range(slots)]
    symbol = name if name.startswith("aoti_torch_") else f"aoti_torch_cuda_{name}"
    try:
        with pytest.raises(ShimError) as error:
            raise_on(getattr(lib, symbol)(*c_args, *map(ctypes.byref, out)))
    finally:
        for h in owned:
            delete(h)
    assert str(error.value) == expected


def convolve(
    x: Any, w: Any, expected: str, bias: Fake | None = None, stride: Shape = (1, 1), padding: Shape = (0, 0),
    dilation: Shape = (1, 1), transposed: bool = False, output_padding: Shape = (0, 0), groups: int = 1,
) -> None:  # fmt: skip
    args = [x, w, Optional(bias), stride, padding, dilation, transposed, output_padding, groups]
    refused("convolution", args, f"convolution: {expected}")


def test_convolution() -> None:
    x, w = Fake(2, 3, 8, 8), Fake(4, 3, 3, 3)
    convolve(None, w, "argument 'input' is null")
    convolve(x, None, "argument 'weight' is null")
    convolve(torch.zeros(2, 3, 8, 8), w, "argument 'input' is on cpu, expected cuda")
    convolve(x, torch.zeros(4, 3, 3, 3), "argument 'weight' is on cpu, expected cuda")
    convolve(x, Fake(4, 3), "argument 'weight' must be 3-D, 4-D or 5-D, got shape [4, 3]")
    convolve(Fake(3, 8, 8), w, "argument 'input' must be 4-D like weight [4, 3, 3, 3], got shape [3, 8, 8]")
    convolve(
        x, Fake(4, 3, 3, 3, dtype=torch.float16),
        "input is float32 but weight is float16; convert one of them",
    )  # fmt: skip
    convolve(
        Fake(2, 3, 8, 8, dtype=torch.int32), Fake(4, 3, 3, 3, dtype=torch.int32),
        "dtype int32 is not supported, expected float16, bfloat16, float32 or float64",
    )  # fmt: skip
    convolve(
        x, Fake(4, 2, 3, 3),
        "weight [4, 2, 3, 3] with groups=1 expects 2 input channels, got input [2, 3, 8, 8]",
    )  # fmt: skip
    convolve(x, w, "argument 'groups' must be positive, got 0", groups=0)
    convolve(x, w, "weight [4, 3, 3, 3] does not divide into 3 groups", groups=3)
    convolve(x, w, "argument 'bias' must have shape [4], got [3]", bias=Fake(3))
    convolve(x, w, "bias is float64 but input is float32; convert one of them", bias=Fake(4, dtype=torch.float64))
    convolve(x, w, "argument 'stride' must be positive, got [0, 1]", stride=(0, 1))
    convolve(x, w, "argument 'stride' must have 1 or 2 values, got [1, 1, 1]", stride=(1, 1, 1))
    convolve(x, w, "argument 'padding' must not be negative, got [-1, 0]", padding=(-1, 0))
    convolve(
        x, w,
        "kernel [4, 3, 3, 3] with dilation [5, 1] is larger than the padded input, got input [2, 3, 8, 8] with padding "
        "[0, 0]",
        dilation=(5, 1),
    )  # fmt: skip
    convolve(
        Fake(2, 4, 8, 8), w, "argument 'output_padding' must be smaller than stride or dilation, got [1, 0]",
        transposed=True, output_padding=(1, 0),
    )  # fmt: skip


def test_pooling() -> None:
    x = Fake(2, 3, 8, 8)
    refused(
        "avg_pool2d", [Fake(8, 8), [2, 2], [], [0, 0], False, True, None],
        "avg_pool2d: argument 'self' must be 3-D or 4-D, got shape [8, 8]",
    )  # fmt: skip
    refused(
        "avg_pool2d", [x, [2, 2], [], [2, 0], False, True, None],
        "avg_pool2d: argument 'padding' must be between 0 and half the kernel, got [2, 0] with kernel [2, 2]",
    )  # fmt: skip
    refused(
        "avg_pool2d", [Fake(2, 3, 8, 8, dtype=torch.int64), [2, 2], [], [0, 0], False, True, None],
        "avg_pool2d: dtype int64 is not supported on CUDA, expected float16, bfloat16, float32 or float64",
    )  # fmt: skip
    refused(
        "max_pool2d_with_indices", [x, [9, 9], [], [0, 0], [1, 1], False],
        "max_pool2d_with_indices: the output is empty for input [2, 3, 8, 8] and kernel [9, 9]", slots=2,
    )  # fmt: skip
    refused(
        "max_pool3d_with_indices", [Fake(2, 3, 0, 8, 8), [1, 1, 1], [], [0, 0, 0], [1, 1, 1], False],
        "max_pool3d_with_indices: argument 'self' must not be empty but for the batch, got shape [2, 3, 0, 8, 8]",
        slots=2,
    )  # fmt: skip
    refused(
        "_adaptive_avg_pool2d", [x, [1]],
        "_adaptive_avg_pool2d: argument 'output_size' must have 2 values, got [1]",
    )  # fmt: skip
    refused(
        "adaptive_max_pool2d", [x, [-1, 2]],
        "adaptive_max_pool2d: argument 'output_size' must not be negative, got [-1, 2]", slots=2,
    )  # fmt: skip
    refused(
        "max_unpool2d", [x, Fake(2, 3, 8, 7, dtype=torch.int64), [16, 16]],
        "max_unpool2d: argument 'indices' must have shape [2, 3, 8, 8], got [2, 3, 8, 7]",
    )  # fmt: skip
    refused(
        "max_unpool2d", [x, Fake(2, 3, 8, 8, dtype=torch.int32), [16, 16]],
        "max_unpool2d: argument 'indices' must be int64, got int32",
    )  # fmt: skip
    refused(
        "fractional_max_pool2d", [x, [3, 3], [7, 2], Fake(2, 3, 2)],
        "fractional_max_pool2d: kernel [3, 3] with output [7, 2] does not fit into input [2, 3, 8, 8]", slots=2,
    )  # fmt: skip
    refused(
        "fractional_max_pool2d", [x, [3, 3], [2, 2], Fake(2, 2, 2)],
        "fractional_max_pool2d: argument 'random_samples' must have shape [2, 3, 2], got [2, 2, 2]", slots=2,
    )  # fmt: skip


def test_sampling_and_distances() -> None:
    x = Fake(2, 3, 4, 5, 6)
    refused(
        "grid_sampler_3d", [x, Fake(2, 4, 4, 4, 2), 0, 0, False],
        "grid_sampler_3d: argument 'grid' must have shape [2, d, h, w, 3], got [2, 4, 4, 4, 2]",
    )  # fmt: skip
    refused(
        "grid_sampler_3d", [x, Fake(2, 4, 4, 4, 3), 2, 0, False],
        "grid_sampler_3d: argument 'interpolation_mode' must be 0 (bilinear) or 1 (nearest), got 2",
    )  # fmt: skip
    refused(
        "_cdist_forward", [Fake(4, 3), Fake(5, 2), 2.0, None],
        "_cdist_forward: x1 and x2 must have rows of one length, got shapes [4, 3] and [5, 2]",
    )  # fmt: skip
    refused(
        "_cdist_forward", [Fake(4, 3, dtype=torch.float16), Fake(5, 3, dtype=torch.float16), 2.0, None],
        "_cdist_forward: dtype float16 is not supported, expected float32 or float64",
    )  # fmt: skip
    refused("_pdist_forward", [Fake(4, 3), -1.0], "_pdist_forward: argument 'p' must not be negative, got -1")
    refused("_pdist_forward", [Fake(3), 2.0], "_pdist_forward: argument 'self' must be 2-D, got shape [3]")
    refused(
        "_trilinear", [Fake(2, 3), Fake(2, 4, dtype=torch.float64), Fake(5, 3, 4), [1, 3], [1, 2], [0], [2], 1],
        "_trilinear: the operands must have one dtype, got float32, float64 and float32",
    )  # fmt: skip
    refused(
        "_trilinear", [Fake(2, 3), Fake(2, 4), Fake(5, 3, 4), [1], [1, 2], [0], [2], 1],
        "_trilinear: the operands must have one number of dimensions once expanded, got shapes [2, 3], [2, 4] and "
        "[5, 3, 4]",
    )  # fmt: skip


def test_transforms() -> None:
    x = Fake(4, 8, dtype=torch.complex64)
    refused(
        "_fft_c2c", [Fake(4, 8), [0], 0, True],
        "_fft_c2c: dtype float32 is not supported, expected complex64 or complex128",
    )  # fmt: skip
    refused("_fft_c2c", [x, [1, -1], 0, True], "_fft_c2c: argument 'dim' names a dimension twice: [1, -1]")
    refused(
        "_fft_c2c", [x, [0], 3, True],
        "_fft_c2c: argument 'normalization' must be 0 (none), 1 (by root n) or 2 (by n), got 3",
    )  # fmt: skip
    refused("_fft_r2c", [x, [0], 0, True], "_fft_r2c: dtype complex64 is not supported, expected float32 or float64")
    refused("_fft_r2c", [Fake(4, 8), [], 0, True], "_fft_r2c: argument 'dim' must name at least one dimension")
    refused("_fft_r2c", [Fake(4, 0), [1], 0, True], "_fft_r2c: dimension 1 of shape [4, 0] is empty")


def test_names_without_a_device_serve_cuda_tensors() -> None:
    lists: list[Any] = [(1, 1), (0, 0), (1, 1), False, (0, 0), 1]
    refused(
        "aoti_torch_convolution", [Fake(2, 3, 8, 8), torch.zeros(4, 3, 3, 3), None, *lists],
        "convolution: argument 'weight' is on cpu, expected cuda",
    )  # fmt: skip
    refused(
        "aoti_torch_convolution", [None, Fake(4, 3, 3, 3), None, *lists], "convolution: argument 'input' is null"
    )  # fmt: skip
    refused(
        "aoti_torch__fft_c2c", [Fake(4, 8, dtype=torch.complex64), [1, -1], 0, True],
        "_fft_c2c: argument 'dim' names a dimension twice: [1, -1]",
    )  # fmt: skip


def test_linear_algebra() -> None:
    refused(
        "cholesky_inverse", [Fake(3, 4), False],
        "cholesky_inverse: argument 'self' must be a batch of square matrices, got shape [3, 4]",
    )  # fmt: skip
    refused(
        "cholesky_inverse", [Fake(3, 3, dtype=torch.float16), False],
        "cholesky_inverse: argument 'self' must be float32, float64, complex64 or complex128, got float16; convert it "
        "in the model",
    )  # fmt: skip
    refused(
        "cholesky_solve", [Fake(4, 2), Fake(3, 3), False],
        "cholesky_solve: argument 'self' of shape [4, 2] must have 3 rows, as 'input2' has",
    )  # fmt: skip
    refused(
        "triangular_solve", [Fake(3, 2), Fake(3, 3, dtype=torch.float64), True, False, False],
        "triangular_solve: argument 'A' must be float32, got float64", slots=2,
    )  # fmt: skip
    refused(
        "triangular_solve", [Fake(2, 3, 2), Fake(4, 3, 3), True, False, False],
        "triangular_solve: the batches of 'self' of shape [2, 3, 2] and 'A' of shape [4, 3, 3] do not broadcast",
        slots=2,
    )  # fmt: skip
    refused("geqrf", [Fake(3)], "geqrf: argument 'self' must have at least 2 dimensions, got shape [3]", slots=2)
    refused(
        "ormqr", [Fake(4, 3), Fake(3), Fake(5, 2), True, False],
        "ormqr: argument 'input3' of shape [5, 2] must have 4 rows, as many as 'self' has rows",
    )  # fmt: skip
    refused(
        "lu_unpack", [Fake(4, 3), Fake(3, dtype=torch.int64), True, True],
        "lu_unpack: argument 'LU_pivots' must be int32, got int64", slots=3,
    )  # fmt: skip
    refused(
        "lu_unpack", [Fake(4, 3), Fake(4, dtype=torch.int32), True, True],
        "lu_unpack: argument 'LU_pivots' must have shape [3], got [4]", slots=3,
    )  # fmt: skip
