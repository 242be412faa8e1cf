"""Inputs of a method from the command line: files, or arrays generated for a dtype and a shape. No typer in here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, UnsupportedError, file_error
from untorch.runtime.spec import SymbolicDim, TensorSpec

__all__ = ["Recipe", "evaluate", "make_array", "make_inputs", "parse_dims", "parse_inputs", "symbols_of"]

Array = NDArray[Any]

_FILLS = ("random", "zeros", "ones")
_RECIPE = re.compile(r"(random|zeros|ones)(?::(\w+)\[([\d,\s]*)\])?(?::(-?\d+)\.\.(-?\d+))?")
# The default of a dynamic dimension: small, and no special case such as 0 or 1.
_DEFAULT_SIZE = 8


@dataclass(frozen=True)
class Recipe:
    """An array to be generated: its values, dtype and shape (None: the method's), and bounds of integers."""

    fill: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    low: int = 0
    high: int = 1


def parse_inputs(texts: Sequence[str]) -> tuple[list[Array | Recipe], dict[str, Array | Recipe]]:
    """The inputs without a name, in order, and those with one.

    A text is ``name=VALUE`` or ``VALUE``; VALUE is a ``.npy`` file, a ``.npz`` file (without a name: all its arrays,
    by their names), or ``random``, ``zeros``, ``ones``, with ``:float32[2,3]`` and for integers ``:LOW..HIGH`` behind.
    """
    unnamed: list[Array | Recipe] = []
    named: dict[str, Array | Recipe] = {}

    def add(name: str, value: Array | Recipe) -> None:
        if name in named:
            raise InvalidArgumentError(f"--input: '{name}' is given twice")
        named[name] = value

    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            value = text
        if equals and not name:
            raise InvalidArgumentError(f"--input {text}: the name before '=' is empty")
        recipe = _parse_recipe(value)
        loaded = recipe if recipe is not None else _read(value)
        if isinstance(loaded, Mapping):
            if equals:
                if len(loaded) != 1:
                    raise InvalidArgumentError(
                        f"--input {text}: {value} holds {len(loaded)} arrays ({', '.join(loaded)}), expected one; "
                        f"give the file without a name to use them all"
                    )
                add(name, next(iter(loaded.values())))
            for key, array in loaded.items() if not equals else ():
                add(key, array)
        elif equals:
            add(name, loaded)
        else:
            unnamed.append(loaded)
    return unnamed, named


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """``["s0=16"]`` → ``{"s0": 16}``."""
    dims: dict[str, int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value.isdecimal():
            raise InvalidArgumentError(f"--dim {text}: expected NAME=SIZE such as batch=16")
        dims[name] = int(value)
    return dims


def symbols_of(specs: Sequence[TensorSpec]) -> dict[str, tuple[int, int | None]]:
    """The symbols in the shapes of ``specs`` with their least and largest value (None: no limit)."""
    dims = [size for spec in specs for size in spec.shape if isinstance(size, SymbolicDim)]
    found = {size.name: (size.min, size.max) for size in dims if not size.is_expression}
    for size in dims:
        for word in size.rpn or ():
            if isinstance(word, str) and word.isidentifier() and word not in _OPERATORS:
                found.setdefault(word, (0, None))
    return found


def make_inputs(
    specs: Sequence[TensorSpec],
    count: int,
    texts: Sequence[str] = (),
    dim_texts: Sequence[str] = (),
    seed: int = 0,
    fill_missing: bool = False,
) -> list[Array]:
    """The flat inputs of a method of ``count`` inputs.

    ``specs`` are its ``inputs``; a stock package has none, and then the names are "0", "1", …. ``fill_missing`` makes
    random arrays for the inputs that are not given. Raises InvalidArgumentError.
    """
    names = [spec.name for spec in specs] or [str(i) for i in range(count)]
    unnamed, given = parse_inputs(texts)
    free = [name for name in names if name not in given]
    if len(unnamed) > len(free):
        raise InvalidArgumentError(f"--input: {len(unnamed)} inputs without a name for {len(free)} inputs to fill")
    for name, value in zip(free, unnamed, strict=False):
        given[name] = value
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise InvalidArgumentError(
                f"--input: the method has no input '{name}', it takes {', '.join(names) or 'none'}{hint}"
            )
    missing = [name for name in names if name not in given]
    if missing and fill_missing and specs:
        given.update((name, Recipe("random")) for name in missing)
    elif missing:
        first = missing[0]
        raise InvalidArgumentError(
            f"--input: {', '.join(missing)} not given; pass --input {first}=FILE.npy"
            + (f" or --input {first}=random" if specs else f" or --input '{first}=random:float32[2,3]'")
        )
    dims = _choose_dims(specs, parse_dims(dim_texts))
    generator = numpy.random.default_rng(seed)
    by_name = {spec.name: spec for spec in specs}
    return [_resolve(name, given[name], by_name.get(name), dims, generator) for name in names]


def make_array(recipe: Recipe, dtype: str, shape: Sequence[int], generator: numpy.random.Generator) -> Array:
    """The array of a recipe: normal numbers, or integers from ``low`` to ``high`` inclusive."""
    kind = numpy_dtype(dtype)
    if recipe.fill != "random":
        return numpy.full(shape, 0 if recipe.fill == "zeros" else 1, kind)
    if kind.kind == "b":
        return generator.integers(0, 2, shape).astype(kind)
    if kind.kind in "iu":
        return generator.integers(recipe.low, recipe.high, shape, endpoint=True).astype(kind)
    if kind.kind == "c":
        return (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)).astype(kind)
    return numpy.asarray(generator.standard_normal(shape)).astype(kind)


def numpy_dtype(name: str) -> numpy.dtype[Any]:
    """torch's name of a dtype as numpy's dtype. Raises UnsupportedError where ml_dtypes is missing for it."""
    try:
        return numpy.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        kind: numpy.dtype[Any] = numpy.dtype(getattr(ml_dtypes, name))
        return kind
    except ImportError:
        raise UnsupportedError(f"dtype {name}: numpy does not have it; pip install ml_dtypes") from None
    except AttributeError:
        raise InvalidArgumentError(f"dtype {name!r} is not known") from None


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "ceildiv": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}


