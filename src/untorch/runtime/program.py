"""``load``, Program and Session: a loaded ``.pt2`` file, and independent copies of its mutable buffers."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from untorch import _core
from untorch.runtime.errors import (
    ArgumentTypeError,
    ClosedError,
    InvalidArgumentError,
    InvalidFileError,
    UnknownMethodError,
    file_error,
)
from untorch.runtime.method import Method

__all__ = ["Program", "Session", "load"]

_MANIFEST = "extra/untorch.json"
_MAX_PARALLEL = 1024  # OpenMP ends the process when it cannot start more threads


def load(
    path: str | bytes | os.PathLike[str],
    *,
    device: str | None = None,
    num_runners: int = 1,
    num_threads: int = 0,
    dequantize_weights: bool = False,
) -> Program:
    """Load a ``.pt2`` file made by ``untorch.export`` or by PyTorch's ``aoti_compile_and_package``.

    The file is mapped and its weights are used in place. A method's library is opened at its first use.

    Args:
        path: The file.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; must be the kind of device that the file was compiled for, which
            is the default. A file for CUDA runs on any GPU of its architecture; without an index, on the current
            device. Its methods for the CPU, if it has any, stay there.
        num_runners: Concurrent calls of one method; further ones wait. From 1 to 1024.
        num_threads: OpenMP threads of a call, up to 1024; 0: OpenMP's default (``OMP_NUM_THREADS``, else all cores).
        dequantize_weights: On a GPU, also keep the weights of int4 and NVFP4 linear layers dequantized to the dtype of
            the activations. GEMMs with large M are then as fast as in an unquantised model, for 2 bytes more a weight
            (in float32 4).

    Raises:
        InvalidFileError: The file is damaged or no compiled package. If it cannot be opened, the error is also Python's
            (FileNotFoundError, PermissionError, IsADirectoryError, OSError), with ``errno`` and ``filename``.
        UnsupportedError: It was compiled for another architecture, CPU or GPU, or by a newer untorch; or this untorch
            was built without CUDA.
        ArgumentTypeError: An argument has the wrong type. Also a TypeError.
        InvalidArgumentError: An argument has a wrong value. Also a ValueError.
    """
    for name, value, least in (("num_runners", num_runners, 1), ("num_threads", num_threads, 0)):
        text = f"load: {name}: expected an integer from {least} to {_MAX_PARALLEL}, got {value!r}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentTypeError(text)
        if not least <= value <= _MAX_PARALLEL:
            raise InvalidArgumentError(text)
    if not isinstance(dequantize_weights, bool):
        raise ArgumentTypeError(f"load: dequantize_weights: expected True or False, got {dequantize_weights!r}")
    if device is not None and not isinstance(device, str):
        raise ArgumentTypeError(f"load: device: expected a string such as 'cpu' or 'cuda:0', got {device!r}")
    if not isinstance(path, str | bytes | os.PathLike):
        raise ArgumentTypeError(f"load: path: expected str, bytes or os.PathLike, got {type(path).__name__}")
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InvalidArgumentError(f"load: path: expected no zero bytes, got {path!r}")
    _import_numpy()
    try:
        core = _core.Program(encoded, device, num_runners, num_threads, dequantize_weights)
    except InvalidFileError as error:
        # The C interface has one status for all errors of files: ask the system whether the file can be opened.
        number = _open_error(encoded)
        if number is None:
            raise
        raise file_error(str(error), number, os.fspath(path)) from None
    return Program(core, os.fsdecode(path))


def _open_error(path: bytes) -> int | None:
    """Why the system does not open the file: an errno; None if it does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno
    try:
        return errno.EISDIR if stat.S_ISDIR(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)


def _import_numpy() -> None:
    """Import numpy in the background, since that takes as long as starting a GPU and loading weights. The first call
    needs it and waits for the import.
    """
    if "numpy" in sys.modules:
        return

    def run() -> None:
        with contextlib.suppress(ImportError):  # the first call raises it
            importlib.import_module("numpy")

    thread = threading.Thread(target=run, name="untorch-numpy")
    thread.start()
    # In a forked child this thread does not exist, and the module's import lock would stay taken.
    os.register_at_fork(before=thread.join)


