"""Operators without a C shim: reads the extern-node list of a package and calls the Python kernels it names.

The generated code passes one flat list of integers and one of tensors per call. Both follow the order of the node's
serialised inputs: an `as_int`, `as_sym_int`, `as_ints` or `as_sym_ints` takes its values from the integers (the
compiler passes constants there as well), an `as_tensor`, `as_tensors`, or a present optional tensor takes tensors, and
every other kind is a constant of the file. After the inputs come the results, in the order of the node's outputs.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, TypeVar

from untorch.runtime import registry
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError, ModelError, UnsupportedError
from untorch.runtime.generated_code import DeclaredResult, declared_result

if TYPE_CHECKING:
    import numpy

    from untorch import _core

    Array = numpy.ndarray[Any, numpy.dtype[Any]]

_ArrayT = TypeVar("_ArrayT")

__all__ = ["ExternNode", "NodeArgument", "NodeOutput", "parse_extern_nodes"]

# torch's ScalarType numbers in the export schema, as numpy names; those of ml_dtypes are looked up there.
_SCALAR_TYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
_ML_DTYPES = frozenset(name for name in _SCALAR_TYPES.values() if name.startswith(("bfloat", "float8")))
_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
_LAYOUTS = {
    1: "sparse_coo", 2: "sparse_csr", 3: "sparse_csc", 4: "sparse_bsr", 5: "sparse_bsc", 6: "_mkldnn", 7: "strided",
}  # fmt: skip

_DLPACK_CUDA = (2, 13)  # device and managed memory

_SIZE = re.compile(r"s\d+")

_INTS = frozenset(("as_int", "as_sym_int"))
_INT_LISTS = frozenset(("as_ints", "as_sym_ints"))
_CONSTANTS: dict[str, type] = {
    "as_bool": bool,
    "as_string": str,
    "as_floats": list,
    "as_bools": list,
    "as_strings": list,
}


@dataclass(frozen=True)
class NodeArgument:
    """One argument of an operator: its name in the schema and where its value comes from.

    ``tensors`` lists the buffer names of the tensors it takes from the flat list, None where an optional tensor of a
    list is absent; ``num_ints`` is how many integers it takes; ``constant`` is the value when it takes neither.
    """

    name: str
    keyword: bool
    kind: str
    tensors: tuple[str | None, ...] = ()
    num_ints: int = 0
    constant: Any = None

    @property
    def num_tensors(self) -> int:
        """How many tensors of the flat list it takes."""
        return sum(name is not None for name in self.tensors)


@dataclass(frozen=True)
class NodeOutput:
    """One result of an operator: a tensor, a list of tensors, nothing, or an integer known when it was compiled."""

    kind: str
    tensors: tuple[str, ...] = ()

    @property
    def num_ints(self) -> int:
        """How many integers of the flat list it takes."""
        return int(self.kind == "as_int")


@dataclass(frozen=True)
class ExternNode:
    """A call of one operator through the proxy executor.

    ``target`` is ``"namespace::operator"`` or ``"namespace::operator.overload"``. Of the flat tensor list, the first
    ``num_input_tensors`` are inputs (their buffers are ``input_names``) and the remaining ``num_output_tensors`` are
    to be filled with the results (``output_names``); a name in both is an input that the operator writes into and
    returns. Of the flat integers the first ``num_input_ints`` are inputs; ``num_output_ints`` expected results follow.
    """

    index: int
    name: str
    target: str
    arguments: tuple[NodeArgument, ...]
    outputs: tuple[NodeOutput, ...]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Buffer names of the input tensors, in the order of the flat list."""
        return tuple(name for argument in self.arguments for name in argument.tensors if name is not None)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Buffer names of the results that are tensors, in order."""
        return tuple(name for output in self.outputs for name in output.tensors)

    @property
    def num_input_tensors(self) -> int:
        """Input tensors in the flat list."""
        return len(self.input_names)

    @property
    def num_output_tensors(self) -> int:
        """Tensors to be filled, after the inputs in the flat list."""
        return len(self.output_names)

    @property
    def num_input_ints(self) -> int:
        """Integers in the flat list that are arguments."""
        return sum(argument.num_ints for argument in self.arguments)

    @property
    def num_output_ints(self) -> int:
        """Integers that follow them: results known when the model was compiled."""
        return sum(output.num_ints for output in self.outputs)

    @property
    def dtypes(self) -> list[str] | None:
        """The dtypes of the results that are tensors, as untorch's exporter writes them; else None."""
        names = self.metadata.get("untorch_dtypes")
        dtypes = [] if names is None else [name for name in names.split(",") if name]
        return dtypes if names is not None and len(dtypes) == self.num_output_tensors else None

    def call(
        self, ints: Sequence[int], inputs: Sequence[Array], source: Callable[[], str | None] | None = None
    ) -> list[Array]:
        """Run the operator's kernel; gives one array for each name in ``output_names``.

        ``source`` gives the generated code of a file without ``dtypes``, which also lacks the exporter's checks.
        ``ints`` holds all flat integers of the call, ``inputs`` the input tensors. An input that the operator mutates
        must be writeable: the kernel writes into it.

        Raises UnsupportedError when no kernel is registered for the operator, InvalidArgumentError when the counts do
        not match the node, ModelError when the kernel returns something else than the node promises. What the kernel
        raises goes through.
        """
        self._check_count("integers", len(ints), self.num_input_ints + self.num_output_ints)
        self._check_count("tensors", len(inputs), self.num_input_tensors)
        registration = registry.find_registration(self.target)
        kernel = registry.find_kernel(self.target)
        declared = self._declared(registration, source)
        positional, keywords, int_position = self._bind(ints, inputs)
        arrays = self._check_results(kernel(*positional, **keywords), ints[int_position:], self._check_array)
        cast = registration is not None and registration.cast
        if self.dtypes is not None:
            return [self._check_dtype(i, *pair, cast) for i, pair in enumerate(zip(arrays, self.dtypes, strict=True))]
        if declared is not None:
            return [self._check_declared(i, *pair, cast) for i, pair in enumerate(zip(arrays, declared, strict=True))]
        return arrays

    def call_on_gpu(
        self,
        ints: Sequence[int],
        inputs: Sequence[_core.Tensor],
        slots: Sequence[_core.Tensor],
        gpu: int,
        source: Callable[[], str | None] | None = None,
    ) -> None:
        """The same with the operator's kernel for CUDA: its results are copied into ``slots``, on the call's stream."""
        self._check_count("integers", len(ints), self.num_input_ints + self.num_output_ints)
        self._check_count("tensors", len(inputs), self.num_input_tensors)
        self._check_count("results", len(slots), self.num_output_tensors)
        registration = registry.find_registration(self.target, "cuda")
        kernel = registry.find_kernel(self.target, "cuda")
        declared = self._declared(registration, source)
        if declared is not None and any(result.dtype is None for result in declared):
            raise self._untold_error("dtypes")  # generated code for GPUs takes addresses without types
        cast = registration is not None and registration.cast
        # An absent tensor comes as one without memory.
        positional, keywords, int_position = self._bind(ints, [t if t.defined else None for t in inputs])

        def check_array(where: str, value: Any) -> Any:
            device = getattr(value, "__dlpack_device__", None)
            if hasattr(value, "__cuda_array_interface__") or (device is not None and int(device()[0]) in _DLPACK_CUDA):
                return value
            raise self._result_error(f"an array on cuda:{gpu} (DLPack or __cuda_array_interface__) as {where}", value)

        results = self._check_results(kernel(*positional, **keywords), ints[int_position:], check_array)
        for index, (slot, value) in enumerate(zip(slots, results, strict=True)):
            try:
                slot.assign(value, gpu)
            except InvalidArgumentError as error:
                text = str(error).partition("argument 0: ")[2] or str(error)
                raise ModelError(f"kernel of `{self.target}` (node `{self.name}`), result {index}: {text}") from error
            if self.dtypes is not None:
                self._convert(index, slot, self.dtypes[index], cast)
            elif declared is not None:
                if (dtype := declared[index].dtype) is not None:
                    self._convert(index, slot, dtype, cast)
                self._check_sizes(index, slot.dtype, slot.shape, declared[index])
                wanted = declared[index].strides
                if all(isinstance(stride, int) for stride in wanted) and wanted != slot.strides:
                    slot.convert(slot.dtype, [stride for stride in wanted if isinstance(stride, int)])

    def _convert(self, index: int, slot: _core.Tensor, dtype: str, cast: bool) -> None:
        if slot.dtype == dtype:
            return
        if not cast or not _can_cast(slot.dtype, dtype):
            raise self._dtype_error(index, dtype, slot.dtype, slot.shape, cast)
        slot.convert(dtype)

    def _declared(
        self, registration: registry.Registration | None, source: Callable[[], str | None] | None
    ) -> list[DeclaredResult] | None:
        """What a stock package tells of the results; None where the exporter's checks do it, or nothing is to."""
        if registration is None or self.dtypes is not None or source is None or registration.unchecked:
            return None
        text = source() or ""
        found = [declared_result(text, name) for name in self.output_names]
        known = [result for result in found if result is not None]
        if len(known) != len(found):
            raise self._untold_error("shapes")
        return known

    def _untold_error(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"kernel of `{self.target}` (node `{self.name}`): the package does not tell the {what} of its results, "
            f"and the model would read other memory if one were wrong: export the model with untorch, or with a "
            f"newer PyTorch, or register the kernel with unchecked=True if it keeps to its fake implementation"
        )

    def _check_dtype(self, index: int, array: Array, dtype: str, cast: bool) -> Array:
        if array.dtype.name == dtype:
            return array
        if cast and _can_cast(array.dtype.name, dtype):
            return array.astype(_dtype(next(code for code, name in _SCALAR_TYPES.items() if name == dtype)))
        raise self._dtype_error(index, dtype, array.dtype.name, array.shape, cast)

    def _dtype_error(self, index: int, dtype: str, got: str, shape: Sequence[int], cast: bool) -> ModelError:
        advice = (
            "convert it in the kernel" if cast else "convert it in the kernel, or register the kernel with cast=True"
        )
        return ModelError(
            f"kernel of `{self.target}` (node `{self.name}`), result {index}: expected the dtype {dtype}, which the "
            f"operator's fake implementation declares, got {got}{list(shape)}: {advice}"
        )

    def _check_declared(self, index: int, array: Array, declared: DeclaredResult, cast: bool) -> Array:
        """By the generated code, which itself compares sizes and strides that are not known here, if there are any."""
        if declared.dtype is not None:
            array = self._check_dtype(index, array, declared.dtype, cast)
        self._check_sizes(index, array.dtype.name, array.shape, declared)
        strides = [stride for stride in declared.strides if isinstance(stride, int)]
        return _laid_out(array, strides) if len(strides) == array.ndim else array

    def _check_sizes(self, index: int, dtype: str, shape: Sequence[int], declared: DeclaredResult) -> None:
        fits = len(declared.sizes) == len(shape)
        for size, wanted in zip(shape, declared.sizes):  # noqa: B905 - fits says it
            # A size of one symbol is at least 2 in a stock package; other expressions and unbacked symbols may be 0.
            fits = fits and (size == wanted if isinstance(wanted, int) else size > 0 or not _SIZE.fullmatch(wanted))
        if not fits:
            raise ModelError(
                f"kernel of `{self.target}` (node `{self.name}`), result {index}: expected the shape "
                f"[{', '.join(map(str, declared.sizes))}], which the operator's fake implementation declares, got "
                f"{dtype}{list(shape)}: return that shape"
            )

    def _bind(self, ints: Sequence[int], inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any], int]:
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        tensors, int_position = iter(inputs), 0
        for argument in self.arguments:
            value: Any
            if argument.kind in _INTS:
                value = int(ints[int_position])
            elif argument.kind in _INT_LISTS:
                value = [int(number) for number in ints[int_position : int_position + argument.num_ints]]
            elif argument.kind == "as_tensor":
                value = next(tensors)
            elif argument.kind in ("as_tensors", "as_optional_tensors"):
                value = [None if name is None else next(tensors) for name in argument.tensors]
            elif argument.kind == "as_scalar_type":
                value = _dtype(argument.constant)
            elif isinstance(argument.constant, tuple):
                value = list(argument.constant)  # a list of its own for each call
            else:
                value = argument.constant
            int_position += argument.num_ints
            if argument.keyword or keywords:  # nothing positional may follow a keyword
                # A schema may use a name that Python keeps for itself, as in `uniform(self, from, to)`.
                keywords[argument.name + "_" * iskeyword(argument.name)] = value
            else:
                positional.append(value)
        return positional, keywords, int_position

    def _check_results(
        self, result: Any, expected_ints: Sequence[int], check_array: Callable[[str, Any], _ArrayT]
    ) -> list[_ArrayT]:
        if not self.outputs:
            if result is not None and not (isinstance(result, (tuple, list)) and len(result) == 0):
                raise self._result_error("nothing (None)", result)
            return []
        if len(self.outputs) == 1:
            # A list of tensors is one result; a single tensor may also come as a tuple of one.
            alone = self.outputs[0].kind != "as_tensors" and isinstance(result, (tuple, list)) and len(result) == 1
            results: Sequence[Any] = result if alone else (result,)
        elif isinstance(result, (tuple, list)):
            results = result
        else:
            raise self._result_error(f"a tuple of {len(self.outputs)} results", result)
        if len(results) != len(self.outputs):
            raise self._result_error(f"{len(self.outputs)} results", results)

        arrays: list[_ArrayT] = []
        numbers = iter(expected_ints)
        for position, (output, value) in enumerate(zip(self.outputs, results, strict=True)):
            where = f"result {position}"
            if output.kind == "as_none":
                continue  # the compiled model has no use for it, whatever the kernel made
            if output.kind == "as_int":
                number = next(numbers)
                if value != number:
                    raise ModelError(
                        f"kernel of `{self.target}` (node `{self.name}`), {where}: expected the integer {number} that "
                        f"the model was compiled with, got {value!r}"
                    )
            elif output.kind == "as_tensor":
                arrays.append(check_array(where, value))
            else:
                if not isinstance(value, (tuple, list)) or len(value) != len(output.tensors):
                    raise self._result_error(f"a list of {len(output.tensors)} arrays as {where}", value)
                arrays += [check_array(f"{where}[{item}]", array) for item, array in enumerate(value)]
        return arrays

    def _check_array(self, where: str, value: Any) -> Array:
        import numpy

        if isinstance(value, numpy.generic):
            value = numpy.asarray(value)  # numpy turns 0-D results of arithmetic into scalars
        if not isinstance(value, numpy.ndarray):
            raise self._result_error(f"numpy.ndarray as {where}", value)
        if value.dtype.name not in _SCALAR_TYPES.values() or not value.dtype.isnative:
            raise ModelError(
                f"kernel of `{self.target}` (node `{self.name}`), {where}: expected a dtype that a tensor can have, "
                f"got `{value.dtype.str if not value.dtype.isnative else value.dtype.name}`; cast it in the kernel"
            )
        return value

    def _result_error(self, expected: str, got: Any) -> ModelError:
        kind = f"{type(got).__name__} of {len(got)}" if isinstance(got, (tuple, list)) else type(got).__name__
        return ModelError(f"kernel of `{self.target}` (node `{self.name}`): expected {expected}, got `{kind}`")

    def _check_count(self, what: str, got: int, expected: int) -> None:
        if got != expected:
            raise InvalidArgumentError(
                f"operator `{self.target}` (node `{self.name}`): expected {expected} {what}, got {got}; "
                f"the model library and its list of extern nodes do not belong together"
            )


