"""The SLEEF-named vector functions: every name that PyTorch's headers can emit, accuracy in ulp, special values."""

from __future__ import annotations

import ctypes
import functools
import math
import pathlib
import platform
import re
from collections.abc import Callable
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
import torch
from shim import library_path

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="SLEEF names are exported on x86-64"),
    # Casting to the narrower type overflows on purpose.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

Array = npt.NDArray[Any]
UNARY = {
    "acos": "_u10", "acosh": "_u10", "asin": "_u10", "asinh": "_u10", "atan": "_u10", "atanh": "_u10", "cos": "_u10",
    "cosh": "_u10", "erf": "_u10", "erfc": "_u15", "exp": "_u10", "exp2": "_u10", "expm1": "_u10", "lgamma": "_u10",
    "log": "_u10", "log10": "_u10", "log1p": "_u10", "log2": "_u10", "sin": "_u10", "sinh": "_u10", "tan": "_u10",
    "tanh": "_u10",
}  # fmt: skip
BINARY = {"atan2": "_u10", "fmod": "", "hypot": "_u05", "pow": "_u10", "copysign": "", "nextafter": ""}
# u05 rounds once more in double: SLEEF's own bound is 0.5001 too.
BOUND = {"_u05": 0.5001, "_u10": 1.0, "_u15": 1.5, "_u35": 3.5, "": 0.5}
LANES = {"f": (4, 8, 16), "d": (2, 4, 8)}
INF, NAN = math.inf, math.nan


@functools.cache
def library() -> ctypes.CDLL:
    """libuntorch.so."""
    return ctypes.CDLL(library_path())


