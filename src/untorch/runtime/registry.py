"""The registry of Python kernels, for operators without a C shim: built-in ones and those that users register."""

from __future__ import annotations

import atexit
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from untorch import _core
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    import numpy

__all__ = [
    "Kernel", "Registration", "find_kernel", "find_registration", "manual_seed", "native_operators", "random_generator",
    "register_kernel", "registered_kernels", "served_by",
]  # fmt: skip

DEVICES = ("cpu", "cuda")

Kernel = Callable[..., Any]
_KernelT = TypeVar("_KernelT", bound=Kernel)

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*::[A-Za-z_]\w*(?:\.\w+)?")

# The modules of untorch.runtime.kernels and the operators that each serves, those of aten without the namespace. A
# module is imported when one of its operators is first looked up; it holds the same names in its KERNELS dictionary
# (a test compares the two).
_MODULES: dict[str, str] = {
    "complex_numbers": (
        "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh "
        "neg _conj _conj_physical isnan isinf isfinite reciprocal square rsqrt sigmoid add.Tensor sub.Tensor "
        "div.Tensor addcmul addcdiv eq.Tensor eq.Scalar ne.Tensor ne.Scalar where.self sum sum.dim_IntList "
        "mean mean.dim prod prod.dim_int var.correction mm bmm mv dot vdot addmm baddbmm addmv clone "
        "prims::convert_element_type expand unsqueeze squeeze.dim squeeze.dims select.int diagonal "
        "split.Tensor unbind.int repeat prims::rev constant_pad_nd copy slice_scatter select_scatter"
    ),
    "decompositions": (
        "_linalg_svd _linalg_eigh linalg_eig linalg_eigvals _linalg_eigvals linalg_qr geqrf "
        "linalg_householder_product orgqr ormqr linalg_pinv.atol_rtol_tensor linalg_matrix_exp "
        "matrix_exp"
    ),
    "detection": "torchvision::nms torchvision::roi_align",
    "fft": "_fft_c2c _fft_r2c _fft_c2r",
    "ldl": "linalg_ldl_factor_ex linalg_ldl_solve",
    "linalg": (
        "_linalg_det _linalg_slogdet _linalg_solve_ex linalg_inv_ex linalg_lu_factor_ex linalg_lu lu_unpack "
        "linalg_lu_solve linalg_solve_triangular triangular_solve linalg_cholesky_ex cholesky cholesky_solve "
        "_cholesky_solve_helper cholesky_inverse _linalg_check_errors linalg_lstsq linalg_cross"
    ),
    "quantization": (
        "fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask "
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
    ),
    "random": (
        "multinomial bernoulli bernoulli.p bernoulli.Tensor normal.Tensor_float normal.float_Tensor "
        "normal.Tensor_Tensor normal.float_float normal_functional prims::normal uniform exponential geometric cauchy "
        "log_normal poisson binomial _standard_gamma _sample_dirichlet randperm randperm.generator randint "
        "randint.generator randint.low randint.low_generator randint_like randint_like.generator "
        "randint_like.Tensor randint_like.Tensor_generator randint_like.low_dtype "
        "randint_like.low_generator_dtype random.from random.to random"
    ),
    "sequence": "_pack_padded_sequence _pad_packed_sequence complex _masked_softmax conv_tbc",
    "statistics": (
        "median.dim nanmedian.dim median nanmedian kthvalue mode histc histogram.bin_ct histogram.bins_tensor "
        "_histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors bincount"
    ),
    "unique": "_unique2 _unique unique_consecutive unique_dim_consecutive unique_dim",
    "vision": "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa",
}
_BUILTIN = {
    name if "::" in name else f"aten::{name}": module for module, names in _MODULES.items() for name in names.split()
}


@dataclass(frozen=True)
class Registration:
    """A kernel that a user registered, and how its results are taken."""

    kernel: Kernel
    cast: bool = False
    unchecked: bool = False


# By name and device.
_registered: dict[tuple[str, str], Registration] = {}
# Kernels may come from a script that ends while a program is alive; nothing is to hold them then.
atexit.register(_registered.clear)
_generator: numpy.random.Generator | None = None