def evaluate(dimension: int | SymbolicDim, dims: Mapping[str, int]) -> int:
    """The size that an entry of a shape has for the given sizes of the symbols."""
    if isinstance(dimension, int):
        return dimension
    if not dimension.is_expression and dimension.name in dims:
        return dims[dimension.name]
    words = dimension.rpn
    if not words:
        raise UnsupportedError(f"the size {dimension} cannot be computed: give the input with --input")
    stack: list[int] = []
    try:
        for word in words:
            if word in _OPERATORS:
                right = stack.pop()
                stack.append(_OPERATORS[word](stack.pop(), right))
            else:
                stack.append(word if isinstance(word, int) else dims[word])
        (size,) = stack
    except (IndexError, KeyError, ValueError, ZeroDivisionError, TypeError) as error:
        raise InvalidFileError(f"the size expression {words!r} is damaged: {error!r}") from None
    return size


def _choose_dims(specs: Sequence[TensorSpec], chosen: Mapping[str, int]) -> dict[str, int]:
    symbols = symbols_of(specs)
    for name, size in chosen.items():
        if name not in symbols:
            known = ", ".join(symbols) or "none"
            raise InvalidArgumentError(f"--dim {name}={size}: the method has no such dimension, there are: {known}")
        low, high = symbols[name]
        if size < low or (high is not None and size > high):
            raise InvalidArgumentError(f"--dim {name}={size}: expected {low} to {'any size' if high is None else high}")
    dims = {}
    for name, (low, high) in symbols.items():
        size = max(low, _DEFAULT_SIZE)
        dims[name] = chosen.get(name, size if high is None else min(size, high))
    return dims


