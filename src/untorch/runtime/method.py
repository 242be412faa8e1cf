"""Method and Graph: one compiled method, called with arrays and trees of arrays, and a captured call of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from untorch import _core
from untorch.runtime.errors import InvalidArgumentError, InvalidFileError
from untorch.runtime.log import DEBUG, INFO, log
from untorch.runtime.process import Lock
from untorch.runtime.spec import TensorSpec, parse_specs

if TYPE_CHECKING:
    import asyncio

    from untorch.runtime.proxy import ExternNode
    from untorch.runtime.submit import Lane

__all__ = ["Graph", "Method"]


class Method:
    """One method of a Program; call it with what the model's ``forward`` takes.

    numpy arrays in give numpy arrays out; if any input is another DLPack object, the outputs are ``untorch.Tensor``
    objects, which any DLPack library takes without a copy. Nothing is copied on the way in: arrays must have the
    method's dtypes and memory layout. Several threads may call one method. The first call opens the method's library;
    until then no code of the file runs.

    On a GPU, the work is enqueued on the caller's stream (``untorch.stream``), or on one of the library's own for each
    thread. numpy arrays are copied there, and numpy outputs are copies, for which the call waits. With arrays on the
    GPU (DLPack, or the CUDA array interface) it waits for nothing and copies nothing: producers order their work before
    the call's stream, and consumers' streams wait for it when they take a ``Tensor``.
    """

    __slots__ = ("__weakref__", "_core", "_inputs", "_lane", "_outputs", "_spec")

    def __init__(self, core: _core.Method, spec: Mapping[str, Any] | None, path: str, lane: Callable[[], Lane]) -> None:
        self._core = core
        self._spec = spec
        self._lane = lane
        self._inputs = cast(tuple[TensorSpec, ...], parse_specs((spec or {}).get("inputs", [])))
        self._outputs: tuple[TensorSpec | None, ...] | None = None
        if not core.is_described:
            core.open_with(_Opener(path, spec or {}, self._signature()))

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
        """Tensor inputs in the flat call (``run``). A stock package does not tell: its library is opened."""
        return len(self._inputs) if self._spec is not None else self._core.arity()[0]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Each tensor input, in the file's order; empty for a stock package, which does not tell."""
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec | None, ...]:
        """Each output (None for a None); empty for a stock package."""
        if self._outputs is None:
            self._outputs = parse_specs((self._spec or {}).get("outputs"))
        return self._outputs

    def open(self) -> None:
        """Open the library and bind the weights now instead of at the first call. This runs code of the file.

        Raises:
            InvalidFileError: The library is damaged.
            UnsupportedError: The library needs what this build or machine does not have.
            UntrustedError: The file changed after a trust policy had accepted it.
            ClosedError: The program is closed.
        """
        self._core.ensure_open()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method. ``out=`` may give buffers (a tree like the result's) that receive copies of the outputs."""
        return self._core(*args, **kwargs)

    def run(self, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        """Run on the tensor inputs alone: a list in the file's order, or a dict by the names in ``inputs``.

        A stock package does not tell names: there they are "0", "1", …

        Returns:
            The flat list of outputs.

        Raises:
            InvalidArgumentError: An input is missing, unknown, or does not fit.
        """
        return self._core.run(self._ordered(inputs))

    def submit(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Queue a call, and return at once: ``y = await method.submit(x)``. For coroutines, with any event loop.

        Calls run on threads of the library, at most as many at a time as the program has runners, in the order of their
        submission; those of one session, or on the program's buffers, one after the other. Do not change the arrays
        before the result is there. On a GPU the call is enqueued on the stream of the thread that submits, and the
        result is ready when the future is.

        A cancelled call does not begin; one that runs ends, and its result is dropped.

        Raises:
            InvalidArgumentError: No event loop runs on this thread.

        The future raises what a call raises.
        """
        from untorch.runtime.submit import submit

        return submit(self, self._lane(), args, kwargs)

    @property
    def graphs(self) -> tuple[int, str]:
        """With ``load(…, cuda_graphs=N)``: how many graphs there are now, and why further calls are not captured.

        The text is empty where they are.
        """
        return self._core.graphs()

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """Capture a call with arguments of these shapes as a CUDA graph, which replays for the price of one launch.

        The values do not matter. Capture again for other shapes; graphs of several lie side by side.

        Raises:
            InvalidArgumentError: The method does not run on a GPU, or the arguments are not its own.
            UnsupportedError: The model looks at its results while it runs (sizes that depend on values, for instance).
        """
        return Graph(self, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgumentError(
            f"method '{self.name}': a Method is neither pickled nor copied: pickle its program, and take the method "
            "there"
        )

    def __repr__(self) -> str:
        return f"<untorch.Method {self.name}{self._signature()}>"

    def _signature(self) -> str:
        return f"({', '.join(map(str, self.inputs))})" if self.inputs else ""

    def _ordered(self, inputs: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
        """The flat inputs in the file's order."""
        if not isinstance(inputs, Mapping):
            return inputs
        names = [spec.name for spec in self.inputs] or [str(i) for i in range(self.num_inputs)]
        if set(names) != set(inputs):
            raise InvalidArgumentError(
                f"method '{self.name}': expected the inputs {', '.join(names)}, "
                f"got {', '.join(map(str, inputs)) or 'none'}"
            )
        return [inputs[name] for name in names]


class Graph:
    """A captured call; made by ``Method.graph``, called like the method with arguments of the captured shapes.

    A replay is enqueued on the call's stream as a whole. Arrays on the GPU are read where they lie, or copied into the
    graph's own memory if they cannot be; numpy arrays are copied. **Outputs are views of the graph's memory: the next
    replay overwrites them.** Copy what has to stay, or pass ``out=``. numpy outputs are copies already.

    Use it as a context manager, or call ``close()``, to free its memory. It keeps its method's program.
    """

    __slots__ = ("__weakref__", "_core", "_method", "_shapes")

    def __init__(
        self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any], shares: Graph | None = None
    ) -> None:
        if method.device == "cpu":
            raise InvalidArgumentError(
                f"method '{method.name}': a CUDA graph needs a method compiled for CUDA, this one runs on the CPU"
            )
        inputs = method._core.flatten(*args, **kwargs)
        self._method = method
        self._core: _core.Graph = _core.Graph(method._core, inputs, None if shares is None else shares._core)
        self._shapes = [tuple(getattr(array, "shape", ())) for array in inputs]

    @property
    def method(self) -> Method:
        """The method that was captured."""
        return self._method

    def share(self, method: Method, *args: Any, **kwargs: Any) -> Graph:
        """Capture another call, of any method on this GPU, in the memory of this graph; see ``Method.graph``.

        Many graphs then take little more than the largest one, which is best captured first. Their replays run one
        after another, whatever streams they are on, and **each overwrites the outputs of all**.
        """
        return Graph(method, args, kwargs, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay with these arguments. ``out=`` as for a method. Other shapes or dtypes than captured are an error."""
        return self._core(*args, **kwargs)

    def run(self, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        """Replay on the tensor inputs alone; see ``Method.run``."""
        return self._core.run(self._method._ordered(inputs))

    def close(self) -> None:
        """Free the graph and its memory. Outputs that look at it stay valid."""
        self._core.close()

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgumentError(
            "a Graph is neither pickled nor copied: it belongs to this process and its GPU: capture one there"
        )

    def __repr__(self) -> str:
        shapes = ", ".join(str(list(shape)) for shape in self._shapes)
        return f"<untorch.Graph of {self._method.name}({shapes}){' (closed)' if self._core.closed else ''}>"


class _Opener:
    """Opens a method at its first use. It holds neither the method nor its core, which hold it."""

    def __init__(self, path: str, spec: Mapping[str, Any], signature: str) -> None:
        self._path = path
        self._spec = spec
        self._signature = signature
        self._lock = Lock()

    def __call__(self, core: _core.Method) -> None:
        with self._lock:
            if core.is_described:
                return
            begin = time.perf_counter()
            core.open()
            if (text := core.extern_nodes()) is not None:
                core.set_proxy(_proxy_handler(core, text))
            inputs, outputs = self._spec.get("inputs", []), self._spec.get("outputs", [])
            # The last step: from now on other threads do not come here.
            core.describe(
                names=[item["name"] for item in inputs],
                constants={i: item["constant"] for i, item in enumerate(inputs) if "constant" in item},
                numbers=[i for i, item in enumerate(inputs) if "value" in item],
                fixed_outputs={
                    i: item["constant"] if item else None
                    for i, item in enumerate(outputs)
                    if item is None or "constant" in item
                },
                text=self._signature,
            )
            log(DEBUG, "opened %s of %s in %.3f s", core.name, self._path, time.perf_counter() - begin)


def _proxy_handler(core: _core.Method, text: str) -> _ProxyHandler:
    from untorch.runtime.proxy import parse_extern_nodes
    from untorch.runtime.registry import served_by

    nodes = parse_extern_nodes(text)
    kind, _, index = core.device.partition(":")
    for target in dict.fromkeys(node.target for node in nodes):
        log(INFO, "method %s calls %s, which runs as a %s kernel", core.name, target,
            "native" if served_by(target, kind) == "native" else "Python")  # fmt: skip
    return _ProxyHandler(nodes, int(index or -1))


class _ProxyHandler:
    """Serves the operators that have no C shim and no native kernel, by the registered kernels.

    On the CPU tensors go to them as numpy arrays. On a GPU they go as they are, unless all of a call's tensors are on
    the CPU. The method holds it, so it does not hold the method.
    """

    def __init__(self, nodes: list[ExternNode], gpu: int) -> None:
        self._nodes = nodes
        self._gpu = gpu

    def __call__(self, core: _core.Method, index: int, ints: list[int], tensors: list[_core.Tensor]) -> None:
        if not 0 <= index < len(self._nodes):
            raise InvalidFileError(f"the model calls operator node {index}, the package describes {len(self._nodes)}")
        import numpy

        node = self._nodes[index]
        given, slots = tensors[: node.num_input_tensors], tensors[node.num_input_tensors :]
        if self._gpu >= 0 and (not given or any(tensor.device != "cpu" for tensor in given)):
            node.call_on_gpu(ints, given, slots, self._gpu, core.source)
            return
        results = node.call(ints, [tensor.numpy() for tensor in given], core.source)
        for slot, result in zip(slots, results, strict=True):
            # The compiled model was told each result's strides and addresses it by them: they are kept.
            array = numpy.asarray(result)
            fits = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
            slot.assign(array if fits and array.flags.aligned else numpy.array(array, order="C"))
