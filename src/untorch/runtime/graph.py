"""Graph: one call of a method as a CUDA graph."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from untorch import _core
from untorch.runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from untorch.runtime.method import Method

__all__ = ["Graph"]


class Graph:
    """A captured call; made by ``Method.graph``, called like the method with arguments of the captured shapes.

    A replay is enqueued on the call's stream as a whole. Arrays on the GPU are read where they lie, or copied into the
    graph's own memory if they cannot be; numpy arrays are copied. **Outputs are views of the graph's memory: the next
    replay overwrites them.** Copy what has to stay, or pass ``out=``. numpy outputs are copies already.

    Use it as a context manager, or call ``close()``, to free its memory. It keeps its method's program.
    """

    __slots__ = ("__weakref__", "_core", "_method", "_shapes")

    def __init__(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method.device == "cpu":
            raise InvalidArgumentError(
                f"method '{method.name}': a CUDA graph needs a method compiled for CUDA, this one runs on the CPU"
            )
        leaves = method._leaves(args, kwargs)
        self._method = method
        self._core = _core.Graph(method._core, leaves)
        self._shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        # The native object must not keep this one alive in return.
        this = weakref.ref(self)

        def general(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            graph = this()
            assert graph is not None, "a graph is called through its own object"
            return method._call(graph._core.run, args, kwargs)

        self._core.bind(general)

    @property
    def method(self) -> Method:
        """The method that was captured."""
        return self._method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay with these arguments. ``out=`` as for a method. Other shapes or dtypes than captured are an error."""
        return self._core(*args, **kwargs)

    def run_flat(self, inputs: list[Any]) -> list[Any]:
        """Replay with the flat list of tensor inputs, in the file's order; gives the flat list of outputs."""
        return self._core.run(list(inputs))

    def close(self) -> None:
        """Free the graph and its memory. Outputs that look at it stay valid."""
        self._core.close()

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        shapes = ", ".join(str(list(shape)) for shape in self._shapes)
        return f"<untorch.Graph of {self._method.name}({shapes}){' (closed)' if self._core.closed else ''}>"