@overload
def register_kernel(
    name: str, fn: None = None, *, device: str = "cpu", cast: bool = False, unchecked: bool = False
) -> Callable[[_KernelT], _KernelT]: ...
@overload
def register_kernel(
    name: str, fn: _KernelT, *, device: str = "cpu", cast: bool = False, unchecked: bool = False
) -> _KernelT: ...
def register_kernel(
    name: str, fn: _KernelT | None = None, *, device: str = "cpu", cast: bool = False, unchecked: bool = False
) -> Any:
    """Make ``fn`` compute the operator ``name`` wherever a model calls it through the proxy executor on ``device``.

    ``name`` is ``"namespace::operator"``, which serves every overload, or ``"namespace::operator.overload"``, which
    wins over it. A name that is registered again for a device is replaced, and registered kernels come before the
    built-in ones. ``fn`` gets the operator's arguments under the names of its schema and returns one array, or a tuple
    with one entry for each of the operator's results. An operator that writes into an argument writes into the array
    that it was given. Without ``fn`` this is a decorator.

    For ``device="cpu"`` tensors come as numpy arrays, and results are numpy arrays. For ``device="cuda"`` tensors come
    as ``untorch.Tensor`` on the GPU, which CuPy, PyTorch and others take through DLPack without a copy, and results are
    arrays on the same GPU, with DLPack or ``__cuda_array_interface__``. The call's stream is current meanwhile:
    ``untorch.current_stream()`` gives it, for kernels that are launched on it. ``fn`` need not wait for its work. While
    a call is captured into a CUDA graph it may only enqueue work on that stream.

    Results are copied. Each must have the dtype and shape that the operator's fake implementation declares, which the
    compiled model relies on; another one is a ModelError. With ``cast=True`` another dtype is converted, within
    numpy's rule "same_kind". A package of PyTorch's own packager may not tell what is declared: its calls raise
    UnsupportedError, unless ``unchecked=True`` says that the kernel is trusted.

    ``fn`` may keep its arguments. Their memory stays valid: an array that is an input of the call looks at the caller's
    array, any other stays as it is when ``fn`` returns. ``fn`` must not call the method that runs it.

    Raises InvalidArgumentError for a malformed name or an unknown device, ArgumentTypeError for an ``fn`` that is not
    callable.
    """
    key = _normalise(name)
    if device not in DEVICES:
        raise InvalidArgumentError(f'register_kernel: device: expected "cpu" or "cuda" for `{name}`, got {device!r}')
    for option, value in (("cast", cast), ("unchecked", unchecked)):
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"register_kernel: {option}: expected True or False for `{name}`, got {value!r}")
    if fn is None:

        def decorate(function: _KernelT) -> _KernelT:
            return register_kernel(name, function, device=device, cast=cast, unchecked=unchecked)

        return decorate
    if not callable(fn):
        raise ArgumentTypeError(
            f"register_kernel: expected a callable for `{name}`, got `{type(fn).__name__}`; pass a function"
        )
    _registered[key, device] = Registration(fn, cast, unchecked)
    for native in native_operators(device):  # calls of these come here from now on
        if key in (native, _base(native)):
            _core.use_native_operator(native, device, False)
    return fn


def native_operators(device: str) -> list[str]:
    """The operators without a C function that the library serves itself on the device, sorted."""
    return _core.native_operators(device)


def registered_kernels(device: str = "cpu") -> list[str]:
    """The names of all operators that have a Python kernel on the device, built in or registered, sorted."""
    built_in = _BUILTIN.keys() if device == "cpu" else set()
    return sorted(built_in | {name for name, where in _registered if where == device})


def served_by(target: str, device: str = "cpu") -> str | None:
    """What serves the operator on the device: "registered", "native" or "built-in"; None: nothing does."""
    if find_registration(target, device) is not None:
        return "registered"
    key = _normalise(target)
    if key in native_operators(device):
        return "native"
    return "built-in" if device == "cpu" and key in _BUILTIN else None


def find_kernel(target: str, device: str = "cpu") -> Kernel:
    """The Python kernel for the operator ``target``, ``"namespace::operator"`` or ``"namespace::operator.overload"``.

    Raises UnsupportedError when there is none.
    """
    if (registration := find_registration(target, device)) is not None:
        return registration.kernel
    key = _normalise(target)
    if device == "cpu" and key in _BUILTIN:  # by its exact name only: overloads differ in their arguments
        module = importlib.import_module(f"untorch.runtime.kernels.{_BUILTIN[key]}")
        kernel: Kernel = module.KERNELS[key.removeprefix("aten::")]
        return kernel
    if device == "cpu":
        raise UnsupportedError(
            f"operator `{target}` has no kernel: untorch has no C shim and no Python kernel for it; "
            f'register one with untorch.register_kernel("{target}", fn), or change the model so that it is not called'
        )
    raise UnsupportedError(
        f"operator `{target}` has no kernel for {device}: untorch has no C shim and no native kernel for it there; "
        f'register one that works on arrays on the GPU with untorch.register_kernel("{target}", fn, device="{device}")'
        f", change the model so that it is not called, or export it for the CPU"
    )


def find_registration(target: str, device: str = "cpu") -> Registration | None:
    """What a user registered for the operator ``target`` on the device."""
    key = _normalise(target)
    return _registered.get((key, device)) or _registered.get((_base(key), device))


def manual_seed(seed: int) -> None:
    """Seed the generator behind the random Python kernels (multinomial, normal, …); ``seed`` is not negative."""
    import numpy

    text = f"manual_seed: expected an integer that is not negative for `seed`, got {seed!r}"
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentTypeError(text)
    if seed < 0:
        raise InvalidArgumentError(text)
    global _generator
    _generator = numpy.random.default_rng(seed)


def random_generator() -> numpy.random.Generator:
    """The generator that random kernels draw from; unseeded until ``manual_seed`` is called."""
    global _generator
    if _generator is None:
        import numpy

        _generator = numpy.random.default_rng()
    return _generator


def _base(key: str) -> str:
    namespace, _, operator = key.partition("::")
    return f"{namespace}::{operator.partition('.')[0]}"


def _normalise(name: str) -> str:
    text = f"operator name: expected `namespace::operator` or `namespace::operator.overload`, got {name!r}"
    if not isinstance(name, str):
        raise ArgumentTypeError(text)
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(text)
    return name.removesuffix(".default")