def _parse_recipe(text: str) -> Recipe | None:
    if text.partition(":")[0] not in _FILLS:
        return None
    match = _RECIPE.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            f"--input {text}: expected random, zeros or ones, with a dtype and a shape such as random:float32[2,3], "
            "and for integers with bounds such as random:int64[2,3]:0..99"
        )
    fill, dtype, sizes, low, high = match.groups()
    shape = tuple(int(size) for size in sizes.split(",") if size.strip()) if sizes is not None else None
    if low is None:
        return Recipe(fill, dtype, shape)
    if int(low) > int(high):
        raise InvalidArgumentError(f"--input {text}: the bounds {low}..{high} are the wrong way round")
    return Recipe(fill, dtype, shape, int(low), int(high))


def _read(text: str) -> Array | dict[str, Array]:
    path = Path(text)
    if path.suffix not in (".npy", ".npz"):
        raise InvalidArgumentError(
            f"--input {text}: expected a .npy or .npz file, or random, zeros or ones (random:float32[2,3])"
        )
    try:
        loaded = numpy.load(path, allow_pickle=False)
        if isinstance(loaded, numpy.ndarray):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError as error:
        raise file_error(f"--input {text}: there is no such file", error.errno, text) from None
    except Exception as error:  # numpy and zipfile raise many kinds for damaged files
        raise InvalidFileError(f"--input {text}: cannot be read: {error}") from error


def _resolve(
    name: str, value: Array | Recipe, spec: TensorSpec | None, dims: Mapping[str, int],
    generator: numpy.random.Generator,
) -> Array:  # fmt: skip
    if isinstance(value, numpy.ndarray):
        return _adapt(name, value, spec)
    dtype = value.dtype or (spec.dtype if spec is not None else None)
    shape = value.shape
    if shape is None and spec is not None:
        shape = tuple(evaluate(dimension, dims) for dimension in spec.shape)
    if dtype is None or shape is None:
        raise InvalidArgumentError(
            f"--input {name}={value.fill}: a stock package does not tell dtype and shape; give them: "
            f"'{name}={value.fill}:float32[2,3]'"
        )
    return _with_strides(make_array(value, dtype, shape, generator), spec)


def _adapt(name: str, array: Array, spec: TensorSpec | None) -> Array:
    """A .npy file has no bfloat16 and no float8: they come as float32, or as the raw bits in an unsigned dtype."""
    if spec is None or array.dtype.name == spec.dtype:
        return _with_strides(array, spec)
    wanted = spec.dtype
    if not wanted.startswith(("bfloat16", "float8")):
        return array
    kind = numpy_dtype(wanted)
    if array.dtype.kind in "uV" and array.dtype.itemsize == kind.itemsize:
        return _with_strides(numpy.ascontiguousarray(array).view(kind), spec)
    if array.dtype == numpy.float32:
        return _with_strides(array.astype(kind), spec)
    raise InvalidArgumentError(
        f"--input {name}: expected {wanted} as float32, or as its bits in uint{8 * kind.itemsize}, got {array.dtype}"
    )


def _with_strides(array: Array, spec: TensorSpec | None) -> Array:
    """A copy in the memory layout that the method was compiled for, where that is not row-major."""
    strides = spec.strides if spec is not None else None
    if spec is None or spec.contiguous:
        return numpy.ascontiguousarray(array).reshape(array.shape)
    known = [stride for stride in strides or () if isinstance(stride, int) and stride >= 0]
    if not known or len(known) != len(strides or ()) or len(known) != array.ndim or array.size == 0:
        return array
    extent = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, known, strict=True))
    memory = numpy.zeros(extent, array.dtype)
    view = numpy.lib.stride_tricks.as_strided(memory, array.shape, [stride * array.itemsize for stride in known])
    view[...] = array
    return view