class _Methods:
    """What programs and sessions share: methods by attribute and by name, each opened at its first use."""

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
        """The device of its methods: "cpu" or, if any of them is for CUDA, such as "cuda:0"."""
        devices = [core.device for core in self._cores.values()]
        return next((device for device in devices if device != "cpu"), "cpu")

    @property
    def methods(self) -> list[str]:
        """The methods' names."""
        return list(self._cores)

    def __getitem__(self, name: str) -> Method:
        """A method by its name; opened at its first use. Raises UnknownMethodError, also a KeyError."""
        if not isinstance(name, str):
            raise ArgumentTypeError(f"{self._path}: expected a method's name as a string, got {name!r}")
        method = self._methods.get(name)
        if method is not None:
            return method
        core = self._cores.get(name)
        if core is None:
            raise UnknownMethodError(f"{self._path} has no method '{name}', there are: {', '.join(self._cores)}")
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
        # From now on found as an attribute of the instance, without this function.
        self.__dict__[name] = method
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of a file that has only one."""
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

    Mutable buffers (a KV cache) belong to the program; ``session()`` makes an independent copy of them. Use it as a
    context manager, or call ``close()``, to free everything. Outputs stay valid, also views of weights.
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
        """Bytes: ``mapped`` (the file), ``weights`` (distinct weights in the file), ``state`` (the program's buffers).

        On a GPU also ``device`` and, for that device, ``dequantized`` (weights that ``dequantize_weights`` keeps),
        ``tensors`` (live tensors of this process), ``reserved`` (the same with the memory pool's unused memory), and
        the driver's ``free`` and ``total``, which count all processes.
        """
        memory: dict[str, Any] = json.loads(self._program.memory())
        return memory

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest that export wrote; empty for a stock package."""
        if self._manifest is None:
            self._manifest = {} if self.is_stock else json.loads(self._program.entry(_MANIFEST))
        return self._manifest

    def session(self) -> Session:
        """A session: an independent copy of the mutable buffers, with their initial values. Weights are shared."""
        with self._lock:
            if self._closed:
                raise ClosedError("session: the program is closed")
            session = Session(self, self._program.session())
            self._sessions.add(session)
        return session

    def reset(self) -> None:
        """Reset the program's own mutable buffers to their initial values in the file."""
        self._program.reset()

    def _spec(self, name: str) -> Any:
        return self.manifest.get("methods", {}).get(name)

    def close(self) -> None:
        """Free libraries, buffers and mapped weights. Running calls finish; later ones raise ClosedError."""
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
    """An independent copy of a program's mutable buffers (a KV cache, a counter); made by ``Program.session``.

    Methods are called like a program's: ``session.decode(token)``. Methods that name the same buffer share it, and all
    sessions share the weights. Calls of one session are serialised; calls of different sessions run concurrently. A
    CUDA graph (``session.decode.graph(…)``) belongs to its session.
    """

    def __init__(self, program: Program, core: _core.Session) -> None:
        super().__init__(program.path, core.methods(), program._spec, "session")
        self._program = program
        self._core = core

    @property
    def program(self) -> Program:
        """The program of the session."""
        return self._program

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers so far: each is allocated when a method that uses it is first used."""
        return self._core.nbytes()

    def reset(self) -> None:
        """Reset the buffers to their initial values in the file. On a GPU enqueued on the call stream."""
        with self._lock:
            self._check_open("reset")
            self._core.reset()

    def fork(self) -> Session:
        """A new session: an independent copy of the current state."""
        with self._lock:
            self._check_open("fork")
            session = Session(self._program, self._core.fork())
        self._program._sessions.add(session)
        return session

    def close(self) -> None:
        """Free the buffers. Running calls finish; later ones raise ClosedError."""
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
