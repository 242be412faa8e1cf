"""Method: one compiled method, called with arrays and trees of arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from untorch import _core
from untorch.runtime import pytree
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError, UnsupportedError

if TYPE_CHECKING:
    from untorch.runtime.graph import Graph
    from untorch.runtime.proxy import ExternNode

__all__ = ["Method"]


class Method:
    """One method of a Program; call it with what the model's ``forward`` takes.

    numpy arrays in give numpy arrays out; if any input is another DLPack object, the outputs are ``untorch.Tensor``
    objects, which any DLPack library takes without a copy. Nothing is copied on the way in: arrays must have the
    method's dtypes and memory layout. Several threads may call one method.

    On a GPU, the work is enqueued on the caller's stream (``untorch.stream``), or on one of the library's own for each
    thread. numpy arrays are copied there, and numpy outputs are copies, for which the call waits. With arrays on the
    GPU (DLPack, or the CUDA array interface) it waits for nothing and copies nothing: producers order their work before
    the call's stream, and consumers' streams wait for it when they take a ``Tensor``.
    """

    __slots__ = ("__weakref__", "_core", "_in_spec", "_leaf_constants", "_names", "_out_spec", "_spec")

    def __init__(self, core: _core.Method, spec: Mapping[str, Any] | None) -> None:
        self._core = core
        self._spec = spec
        in_text, out_text = core.call_spec()
        self._in_spec = pytree.parse_spec(in_text)
        self._out_spec = pytree.parse_spec(out_text)
        if len(self._in_spec.children) != 2:
            raise InvalidArgumentError(f"method '{core.name}': the call specification has no (args, kwargs) form")
        self._leaf_constants = self._constants()
        self._names = self._input_names()
        num_inputs, num_outputs = core.arity()
        positional, keyword = self._in_spec.children
        flat = (
            all(child.kind == "leaf" for child in positional.children)
            and not keyword.children
            and len(positional.children) == num_inputs
        )
        outputs = -1
        if self._out_spec.kind == "leaf" and num_outputs == 1:
            outputs = 0
        elif self._out_spec.kind in ("tuple", "list") and all(c.kind == "leaf" for c in self._out_spec.children):
            outputs = 1 if self._out_spec.kind == "tuple" else 2
        # The native object must not keep this one alive in return.
        this = weakref.ref(self)

        def general(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            method = this()
            assert method is not None, "a method is called through its own object"
            return method._general(args, kwargs)

        core.bind(general, flat, outputs if len(self._out_spec.children) in (0, num_outputs) else -1)
        if (text := core.extern_nodes()) is not None:
            from untorch.runtime.proxy import parse_extern_nodes

            nodes = parse_extern_nodes(text)
            if core.device != "cpu":
                names = ", ".join(dict.fromkeys(node.target for node in nodes))
                raise UnsupportedError(
                    f"method '{core.name}' runs on {core.device} and needs operators that have no C shim: {names}; "
                    "Python kernels work on the CPU's memory only: change the model, or export it for the CPU"
                )
            core.set_proxy(_ProxyHandler(nodes))

    @property
    def name(self) -> str:
        """The method's name in the file."""
        return self._core.name

    @property
    def device(self) -> str:
        """Where it runs: "cpu", or "cuda:0"."""
        return self._core.device

    @property
    def gpu_architecture(self) -> str | None:
        """The GPU architecture of the code that runs, such as "sm_90"; None on the CPU, or if the file does not say."""
        return self._core.gpu_architecture or None

    @property
    def num_inputs(self) -> int:
        """Tensor inputs in the flat call (``run_flat``)."""
        return self._core.arity()[0]

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Name, dtype and shape of each tensor input; empty for a stock package, which does not tell."""
        return [dict(item) for item in (self._spec or {}).get("inputs", []) if "constant" not in item]

    @property
    def outputs(self) -> list[dict[str, Any] | None]:
        """Name, dtype and shape of each output (None for a None); empty for a stock package."""
        return [None if item is None else dict(item) for item in (self._spec or {}).get("outputs", [])]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method. ``out=`` may give buffers (a tree like the result's) that receive copies of the outputs."""
        return self._core(*args, **kwargs)

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """Capture a call with arguments of these shapes as a CUDA graph, which replays for the price of one launch.

        The values do not matter. Capture again for other shapes; graphs of several lie side by side.

        Raises:
            InvalidArgumentError: The method does not run on a GPU, or the arguments are not its own.
            UnsupportedError: The model looks at its results while it runs (sizes that depend on values, for instance).
        """
        from untorch.runtime.graph import Graph

        return Graph(self, args, kwargs)

    def __repr__(self) -> str:
        return f"<untorch.Method {self.name}{self._signature()}>"

    def run_flat(self, inputs: Sequence[Any]) -> list[Any]:
        """Run on the flat list of tensor inputs, in the file's order; gives the flat list of outputs."""
        return self._core.run(list(inputs))

    def call_by_name(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Run with inputs by the names in ``inputs``; gives the flat list of outputs."""
        names = [item["name"] for item in self.inputs]
        if not names:
            names = [str(i) for i in range(self._core.arity()[0])]
        if set(names) != set(inputs):
            raise InvalidArgumentError(
                f"method '{self.name}': expected the inputs {', '.join(names)}, got {', '.join(inputs) or 'none'}"
            )
        return self._core.run([inputs[name] for name in names])

    def _signature(self) -> str:
        parts = [f"{item['name']}: {item['dtype']}{_shape_text(item['shape'])}" for item in self.inputs]
        return f"({', '.join(parts)})" if parts else ""

    def _constants(self) -> dict[int, Any]:
        """Leaves that the model took as Python values when it was exported, by their position."""
        items = (self._spec or {}).get("inputs", [])
        return {i: item["constant"] for i, item in enumerate(items) if "constant" in item}

    def _input_names(self) -> list[str]:
        """Names of the positional arguments that are single arrays, so that they may also be passed by name."""
        positional = self._in_spec.children[0]
        items = (self._spec or {}).get("inputs", [])
        if len(items) < len(positional.children) or any(c.kind != "leaf" for c in positional.children):
            return []
        return [item["name"] for item in items[: len(positional.children)]]

    def _general(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(self._core.run, args, kwargs)

    def _call(self, run: Callable[..., list[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trees of arguments to a flat run, and its results to the model's tree."""
        import numpy

        keyword = self._in_spec.children[1]
        out = None
        if "out" in kwargs and "out" not in keyword.keys:
            kwargs = dict(kwargs)
            out = kwargs.pop("out")
        leaves = self._leaves(args, kwargs)
        buffers = None if out is None else self._out_buffers(out)
        on_device = any(buffer is not None and not isinstance(buffer, numpy.ndarray) for buffer in buffers or ())
        results = self._expand_none(run(leaves, False if on_device else None))
        if buffers is not None:
            results = _copy_out(self.name, results, buffers)
        return pytree.unflatten(iter(results), self._out_spec)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat tensor inputs of a call."""
        return self._flatten(*self._place_names(args, kwargs))

    def _expand_none(self, results: list[Any]) -> list[Any]:
        # A None that was known when the model was compiled is a leaf of the tree but no output of the library.
        missing = self._out_spec.num_leaves - len(results)
        if missing <= 0:
            return results
        specs = (self._spec or {}).get("outputs", [])
        if sum(item is None for item in specs) == missing:
            remaining = iter(results)
            return [None if item is None else next(remaining) for item in specs]
        return results + [None] * missing

    def _place_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Moves arguments given by name to their positions, as Python does for a function."""
        names = self._names[len(args) :]
        expected = self._in_spec.children[1].keys
        if not names or not any(name in kwargs and name not in expected for name in names):
            return args, kwargs
        rest = dict(kwargs)
        placed = list(args)
        for name in names:
            if name not in rest:
                raise ArgumentTypeError(f"method '{self.name}': missing argument '{name}'{self._hint()}")
            placed.append(rest.pop(name))
        return tuple(placed), rest

    def _hint(self) -> str:
        signature = self._signature()
        return f"; it takes {signature}" if signature else ""

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        import numpy

        positional, keyword = self._in_spec.children
        prefix = f"method '{self.name}', "
        if len(args) != len(positional.children):
            raise ArgumentTypeError(
                f"method '{self.name}': expected {len(positional.children)} positional arguments, "
                f"got {len(args)}{self._hint()}"
            )
        if set(kwargs) != set(keyword.keys):
            missing = [key for key in keyword.keys if key not in kwargs]
            unknown = [key for key in kwargs if key not in keyword.keys]
            parts = []
            if missing:
                parts.append(f"missing keyword arguments {', '.join(map(str, missing))}")
            if unknown:
                parts.append(f"unknown keyword arguments {', '.join(unknown)}")
            raise ArgumentTypeError(f"method '{self.name}': {'; '.join(parts)}{self._hint()}")
        leaves = list(pytree.flatten(tuple(args), positional, f"{prefix}args"))
        leaves += pytree.flatten(kwargs, keyword, f"{prefix}kwargs")
        tensors = []
        num_inputs = self._core.arity()[0]
        by_position = len(self._leaf_constants) + num_inputs == len(leaves)
        for i, (path, leaf) in enumerate(leaves):
            if by_position and i in self._leaf_constants:
                expected = self._leaf_constants[i]
                if leaf != expected or type(leaf) is not type(expected):
                    raise InvalidArgumentError(
                        f"{path}: the model was exported with the value {expected!r}, got {leaf!r}; export it again "
                        "for another value"
                    )
                continue
            if by_position or isinstance(leaf, numpy.ndarray) or _is_array(leaf):
                tensors.append(leaf)
        return tensors

    def _out_buffers(self, out: Any) -> list[Any]:
        import numpy

        path = f"method '{self.name}', out"
        buffers = [leaf for _, leaf in pytree.flatten(out, self._out_spec, path)]
        for i, buffer in enumerate(buffers):
            on_gpu = self.device != "cpu" and _is_array(buffer)
            if buffer is not None and not isinstance(buffer, numpy.ndarray) and not on_gpu:
                where = "" if self.device == "cpu" else f" or an array on {self.device}"
                raise ArgumentTypeError(
                    f"{path}[{i}]: expected a numpy array{where} to write to, got {type(buffer).__name__}"
                )
            if isinstance(buffer, numpy.ndarray) and not buffer.flags.writeable:
                raise InvalidArgumentError(f"{path}[{i}]: the array is read-only")
        return buffers


class _ProxyHandler:
    """Serves the operators that have no C shim: tensors as numpy arrays to the registered kernel and back."""

    def __init__(self, nodes: list[ExternNode]) -> None:
        self._nodes = nodes

    def __call__(self, index: int, ints: list[int], tensors: list[_core.Tensor]) -> None:
        if not 0 <= index < len(self._nodes):
            raise InvalidFileError(f"the model calls operator node {index}, the package describes {len(self._nodes)}")
        import numpy

        node = self._nodes[index]
        inputs = [tensor.numpy() for tensor in tensors[: node.num_input_tensors]]
        results = node.call(ints, inputs)
        for slot, result in zip(tensors[node.num_input_tensors :], results, strict=True):
            # The compiled model was told each result's strides and addresses it by them: they are kept.
            array = numpy.asarray(result)
            slot.assign(numpy.array(array, order="C") if min(array.strides, default=0) < 0 else array)


def _shape_text(shape: Sequence[Any]) -> str:
    parts = [str(d) if isinstance(d, int) else str(d.get("symbol") or d.get("expr") or "?") for d in shape]
    return f"[{', '.join(parts)}]"


def _is_array(value: Any) -> bool:
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def _copy_out(method: str, results: list[Any], buffers: list[Any]) -> list[Any]:
    import numpy

    arrays: dict[int, Any] = {}
    for i, (result, buffer) in enumerate(zip(results, buffers, strict=True)):
        if buffer is None:
            continue
        if result is None:
            raise InvalidArgumentError(f"method '{method}', out[{i}]: expected None, as the output is, got an array")
        if not isinstance(buffer, numpy.ndarray):
            continue
        arrays[i] = array = result if isinstance(result, numpy.ndarray) else result.numpy()
        if buffer.shape != array.shape or buffer.dtype != array.dtype:
            raise InvalidArgumentError(
                f"method '{method}', out[{i}]: expected {array.dtype}{list(array.shape)}, "
                f"got {buffer.dtype}{list(buffer.shape)}"
            )
    for i, buffer in enumerate(buffers):
        if buffer is None:
            continue
        if i in arrays:
            numpy.copyto(buffer, arrays[i])
        else:
            try:
                results[i].copy_to(buffer)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"method '{method}', out[{i}]: {error}") from error
        results[i] = buffer
    return results
