"""A served model: one method of a package behind its batcher, by the names that clients use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy
from numpy.typing import NDArray

import untorch
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError
from untorch.runtime.joining import Joining, joining_of
from untorch.runtime.spec import SymbolicDim, TensorSpec
from untorch.serve.batching import Batcher, Call, Observer
from untorch.serve.inference.tensors import datatype_of, dtype_name
from untorch.serve.probe import relates_rows

if TYPE_CHECKING:
    from untorch.runtime.method import Method
    from untorch.runtime.program import Program
    from untorch.serve.options import ServeOptions

__all__ = ["MethodModel", "Model", "Port"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Port:
    """An input or output as the protocol describes it: sizes that vary are -1."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """For metadata."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


class Model(Protocol):
    """What can be called by the protocol. timeout: seconds of a call; 0: no limit."""

    name: str
    timeout: float
    platform: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    async def infer(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, Any], timeout: float | None
    ) -> dict[str, Array]:
        """The outputs by name. Raises what a call of the method raises, and the batcher's errors."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the page and ``/v2/models/NAME`` show beside inputs and outputs."""
        ...


class MethodModel:
    """A method that takes and gives tensors.

    Calls start from the initial values of mutable buffers: nothing that one client's call leaves is seen by another's.
    """

    platform = "untorch_pt2"

    def __init__(
        self, name: str, program: Program, method: Method, options: ServeOptions, observer: Observer | None = None
    ) -> None:
        self.name = name
        self.timeout = options.timeout
        self._specs = {spec.name: spec for spec in method.inputs}
        has_state = _has_state(program, method.name)
        joining = joining_of(method.inputs, method.outputs, has_state)
        if not joining.reason and options.max_batch_size == 1:
            joining = Joining("max_batch_size is 1")
        self._session = program.session() if has_state else None
        self._method = method if self._session is None else self._session[method.name]
        self._lock = threading.Lock()
        self._method.open()
        if not joining.reason and relates_rows(self._method.run, method.inputs, int(method.device == "cpu")):
            joining = Joining("rows give other results together than alone")
        self._joining = joining
        self._is_described = bool(method.inputs) or not method.num_inputs
        self._input_names = [spec.name for spec in method.inputs] or [str(i) for i in range(method.num_inputs)]
        self._known = frozenset(self._input_names)
        self.inputs = tuple(_port(spec) for spec in method.inputs)
        known = [spec for spec in method.outputs if spec is not None]
        self.outputs = tuple(_port(spec) for spec in known)
        self._outputs = method.outputs
        most = options.max_batch_size if joining.limit is None else min(options.max_batch_size, joining.limit)
        self._max_batch_size = 0 if joining.reason else most
        self._batcher = Batcher(
            self._run,
            joins=not joining.reason,
            max_batch_size=most,
            max_wait=options.max_wait,
            max_queue=options.max_queue,
            runners=1 if has_state else options.num_runners,
            name=name,
            observer=observer,
        )

    @property
    def max_batch_size(self) -> int:
        """Rows of a joined call; 0: calls are not joined."""
        return self._max_batch_size

    @property
    def batcher(self) -> Batcher:
        """Its queue and runners."""
        return self._batcher

    async def infer(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, Any], timeout: float | None
    ) -> dict[str, Array]:
        """The outputs by name; those that are None are left out."""
        outputs = await self._batcher.infer(self._ordered(inputs), timeout)
        return self._named(outputs)

    def submit(self, inputs: Mapping[str, Array], done: Callable[[Call], None], timeout: float | None) -> Call:
        """Adds a call, of which ``done`` is told by the thread that ran it. Raises as ``Batcher.submit`` does."""
        return self._batcher.submit(self._ordered(inputs), done, timeout)

    def describe(self) -> dict[str, Any]:
        """Method, device, and whether calls are joined."""
        joins = self._batcher.joins
        return {
            "method": self._method.name,
            "device": self._method.device,
            "batching": {"joined": joins, **({} if joins else {"reason": self._joining.reason})},
        }

    def close(self) -> None:
        """Waits for the calls that are there."""
        self._batcher.close()
        if self._session is not None:
            self._session.close()

    def _ordered(self, inputs: Mapping[str, Array]) -> list[Array]:
        names = self._input_names
        if inputs.keys() != self._known:
            raise InvalidArgumentError(
                f"model '{self.name}': expected the inputs {', '.join(names) or 'none'}, "
                f"got {', '.join(inputs) or 'none'}"
            )
        return [_fit(self._specs.get(name), inputs[name], self.name, name) for name in names]

    def _run(self, inputs: Sequence[Array]) -> list[Any]:
        if self._session is None:
            return self._method.run(inputs)
        with self._lock:
            self._session.reset()
            # Copies: an output may be a view of a buffer, which the next call changes.
            return [None if output is None else numpy.array(output) for output in self._method.run(inputs)]

    def _named(self, outputs: Sequence[Any]) -> dict[str, Array]:
        specs = self._outputs
        if len(specs) != len(outputs):
            # A None that was known when the model was compiled is no output of the library.
            specs = tuple(spec for spec in specs if spec is not None)
        named: dict[str, Array] = {}
        for i, output in enumerate(outputs):
            spec = specs[i] if len(specs) == len(outputs) else None
            if output is not None:
                named[spec.name if spec is not None else f"output_{i}"] = numpy.asarray(output)
        return named


def _has_state(program: Program, method: str) -> bool:
    constants = program.manifest.get("methods", {}).get(method, {}).get("constants", [])
    return any(constant.get("mutated") for constant in constants)


def _port(spec: TensorSpec) -> Port:
    try:
        datatype = datatype_of(spec.dtype)
    except UnsupportedError:
        datatype = spec.dtype.upper()  # shown, though no client can send it
    return Port(spec.name, datatype, tuple(-1 if isinstance(size, SymbolicDim) else size for size in spec.shape))


def _fit(spec: TensorSpec | None, array: Array, model: str, name: str) -> Array:
    """The array with the method's dtype and memory layout. Raises InvalidArgumentError."""
    if array.dtype == object:
        raise InvalidArgumentError(f"model '{model}': input '{name}': expected numbers, got BYTES")
    if spec is None:
        return array
    if dtype_name(array.dtype) != spec.dtype or array.ndim != len(spec.shape):
        port = _port(spec)
        raise InvalidArgumentError(
            f"model '{model}': input '{name}': expected {port.datatype}{list(port.shape)}, "
            f"got {datatype_of(dtype_name(array.dtype))}{list(array.shape)}"
        )
    if spec.mutated:
        own: Array = untorch.empty(array.shape, spec.dtype).numpy()
        own[...] = array
        return own
    strides = spec.strides
    if not spec.contiguous and strides is not None and all(isinstance(stride, int) for stride in strides):
        order = sorted(range(array.ndim), key=lambda i: -int(strides[i]))  # type: ignore[arg-type]
        laid_out = numpy.ascontiguousarray(array.transpose(order))
        array = laid_out.transpose(sorted(range(array.ndim), key=order.__getitem__))
    return array