def _can_cast(given: str, wanted: str) -> bool:
    """numpy's rule "same_kind", by names; what ml_dtypes adds converts to everything."""
    import numpy

    if given in _ML_DTYPES or wanted in _ML_DTYPES:
        return True
    return numpy.can_cast(numpy.dtype(given), numpy.dtype(wanted), "same_kind")


def _laid_out(array: Array, strides: list[int]) -> Array:
    """The array with these strides, in elements."""
    import numpy

    wanted = [stride * array.itemsize for stride in strides]
    dims = zip(array.shape, array.strides, wanted, strict=True)
    if array.size == 0 or all(size == 1 or have == want for size, have, want in dims):
        return array
    reach = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    result = numpy.lib.stride_tricks.as_strided(numpy.empty(reach, array.dtype), array.shape, wanted)
    result[...] = array
    return result


def parse_extern_nodes(json_text: str | bytes) -> list[ExternNode]:
    """Read the extern-node list of a package (``data/aotinductor/<method>/*.json``), in the order of their indices.

    Raises InvalidFileError when the text is not such a list, and UnsupportedError for an argument or a result of a
    kind that cannot be passed without PyTorch.
    """
    try:
        document = json.loads(json_text)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"extern nodes: not valid JSON: {error}") from error
    nodes = document.get("nodes") if isinstance(document, dict) else None
    if not isinstance(nodes, list):
        raise InvalidFileError("extern nodes: expected an object with the list `nodes`")
    return [_parse_node(index, entry) for index, entry in enumerate(nodes)]