def apply(name: str, a: Array, b: Array | None = None, outputs: int = 1) -> Array:
    """The exported function over arrays; skips where this CPU lacks the width."""
    a = np.ascontiguousarray(a)
    out = np.empty(outputs * a.size, a.dtype)
    second = None if b is None else np.ascontiguousarray(b, a.dtype)
    code = library().untorch_vecmath_apply(
        name.encode(),
        ctypes.c_void_p(a.ctypes.data),
        ctypes.c_void_p(None if second is None else second.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(a.size),
    )
    if code == 2:
        pytest.skip(f"this CPU lacks the vector width of {name}")
    assert code == 0, f"{name} is not known"
    return out


def ulp_error(got: Array, want: Array) -> Array:
    """|got − want| in units of the last place of want's value in got's type; special values must be equal."""
    kind = np.finfo(got.dtype)
    with np.errstate(all="ignore"):
        rounded = want.astype(got.dtype)
        _, exponent = np.frexp(np.where(np.isfinite(want), want, 1))
        exponent = np.maximum(exponent, kind.minexp + 1) - (kind.nmant + 1)
        error = np.abs((got.astype(want.dtype) - want) / np.ldexp(np.ones_like(want), exponent)).astype(np.float64)
    special = ~np.isfinite(rounded) | ~np.isfinite(got)
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    # Next to the overflow the largest finite number is within the bound as well.
    edge = np.isinf(rounded) & (np.abs(got) == kind.max) & (np.abs(want) < float(kind.max) * (1 + float(kind.eps)))
    return np.where(special, np.where(same | edge, 0.0, np.inf), error)


def float_samples(seed: int, count: int) -> Array:
    """All exponents and signs, random mantissas, and the plain range where most work is done."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**32, count // 2, dtype=np.uint32).view(np.float32)
    plain = generator.normal(0, 4, count - count // 2).astype(np.float32)
    return np.concatenate([bits, plain])


def double_samples(seed: int, count: int) -> Array:
    """The same for double."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**64, count // 2, dtype=np.uint64).view(np.float64)
    plain = generator.normal(0, 4, count - count // 2) * 10.0 ** generator.integers(-3, 3, count - count // 2)
    return np.concatenate([bits, plain])


REFERENCE: dict[str, Callable[..., Any]] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atanh": np.arctanh, "cos": np.cos, "cosh": np.cosh, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2, "sin": np.sin, "sinh": np.sinh,
    "tan": np.tan, "tanh": np.tanh, "atan2": np.arctan2, "fmod": np.fmod, "hypot": np.hypot, "pow": np.power,
    "copysign": np.copysign,
    "erf": lambda x: torch.erf(torch.from_numpy(x)).numpy(),
    "erfc": lambda x: torch.erfc(torch.from_numpy(x)).numpy(),
    "lgamma": lambda x: np.array([scalar_lgamma(v) for v in x]),
}  # fmt: skip


def scalar_lgamma(x: float) -> float:
    """math.lgamma with C's poles."""
    if math.isinf(x) or (x <= 0 and x == math.floor(x)):
        return INF
    return INF if x > 1e300 else math.lgamma(x)


def reference(name: str, *arguments: Array) -> Array:
    """The float function's value in double, or the double function's in long double."""
    with np.errstate(all="ignore"):
        if name == "nextafter":
            return np.asarray(np.nextafter(*arguments))
        wide = np.float64 if arguments[0].dtype == np.float32 else np.longdouble
        if name in ("erf", "erfc", "lgamma") and wide is np.longdouble:
            return in_mpmath(name, arguments[0])
        return np.asarray(REFERENCE[name](*(a.astype(wide) for a in arguments)))


def in_mpmath(name: str, x: Array) -> Array:
    """erf, erfc or log|gamma| at 40 digits, as the nearest long double."""
    functions = {"erf": mpmath.erf, "erfc": mpmath.erfc, "lgamma": lambda v: mpmath.log(abs(mpmath.gamma(v)))}
    with mpmath.workdps(40):
        result = []
        for value in x:
            if math.isnan(value):
                result.append(np.longdouble(NAN))
            elif name == "lgamma" and value <= 0 and value == math.floor(value):
                result.append(np.longdouble(INF))
            else:
                result.append(np.longdouble(mpmath.nstr(functions[name](mpmath.mpf(float(value))), 30)))
    return np.array(result, np.longdouble)


def names(kind: str, table: dict[str, str]) -> list[tuple[str, str, str]]:
    """(function, accuracy, exported name) for every width."""
    return [(f, acc, f"Sleef_{f}{kind}{n}{acc}") for f, acc in table.items() for n in LANES[kind]]


@pytest.mark.parametrize(("function", "accuracy", "name"), names("f", UNARY))
def test_float_unary_accuracy(function: str, accuracy: str, name: str) -> None:
    x = float_samples(1, 50_000 if function == "lgamma" else 300_000)
    error = ulp_error(apply(name, x), reference(function, x))
    worst = int(np.argmax(error))
    assert error[worst] <= BOUND[accuracy], f"{name}({float(x[worst]).hex()}): {error[worst]:.3f} ulp"


@pytest.mark.parametrize(("function", "accuracy", "name"), names("f", BINARY))
def test_float_binary_accuracy(function: str, accuracy: str, name: str) -> None:
    x, y = float_samples(2, 200_000), float_samples(3, 200_000)
    if function == "pow":
        x[::2] = np.abs(x[::2])
        y[::4] = np.round(y[::4])
    y[::7] = x[::7]
    error = ulp_error(apply(name, x, y), reference(function, x, y))
    worst = int(np.argmax(error))
    got = apply(name, x[worst : worst + 1], y[worst : worst + 1])[0]
    assert error[worst] <= BOUND[accuracy], f"{name}({x[worst]!r}, {y[worst]!r}) = {got!r}: {error[worst]:.3f} ulp"


@pytest.mark.parametrize(("function", "accuracy", "name"), names("d", UNARY))
def test_double_unary_accuracy(function: str, accuracy: str, name: str) -> None:
    slow = function in ("erf", "erfc", "lgamma")
    x = double_samples(4, 200 if slow else 30_000)
    if function == "lgamma":
        x = x[(np.abs(x) < 1e3) & (x > -20)]
    elif slow:
        x = x[~(np.abs(x) > 27)]
    error = ulp_error(apply(name, x), reference(function, x))
    worst = int(np.argmax(error))
    assert error[worst] <= BOUND[accuracy], f"{name}({float(x[worst]).hex()}): {error[worst]:.3f} ulp"


@pytest.mark.parametrize(("function", "accuracy", "name"), names("d", BINARY))
def test_double_binary_accuracy(function: str, accuracy: str, name: str) -> None:
    x, y = double_samples(5, 20_000), double_samples(6, 20_000)
    if function == "pow":
        x[::2] = np.abs(x[::2])
        y[::4] = np.round(y[::4])
    y[::7] = x[::7]
    error = ulp_error(apply(name, x, y), reference(function, x, y))
    worst = int(np.argmax(error))
    assert error[worst] <= BOUND[accuracy], f"{name}({x[worst]!r}, {y[worst]!r}): {error[worst]:.3f} ulp"


SPECIAL = [0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1e-40, -1e-40, 3e38, -3e38, 1e30]


def same_bits_or_nan(got: Array, want: Array) -> Array:
    """Equal with the sign of zero, NaN equal to NaN."""
    equal = (np.isnan(got) & np.isnan(want)) | ((got == want) & (np.signbit(got) == np.signbit(want)))
    return np.asarray(equal)


@pytest.mark.parametrize("kind", ["f", "d"])
@pytest.mark.parametrize("function", sorted(set(UNARY) - {"lgamma", "erf", "erfc"}))
def test_special_values(function: str, kind: str) -> None:
    dtype = np.float32 if kind == "f" else np.float64
    x = np.array([0.0, -0.0, INF, -INF, NAN, 1.0, -1.0] if function != "log1p" else SPECIAL, dtype)
    want = reference(function, x).astype(dtype)
    for lanes in LANES[kind]:
        got = apply(f"Sleef_{function}{kind}{lanes}{UNARY[function]}", x)
        exact = np.isnan(want) | np.isinf(want) | (want == 0)
        assert same_bits_or_nan(got, want)[exact].all(), f"{x} -> {got}, expected {want}"


@pytest.mark.parametrize("kind", ["f", "d"])
@pytest.mark.parametrize("function", sorted(BINARY))
def test_special_pairs(function: str, kind: str) -> None:
    dtype = np.float32 if kind == "f" else np.float64
    x, y = (v.ravel() for v in np.meshgrid(np.array(SPECIAL, dtype), np.array(SPECIAL, dtype)))
    want = reference(function, x, y).astype(dtype)
    exact = np.isnan(want) | np.isinf(want) | (want == 0)
    for lanes in LANES[kind]:
        got = apply(f"Sleef_{function}{kind}{lanes}{BINARY[function]}", x, y)
        bad = exact & ~same_bits_or_nan(got, want)
        assert not bad.any(), [(a, b, g, w) for a, b, g, w in zip(x[bad], y[bad], got[bad], want[bad], strict=True)]


@pytest.mark.parametrize("kind", ["f", "d"])
def test_gamma_and_error_special_values(kind: str) -> None:
    dtype = np.float32 if kind == "f" else np.float64
    x = np.array([0.0, -0.0, INF, -INF, NAN, -1.0, 1.0, 2.0, 40.0, -40.0], dtype)
    for lanes in LANES[kind]:
        erf = apply(f"Sleef_erf{kind}{lanes}_u10", x)
        assert same_bits_or_nan(erf[:5], np.array([0.0, -0.0, 1.0, -1.0, NAN], dtype)).all()
        assert list(erf[8:]) == [1.0, -1.0]
        erfc = apply(f"Sleef_erfc{kind}{lanes}_u15", x)
        assert same_bits_or_nan(erfc[:5], np.array([1.0, 1.0, 0.0, 2.0, NAN], dtype)).all()
        assert list(erfc[8:]) == [0.0, 2.0]
        lgamma = apply(f"Sleef_lgamma{kind}{lanes}_u10", x)
        assert same_bits_or_nan(lgamma[:8], np.array([INF, INF, INF, INF, NAN, INF, 0.0, 0.0], dtype)).all()


@pytest.mark.parametrize("lanes", LANES["f"])
def test_every_float_exponent_is_reduced_for_trigonometry(lanes: int) -> None:
    exponents = np.repeat(np.arange(-149, 128), 200)
    x = np.ldexp(np.random.default_rng(7).uniform(1, 2, exponents.size), exponents).astype(np.float32)
    for function in ("sin", "cos", "tan"):
        assert ulp_error(apply(f"Sleef_{function}f{lanes}_u10", x), reference(function, x)).max() <= 1.0


@pytest.mark.parametrize("kind", ["f", "d"])
def test_trigonometry_next_to_multiples_of_half_pi(kind: str) -> None:
    dtype = np.float32 if kind == "f" else np.float64
    k = np.concatenate([np.arange(-2000, 2001), np.random.default_rng(13).integers(-(2**21), 2**21, 20_000)])
    x = (k * np.longdouble("1.57079632679489661923132")).astype(dtype)
    x = np.concatenate([np.nextafter(x, dtype(-INF)), x, np.nextafter(x, dtype(INF))])
    for lanes in LANES[kind]:
        for function in ("sin", "cos", "tan"):
            assert ulp_error(apply(f"Sleef_{function}{kind}{lanes}_u10", x), reference(function, x)).max() <= 1.0


def test_low_accuracy_names_and_pairs() -> None:
    x = float_samples(8, 20_000)
    for lanes in LANES["f"]:
        for function in ("sin", "cos"):
            error = ulp_error(apply(f"Sleef_{function}f{lanes}_u35", x), reference(function, x))
            assert error.max() <= BOUND["_u35"]
        both = apply(f"Sleef_sincosf{lanes}_u10", x, outputs=2).reshape(2, -1)
        assert ulp_error(both[0], reference("sin", x)).max() <= 1.0
        assert ulp_error(both[1], reference("cos", x)).max() <= 1.0
    d = double_samples(9, 2_000)
    for lanes in LANES["d"]:
        both = apply(f"Sleef_sincosd{lanes}_u10", d, outputs=2).reshape(2, -1)
        assert ulp_error(both[0], reference("sin", d)).max() <= 1.0
        assert ulp_error(both[1], reference("cos", d)).max() <= 1.0


def test_every_sleef_name_of_the_headers_is_exported() -> None:
    root = pathlib.Path(torch.__file__).parent / "include"
    files = [
        *root.glob("ATen/cpu/vec/*.h"),
        *root.glob("torch/csrc/inductor/**/*.h"),
        *root.glob("torch/headeronly/**/*.h"),
    ]
    for width in ("vec128", "vec256", "vec512"):
        files += [p for p in root.glob(f"ATen/cpu/vec/{width}/*.h") if "zarch" not in p.name]
    found = {
        n for p in files for n in re.findall(r"\bSleef_[a-z0-9]+?(?:f4|f8|f16|d2|d4|d8)(?:_u\d\d)?\b", p.read_text())
    }
    assert len(found) > 100
    missing = [name for name in sorted(found) if not hasattr(library(), name)]
    assert missing == []


@pytest.mark.parametrize("lanes", LANES["f"])
@pytest.mark.parametrize(("function", "bound"), [("vexp", 0.85), ("vlog", 0.95), ("vtanh", 2.1), ("vsigmoid", 2.4)])
def test_inline_header(function: str, bound: float, lanes: int) -> None:
    x = np.concatenate([float_samples(10, 200_000), np.array([0.0, -0.0, INF, -INF, NAN], np.float32)])
    got = apply(f"Sleef_{function}f{lanes}", x)
    if function == "vsigmoid":
        with np.errstate(over="ignore"):
            want = 1 / (1 + np.exp(-x.astype(np.float64)))
        want[x < -88] = 0  # where the float exponential may overflow already
        got[x < -88] = np.where(np.abs(got[x < -88]) < 1e-37, 0, got[x < -88])
    else:
        want = np.tanh(x.astype(np.float64)) if function == "vtanh" else reference(function[1:], x)
    error = ulp_error(got, want)
    worst = int(np.argmax(error))
    assert error[worst] <= bound, f"{function}({float(x[worst]).hex()}): {error[worst]:.3f} ulp"
    assert (np.signbit(got[-5:-3]) == np.signbit(want.astype(np.float32)[-5:-3])).all()


@pytest.mark.parametrize("lanes", LANES["f"])
@pytest.mark.parametrize("function", ["vgelu", "vgelu_tanh"])
def test_inline_gelu(function: str, lanes: int) -> None:
    """Errors relative to x, as the result vanishes on the left; PyTorch's in float32 has 4e-7 there."""
    x = np.concatenate([float_samples(10, 200_000), np.linspace(-9, 9, 200_001, dtype=np.float32)])
    x = x[np.abs(x) < 1e12]  # else float32 has no x³
    with np.errstate(under="ignore"):
        approximate = "tanh" if function == "vgelu_tanh" else "none"
        want = torch.nn.functional.gelu(torch.from_numpy(x.astype(np.float64)), approximate=approximate).numpy()
        got = apply(f"Sleef_{function}f{lanes}", x)
    error = np.abs(got - want) / np.maximum(np.abs(x), 1e-30)
    worst = int(np.argmax(error))
    assert error[worst] <= 3.2e-7, f"{function}({float(x[worst]).hex()}): {error[worst]:.2e}"
    assert np.abs(got[x < -15]).max() < 1e-25 and (got[x > 15] == x[x > 15]).all()
    ends = apply(f"Sleef_{function}f{lanes}", np.array([0.0, -0.0, INF, NAN], np.float32))
    assert same_bits_or_nan(ends, np.array([0.0, -0.0, INF, NAN], np.float32)).all()


def test_an_unknown_name_is_refused() -> None:
    x = np.zeros(1, np.float32)
    pointer = ctypes.c_void_p(x.ctypes.data)
    assert library().untorch_vecmath_apply(b"Sleef_nonef4_u10", pointer, None, pointer, ctypes.c_int64(1)) == 1


def test_nothing_is_written_past_the_end() -> None:
    x = np.full(19, 0.5, np.float32)
    for count in (0, 1, 3, 17):
        out = np.full(19, 7.0, np.float32)
        library().untorch_vecmath_apply(
            b"Sleef_expf4_u10", ctypes.c_void_p(x.ctypes.data), None, ctypes.c_void_p(out.ctypes.data),
            ctypes.c_int64(count),
        )  # fmt: skip
        assert (out[count:] == 7.0).all() and np.allclose(out[:count], math.exp(0.5))
