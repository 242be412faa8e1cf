"""Program: a loaded ``.pt2`` file, and sessions with buffers of their own."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from untorch import _core
from untorch.runtime.errors import ClosedError, InvalidArgumentError
from untorch.runtime.method import Method

__all__ = ["Program", "Session", "load"]

_MANIFEST = "extra/untorch.json"
_MAX_PARALLEL = 1024  # beyond it OpenMP ends the process when it cannot start the threads


def load(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    num_runners: int = 1,
    num_threads: int = 0,
    dequantize_weights: bool = False,
) -> Program:
    """Load a ``.pt2`` file made by ``untorch.export`` or by PyTorch's ``aoti_compile_and_package``.

    The file is mapped, its weights are used in place; a method's library is opened at its first use.

    Args:
        path: The file.
        device: Default: what the file was compiled for; ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` must be that. A file for
            CUDA runs on any GPU of its architecture: without an index, on the current device. Methods for the CPU in
            a file that has some for CUDA stay there.
        num_runners: Calls of one method that may run at the same time; further ones wait.
        num_threads: OpenMP threads of a call; 0 leaves it to OpenMP (``OMP_NUM_THREADS``, else all cores).
        dequantize_weights: On a GPU, also keep the weights of int4 and NVFP4 linear layers dequantized to the dtype of
            the activations. GEMMs with large M are then as fast as in an unquantised model, for 2 bytes more a weight
            (in float32 4).

    Raises:
        InvalidFileError: The file is missing, damaged, or no compiled package.
        UnsupportedError: It was compiled for another architecture, CPU or GPU than there is, or by a newer untorch.
        InvalidArgumentError: An option has a wrong value.
    """
    for name, value, least in (("num_runners", num_runners, 1), ("num_threads", num_threads, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_PARALLEL:
            raise InvalidArgumentError(f"{name} must be an integer from {least} to {_MAX_PARALLEL}, got {value!r}")
    if not isinstance(dequantize_weights, bool):
        raise InvalidArgumentError(f"dequantize_weights must be True or False, got {dequantize_weights!r}")
    if device is not None and not isinstance(device, str):
        raise InvalidArgumentError(f"device must be a string such as 'cpu', got {device!r}")
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InvalidArgumentError(f"the path must not contain zero bytes, got {path!r}")
    _import_numpy()
    return Program(_core.Program(encoded, device, num_runners, num_threads, dequantize_weights), os.fsdecode(path))


def _import_numpy() -> None:
    """In the background: it takes a tenth of a second, as a GPU and weights do meanwhile, and calls are the first to
    need it. Whoever does imports it, too, and waits.
    """
    if "numpy" in sys.modules:
        return

    def run() -> None:
        with contextlib.suppress(ImportError):  # for whoever needs it to raise
            importlib.import_module("numpy")

    thread = threading.Thread(target=run, name="untorch-numpy")
    thread.start()
    os.register_at_fork(before=thread.join)  # a child would wait for ever for a module that nobody goes on importing


class _Methods:
    """Methods by attribute, by name, or as the only one; each opened at its first use."""

    def __init__(self, path: str, cores: list[_core.Method], spec: Callable[[str], Any], what: str) -> None:
        self._path = path
        self._cores = {core.name: core for core in cores}
        self._spec_of = spec
        self._what = what
        self._lock = threading.Lock()
        self._methods: dict[str, Method] = {}
        self._closed = False

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    @property
    def device(self) -> str:
        """Where its methods run: "cpu", or "cuda:0"."""
        devices = [core.device for core in self._cores.values()]
        return next((device for device in devices if device != "cpu"), "cpu")

    @property
    def methods(self) -> list[str]:
        """The methods' names."""
        return list(self._cores)

    def __getitem__(self, name: str) -> Method:
        """A method by its name; opened at its first use. Raises InvalidArgumentError for an unknown one."""
        method = self._methods.get(name)
        if method is not None:
            return method
        core = self._cores.get(name)
        if core is None:
            raise InvalidArgumentError(f"{self._path} has no method '{name}', there are: {', '.join(self._cores)}")
        with self._lock:
            if self._closed:
                raise ClosedError(f"method '{name}': the {self._what} is closed")
            if name not in self._methods:
                core.open()
                self._methods[name] = Method(core, self._spec_of(name))
            return self._methods[name]

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._cores:
            if name == "forward" and len(self._cores) == 1:
                name = next(iter(self._cores))  # a stock package calls its only method "model"
            else:
                raise AttributeError(f"{self._path} has no method '{name}', there are: {', '.join(self._cores)}")
        method = self[name]
        # Found once, the attribute is the object's own, without this detour.
        self.__dict__[name] = method
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the only method of the file."""
        if len(self._cores) != 1:
            raise InvalidArgumentError(f"{self._path} has several methods, call one by name: {', '.join(self._cores)}")
        return self[next(iter(self._cores))](*args, **kwargs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cores)

    def __len__(self) -> int:
        return len(self._cores)

    def _forget(self) -> None:
        self._closed = True
        for name in self._methods:
            self.__dict__.pop(name, None)
        self.__dict__.pop("forward", None)
        self._methods.clear()


class Program(_Methods):
    """A loaded file. Methods by attribute or by name: ``program.forward(x)``, ``program["text_decoder"](x)``.

    Buffers that calls change belong to the program, or to a ``session()``. Use it as a context manager, or call
    ``close()``, to free everything; outputs that look at weights stay valid.
    """

    def __init__(self, core: _core.Program, path: str) -> None:
        super().__init__(path, core.methods(), self._spec, "program")
        self._program = core
        self._manifest: dict[str, Any] | None = None
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    @property
    def is_stock(self) -> bool:
        """True for a package that PyTorch's own packager made."""
        return self._program.is_stock

    def memory(self) -> dict[str, Any]:
        """Bytes: ``mapped`` (the file), ``weights`` (distinct ones, in the file), ``state`` (buffers of its own calls).

        On a GPU also ``device``, and of that device: ``dequantized`` (weights that ``dequantize_weights`` keeps),
        ``tensors`` (what tensors of this process hold), ``reserved`` (with what is kept for reuse),
        ``free`` and ``total`` (what the driver says, all processes together).
        """
        memory: dict[str, Any] = json.loads(self._program.memory())
        return memory

    @property
    def manifest(self) -> dict[str, Any]:
        """What untorch wrote about the file when it was exported; empty for a stock package."""
        if self._manifest is None:
            self._manifest = {} if self.is_stock else json.loads(self._program.entry(_MANIFEST))
        return self._manifest

    def session(self) -> Session:
        """Buffers that calls change, in a copy of its own, as they are in the file. Weights are shared."""
        with self._lock:
            if self._closed:
                raise ClosedError("session: the program is closed")
            session = Session(self, self._program.session())
            self._sessions.add(session)
        return session

    def reset(self) -> None:
        """Buffers that calls of the program's own methods changed, as they are in the file again."""
        self._program.reset()

    def _spec(self, name: str) -> Any:
        return self.manifest.get("methods", {}).get(name)

    def close(self) -> None:
        """Free libraries, buffers and mapped weights. Calls that still run finish; later ones raise ClosedError."""
        for session in list(self._sessions):
            session.close()
        with self._lock:
            self._program.close()
            self._forget()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " (closed)" if self._closed else ""
        return f"<untorch.Program {self._path!r}: {', '.join(self._cores)}{state}>"


class Session(_Methods):
    """Buffers that calls change (a KV cache, a counter), in a copy of its own; made by ``Program.session``.

    Methods are called as a program's: ``session.decode(token)``. Those that name the same buffer share it. Calls of one
    session run one at a time, those of several side by side, on weights that all of them share. A CUDA graph
    (``session.decode.graph(…)``) belongs to its session.
    """

    def __init__(self, program: Program, core: _core.Session) -> None:
        super().__init__(program.path, core.methods(), program._spec, "session")
        self._program = program
        self._core = core

    @property
    def program(self) -> Program:
        """The program that it belongs to."""
        return self._program

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers so far: each is made when a method that has it is first used."""
        return self._core.nbytes()

    def reset(self) -> None:
        """Buffers as they are in the file again. On a GPU in the order of the call stream."""
        with self._lock:
            self._check_open("reset")
            self._core.reset()

    def fork(self) -> Session:
        """A session with the values of now, which goes its own way from here."""
        with self._lock:
            self._check_open("fork")
            session = Session(self._program, self._core.fork())
        self._program._sessions.add(session)
        return session

    def close(self) -> None:
        """Free the buffers. Calls that still run finish; later ones raise ClosedError."""
        with self._lock:
            self._core.close()
            self._forget()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what}: the session is closed")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " (closed)" if self._closed else ""
        return f"<untorch.Session of {self._path!r}: {', '.join(self._cores)}{state}>"