def _parse_node(index: int, entry: Any) -> ExternNode:
    where = f"extern node {index}"
    node = _get(entry, "node", dict, where)
    name = str(entry.get("name", index))
    target = _get(node, "target", str, where)
    where = f"extern node `{name}` (`{target}`)"
    metadata = _get(node, "metadata", dict, where) if node.get("metadata") else {}
    return ExternNode(
        index=index,
        name=name,
        target=target,
        arguments=tuple(_parse_argument(item, where) for item in _get(node, "inputs", list, where)),
        outputs=tuple(
            _parse_output(item, f"{where}, result {position}")
            for position, item in enumerate(_get(node, "outputs", list, where))
        ),
        metadata={str(key): str(value) for key, value in metadata.items()},
    )


def _parse_argument(item: Any, where: str) -> NodeArgument:
    name = _get(item, "name", str, f"{where}, argument")
    where = f"{where}, argument `{name}`"
    kind, value = _variant(_get(item, "arg", dict, where), where)
    keyword = item.get("kind") == 2  # absent in older files, where the order of the schema is enough
    if kind == "as_optional_tensor":
        kind, value = _variant(value, where)

    if kind in _INTS:
        return NodeArgument(name, keyword, kind, num_ints=1)
    if kind in _INT_LISTS:
        return NodeArgument(name, keyword, kind, num_ints=len(_list(value, where)))
    if kind == "as_tensor":
        return NodeArgument(name, keyword, kind, tensors=(_get(value, "name", str, where),))
    if kind == "as_tensors":
        names = tuple(_get(element, "name", str, where) for element in _list(value, where))
        return NodeArgument(name, keyword, kind, tensors=names)
    if kind == "as_optional_tensors":
        optional = tuple(_optional_tensor(element, where) for element in _list(value, where))
        return NodeArgument(name, keyword, kind, tensors=optional)
    return NodeArgument(name, keyword, kind, constant=_constant(kind, value, where))


