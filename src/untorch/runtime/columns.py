"""Calls with columns: arrays by the names of a method's inputs in, arrays by the names of its outputs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from untorch.runtime.errors import InvalidArgumentError, UnsupportedError
from untorch.runtime.joining import joining_of
from untorch.runtime.spec import SymbolicDim, TensorSpec

if TYPE_CHECKING:
    from untorch.runtime.method import Method

__all__ = ["BatchDim", "as_array", "batch_dim", "input_names", "output_names", "run_columns"]


class BatchDim:
    """The symbol that is the first dimension of a method's inputs and outputs: how many rows a call takes."""

    __slots__ = ("max", "min", "name")

    def __init__(self, dim: SymbolicDim) -> None:
        self.name, self.min, self.max = dim.name, dim.min, dim.max

    def __repr__(self) -> str:
        return f"BatchDim({self.name}={self.min}..{'' if self.max is None else self.max})"


def input_names(method: Method) -> list[str]:
    """The names of the tensor inputs in the file's order; "0", "1", … for a stock package."""
    return [spec.name for spec in method.inputs] or [str(i) for i in range(method.num_inputs)]


def output_names(method: Method, count: int) -> list[str | None]:
    """The names of the ``count`` flat outputs; None for one that is None. "0", "1", … for a stock package."""
    items = (method._spec or {}).get("outputs")
    if items is None or len(items) != count:
        return [str(i) for i in range(count)]
    return [None if item is None else str(item["name"]) for item in items]


def batch_dim(method: Method) -> BatchDim | None:
    """None unless all inputs and outputs are arrays that begin with the same dynamic dimension, and no size depends on
    it elsewhere. That rows do not depend on each other is the model's matter: the manifest does not tell.
    """
    if len((method._spec or {}).get("outputs", [])) != len(method.outputs) or None in method.outputs:
        return None  # an output is a Python value
    if not all(spec.contiguous for spec in method.inputs):
        return None
    dim = joining_of(method.inputs, method.outputs).dim
    return None if dim is None else BatchDim(dim)


def run_columns(method: Method, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Run the method on columns of any batch size; the columns of its results.

    What is not an array becomes one. Arrays are made row-major and converted to the method's dtypes by numpy's rule
    "same_kind". More rows than a call takes are computed in several calls, if the inputs and outputs begin with the
    same dynamic dimension.
    """
    names, specs = input_names(method), method.inputs
    missing = [name for name in names if name not in columns]
    unknown = [str(name) for name in columns if name not in names]
    if missing or unknown:
        raise InvalidArgumentError(
            f"method '{method.name}': expected the columns {', '.join(names)}, "
            f"got {', '.join(map(str, columns)) or 'none'}"
        )
    arrays = [as_array(columns[name], method.name, name, specs[i] if specs else None) for i, name in enumerate(names)]
    parts = [method.run(part) for part in _parts(method, names, arrays)]
    if not parts:
        return _no_rows(method, arrays)
    flat = parts[0]
    if len(parts) > 1:
        import numpy

        flat = [numpy.concatenate([part[i] for part in parts]) for i in range(len(flat))]
    return {name: value for name, value in zip(output_names(method, len(flat)), flat, strict=True) if name is not None}


def as_array(value: Any, method: str, name: str, spec: TensorSpec | None) -> Any:
    """The input as an array that the method takes. Arrays that are not numpy's and have DLPack stay as they are."""
    import numpy

    if not isinstance(value, numpy.ndarray):
        if hasattr(value, "to_numpy"):  # pandas, polars, pyarrow
            value = value.to_numpy()
        elif hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
            return value
    try:
        array = numpy.asarray(value)
        if array.dtype == object:  # a column of arrays or lists
            array = numpy.stack([numpy.asarray(row) for row in array]) if array.size else numpy.zeros(0)
    except (ValueError, TypeError):
        raise InvalidArgumentError(
            f"method '{method}', input '{name}': expected rows of numbers of one shape, got rows that differ: pad them "
            "first"
        ) from None
    if spec is None:
        return numpy.require(array, requirements=["C", "A"])
    if array.ndim and not len(array) and array.ndim != len(spec.shape):  # no row says how long rows are
        array = array.reshape(0, *(size if isinstance(size, int) else 0 for size in spec.shape[1:]))
    dtype = _numpy_dtype(spec.dtype)
    if array.dtype != dtype and (array.size == 0 or _same_kind(array.dtype, dtype)):
        array = array.astype(dtype)
    array = numpy.require(array, requirements=["C", "A"] if spec.contiguous else ["A"])
    return array.copy() if spec.mutated and not array.flags.writeable else array


def _numpy_dtype(name: str) -> Any:
    import numpy

    try:
        return numpy.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError as error:
        raise UnsupportedError(f"columns of dtype {name} need the package ml_dtypes: install it") from error
    return numpy.dtype(getattr(ml_dtypes, name))


def _same_kind(source: Any, target: Any) -> bool:
    """numpy's rule; what ml_dtypes adds are floating-point numbers to it."""
    import numpy

    if target.kind == "V":
        return source.kind in "biufV"
    return bool(numpy.can_cast(source, target, "same_kind"))


def _parts(method: Method, names: list[str], arrays: list[Any]) -> Iterator[list[Any]]:
    """The inputs of each call: one, unless there are more rows than a call takes, or none."""
    rows = {len(array) for array in arrays if getattr(array, "ndim", 0)}
    batch = batch_dim(method) if len(rows) == 1 and _all_numpy(arrays) else None
    count = rows.pop() if batch is not None else 0
    if batch is None or (batch.min <= count and (batch.max is None or count <= batch.max)):
        yield arrays
        return
    if count == 0:
        return
    if batch.max is None or count < batch.min:
        yield arrays  # the method says what is wrong
        return
    # Of nearly equal size, so that none of them is below the minimum.
    calls = -(-count // batch.max)
    for i in range(calls):
        yield [array[i * count // calls : (i + 1) * count // calls] for array in arrays]


def _all_numpy(arrays: list[Any]) -> bool:
    import numpy

    return all(isinstance(array, numpy.ndarray) for array in arrays)


def _no_rows(method: Method, arrays: list[Any]) -> dict[str, Any]:
    """Outputs without rows, for inputs without rows."""
    import numpy

    sizes: dict[str, int] = {}
    for spec, array in zip(method.inputs, arrays, strict=True):
        for dim, size in zip(spec.shape, array.shape, strict=False):
            if isinstance(dim, SymbolicDim) and not dim.is_expression:
                sizes[dim.name] = size
    result = {}
    for output in method.outputs:
        assert output is not None  # there is a batch dimension
        shape = [0]
        for dim in output.shape[1:]:
            if isinstance(dim, SymbolicDim) and dim.name not in sizes:
                raise InvalidArgumentError(
                    f"method '{method.name}': expected at least one row, as the size {dim} of the output "
                    f"'{output.name}' follows from the values, got none"
                )
            shape.append(dim if isinstance(dim, int) else sizes[dim.name])
        result[output.name] = numpy.empty(shape, _numpy_dtype(output.dtype))
    return result