def _constant(kind: str, value: Any, where: str) -> Any:
    if kind == "as_none":
        return None
    if kind == "as_float":
        return _number(value, where)
    if kind in _CONSTANTS:
        if not isinstance(value, _CONSTANTS[kind]):
            raise InvalidFileError(f"{where}: `{kind}` does not match the value {value!r}")
        return tuple(value) if isinstance(value, list) else value
    if kind == "as_complex":
        parts = _get({"as_complex": value}, "as_complex", dict, where)
        return complex(_number(parts.get("real"), where), _number(parts.get("imag"), where))
    if kind == "as_scalar_type":
        if not isinstance(value, int) or value not in _SCALAR_TYPES:
            raise UnsupportedError(f"{where}: scalar type {value!r} has no numpy dtype; expected one of 1 to 35")
        return value
    if kind == "as_memory_format" and isinstance(value, int) and value in _MEMORY_FORMATS:
        return _MEMORY_FORMATS[value]
    if kind == "as_layout" and isinstance(value, int) and value in _LAYOUTS:
        return _LAYOUTS[value]
    if kind == "as_device":
        index = value.get("index") if isinstance(value, dict) else None
        device = _get(value, "type", str, where)
        return device if index is None else f"{device}:{index}"
    raise UnsupportedError(
        f"{where}: an argument of kind `{kind}` with the value {value!r} cannot be passed to a Python kernel; "
        f"change the model so that the operator is called without it"
    )


def _parse_output(item: Any, where: str) -> NodeOutput:
    kind, value = _variant(item, where)
    if kind == "as_optional_tensor":
        kind, value = _variant(value, where)
    if kind in ("as_none", "as_int"):
        return NodeOutput(kind)
    if kind == "as_tensor":
        return NodeOutput(kind, (_get(value, "name", str, where),))
    if kind == "as_tensors":
        return NodeOutput(kind, tuple(_get(element, "name", str, where) for element in _list(value, where)))
    raise UnsupportedError(
        f"{where}: a result of kind `{kind}` cannot be taken from a Python kernel; expected a tensor, a list of "
        f"tensors, an integer or none"
    )


def _optional_tensor(element: Any, where: str) -> str | None:
    kind, value = _variant(element, where)
    if kind == "as_none":
        return None
    if kind == "as_tensor":
        name: str = _get(value, "name", str, where)
        return name
    raise UnsupportedError(f"{where}: an optional tensor of kind `{kind}` is not known; expected a tensor or none")


def _variant(union: Any, where: str) -> tuple[str, Any]:
    """The one set field of a serialised union. Some writers keep the unset fields as nulls."""
    if isinstance(union, dict):
        fields = {key: value for key, value in union.items() if value is not None and key != "$type"}
        if len(fields) == 1:
            return next(iter(fields.items()))
        if not fields and "as_none" in union:
            return "as_none", True
    raise InvalidFileError(f"{where}: expected an object with one field `as_…`, got {union!r}")


def _get(mapping: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(mapping, dict) or not isinstance(mapping.get(key), kind):
        raise InvalidFileError(f"{where}: expected the field `{key}` of type {kind.__name__}, got {mapping!r}")
    return mapping[key]


def _number(value: Any, where: str) -> float:
    """Some writers put numbers that JSON has no digits for into strings: "Infinity", "-Infinity", "NaN"."""
    if isinstance(value, (int, float)) or value in ("Infinity", "-Infinity", "NaN"):
        with contextlib.suppress(OverflowError):  # an integer that no float holds
            return float(value)
    raise InvalidFileError(f"{where}: expected a number, got {value!r}")


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidFileError(f"{where}: expected a list, got {value!r}")
    return value


def _dtype(scalar_type: int) -> Any:
    import numpy

    name = _SCALAR_TYPES[scalar_type]
    if name not in _ML_DTYPES:
        return numpy.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise UnsupportedError(f"dtype `{name}` needs the package ml_dtypes in Python kernels: install it") from error
    return numpy.dtype(getattr(ml_dtypes, name))
