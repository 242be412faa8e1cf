"""``load``, Program and Session: a loaded ``.pt2`` file, and independent copies of its mutable buffers."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from untorch import _core
from untorch.runtime.errors import (
    ArgumentTypeError,
    ClosedError,
    FileOpenError,
    InvalidArgumentError,
    UnknownMethodError,
)
from untorch.runtime.log import INFO, log
from untorch.runtime.method import Method
from untorch.runtime.process import Lock, Shared, file_identity, import_numpy
from untorch.runtime.source import check_load_options, open_source

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from untorch.runtime.submit import Lane
    from untorch.trust.policy import TrustPolicy

__all__ = ["Program", "Session", "load"]

_MANIFEST = "extra/untorch.json"


def load(
    source: str | os.PathLike[str] | ReadableBuffer,
    *,
    device: str | None = None,
    num_runners: int = 1,
    num_threads: int = 0,
    spin_us: int | None = None,
    cuda_graphs: int = 0,
    dequantize_weights: bool = False,
    tf32: bool | None = None,
    verify: bool = False,
    copy: bool = False,
    weights: str | os.PathLike[str] | None = None,
    trust: TrustPolicy | str | os.PathLike[str] | None = None,
) -> Program:
    """Load a ``.pt2`` file made by ``untorch.export`` or by PyTorch's ``aoti_compile_and_package``.

    The file is mapped and its weights are used in place. A method's library is opened at its first call, from a private
    copy that is compared with its SHA-256 first.

    Replace a file that is in use by renaming a new one into place. If it is truncated instead, the reads that find
    nothing give zeros, and this call and later ones raise InvalidFileError. If it is overwritten in place, the weights
    change silently; ``copy=True`` makes both impossible.

    Args:
        source: The file's path, or its contents: bytes, or another object with the buffer protocol. Contents are
            copied, but for ``bytes`` whose memory is 64-byte aligned, which are kept and used in place.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; must be the kind of device that the file was compiled for, which
            is the default. A file for CUDA runs on any GPU of its architecture; without an index, on the current
            device. Its methods for the CPU, if it has any, stay there.
        num_runners: Concurrent calls of one method; further ones wait. From 1 to 1024.
        num_threads: threads of a call, up to 1024; 0: ``OMP_NUM_THREADS``, else all cores.
        spin_us: Microseconds that a thread of a call spins when it waits, for work or for the call's other threads,
            before it sleeps; up to 1,000,000. 0 leaves the CPU to others at once, more answers frequent calls sooner.
            None: ``UNTORCH_SPIN_US``, else 100.
        cuda_graphs: On a GPU, of how many shapes of inputs each method keeps a CUDA graph, up to 1024. A call on shapes
            that came before is captured, and replayed from then on. Outputs are copies: nothing overwrites them.
            Replays of a method run one after another. ``Method.graphs`` says how many there are, and why there are
            none.
        dequantize_weights: On a GPU, also keep the weights of int4 and NVFP4 linear layers dequantized to the dtype of
            the activations. GEMMs with large M are then as fast as in an unquantised model, for 2 bytes more a weight
            (in float32 4).
        tf32: On a GPU, whether float32 convolutions and GEMMs may round their operands to TF32, which has 10 bits of
            mantissa. None: as PyTorch was set when the file was exported (its default: in convolutions); in a stock
            package as PyTorch's defaults are. ``UNTORCH_ALLOW_TF32=0`` or ``1`` in the environment decides for all.
        verify: Compare every entry with its SHA-256 in the manifest first (in a stock package with its CRC-32), on all
            cores; reads the whole file. ``UNTORCH_VERIFY=1`` in the environment does it for every load.
        copy: Read the whole file into memory instead of mapping it.
        weights: For a file that was exported with ``weights``: the .safetensors file that it takes weights from, or the
            folder that has several. None: in the file's own folder, then where ``UNTORCH_WEIGHTS`` in the environment
            says. It is mapped and shared like the file itself. Names, dtypes, shapes and the first and last bytes of
            its tensors are compared with the manifest; all bytes with ``verify``, or if there is a trust policy.
        trust: A TrustPolicy, or the path of a policy file, that has to accept the file before any code of it is mapped
            executable. The environment's ``UNTORCH_TRUST``, the path of a policy file, has to accept it as well.

    Raises:
        UntrustedError: A trust policy does not accept the file. Also a RuntimeError.
        InvalidFileError: The file is damaged or no compiled package. If it cannot be opened, the error is also Python's
            (FileNotFoundError, PermissionError, IsADirectoryError, OSError), with ``errno`` and ``filename``.
        UnsupportedError: It was compiled for another architecture, CPU or GPU, or by a newer untorch; or this untorch
            was built without CUDA.
        ArgumentTypeError: An argument has the wrong type. Also a TypeError.
        InvalidArgumentError: An argument has a wrong value. Also a ValueError.
        OutOfMemoryError: There is not enough memory, or address space, for the file. Also a MemoryError.
    """
    check_load_options(
        device, num_runners, num_threads, dequantize_weights, verify, copy, tf32, spin_us, weights, cuda_graphs
    )
    requirements = []
    if trust is not None or "UNTORCH_TRUST" in os.environ:
        from untorch.trust.check import policies_of

        requirements = policies_of(trust)
    import_numpy()
    begin = time.perf_counter()
    archive, path = open_source(source, copy)
    if requirements:
        from untorch.trust.check import admit

        admit(archive, path, requirements)
    where = None if weights is None else os.fsencode(weights)
    try:
        core = _core.Program(
            archive, device, num_runners, num_threads, dequantize_weights, verify, tf32, spin_us, copy, where,
            cuda_graphs,
        )  # fmt: skip
    except FileOpenError as error:  # of a .safetensors file
        error.filename = path if weights is None else os.fspath(weights)
        raise
    options = {
        "device": device,
        "num_runners": num_runners,
        "num_threads": num_threads,
        "spin_us": spin_us,
        "cuda_graphs": cuda_graphs,
        "dequantize_weights": dequantize_weights,
        "tf32": tf32,
        "verify": verify,
        "copy": copy,
        "weights": None if weights is None else os.path.abspath(weights),
        "trust": os.path.abspath(trust) if isinstance(trust, str | os.PathLike) else trust,
    }
    has_path = isinstance(source, str | os.PathLike)
    program = Program(core, path, options if has_path else None, num_runners)
    if has_path:
        with _open.lock:
            _open.add(_program_key(program._absolute, options), program)
    log(INFO, "loaded %s (%s) in %.3f s", program.path, ", ".join(program), time.perf_counter() - begin)
    return program


# Open programs by file and options. The last that were unpickled stay loaded: a worker of a pool gets its program again
# with each task, and holds none in between.
_open = Shared(kept=8)


def _load_once(path: str, options: dict[str, Any]) -> Program:
    """The process's program of this file with these options; loads it if there is none."""
    with _open.lock:
        program: Program | None = _open.get(_program_key(path, options))
        if program is None:
            program = load(path, **options)
        _open.keep(program)
        return program


def _program_key(path: str, options: Mapping[str, Any]) -> Any:
    return path, file_identity(path), tuple(sorted(options.items()))


class _Methods:
    """What programs and sessions share: methods by attribute and by name, each opened at its first call."""

    def __init__(self, path: str, cores: list[_core.Method], what: str) -> None:
        self._path = path
        self._cores = {core.name: core for core in cores}
        self._what = what
        self._lock = Lock()
        self._methods: dict[str, Method] = {}
        self._lanes: dict[str | None, Lane] = {}
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
        """A method by its name; opened at its first call. Raises UnknownMethodError, also a KeyError."""
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
                self._methods[name] = Method(core, self._spec_of(name), self._path, self._lane_of(name))
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

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in self._cores if name.isidentifier())})

    def __iter__(self) -> Iterator[str]:
        return iter(self._cores)

    def __len__(self) -> int:
        return len(self._cores)

    def _spec_of(self, name: str) -> Any:
        """What the manifest says of a method; None if there is none."""
        raise NotImplementedError

    def _lane_of(self, name: str) -> Callable[[], Lane]:
        """Where the method's submitted calls wait. It does not hold the methods, which hold it."""
        key, width = self._serial(name)
        lanes, lock = self._lanes, self._lock

        def lane() -> Lane:
            if (found := lanes.get(key)) is not None:
                return found
            from untorch.runtime.submit import Lane

            with lock:
                return lanes.setdefault(key, Lane(width))

        return lane

    def _serial(self, name: str) -> tuple[str | None, int]:
        """Which calls the method's calls wait for, None: all that use buffers; and how many of them run at a time."""
        raise NotImplementedError

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

    def __init__(self, core: _core.Program, path: str, options: Mapping[str, Any] | None, num_runners: int = 1) -> None:
        super().__init__(path, core.methods(), "program")
        self._program = core
        self._absolute = os.path.abspath(path)
        self._options = dict(options) if options is not None else None  # None: loaded from memory
        self._num_runners = num_runners
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

    def _spec_of(self, name: str) -> Any:
        return self.manifest.get("methods", {}).get(name)

    def _serial(self, name: str) -> tuple[str | None, int]:
        if any(constant.get("mutated") for constant in (self._spec_of(name) or {}).get("constants", [])):
            return None, 1
        return name, self._num_runners

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as its path and the options of ``load``. A process unpickles the same file with the same options as
        one program, and does not load again what it has open. The state of mutable buffers is not pickled.
        """
        if self._closed:
            raise ClosedError(f"pickle: the program {self._path!r} is closed")
        if self._options is None:
            raise InvalidArgumentError(
                "pickle: the program was loaded from memory, and pickles as the path of its file: load it by path, or "
                "send the contents and load them there"
            )
        return _load_once, (self._absolute, self._options)

    def __copy__(self) -> Program:
        """The program itself: ``session()`` makes an independent copy of its mutable buffers."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

    def close(self) -> None:
        """Free libraries, buffers and mapped weights. Running calls finish; later ones raise ClosedError."""
        with _open.lock:
            _open.remove(self)
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

    def _repr_html_(self) -> str:
        """For notebooks: its methods, with what they take and give."""
        from html import escape

        title = f"<p><code>{escape(repr(self))}</code></p>"
        if self._closed:
            return title
        rows = ""
        for name in self._cores:
            method = self[name]
            cells = (name, method.device, ", ".join(map(str, method.inputs)), ", ".join(map(str, method.outputs)))
            rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        heads = "".join(f"<th>{head}</th>" for head in ("method", "device", "inputs", "outputs"))
        return f"{title}<table><tr>{heads}</tr>{rows}</table>"


class Session(_Methods):
    """An independent copy of a program's mutable buffers (a KV cache, a counter); made by ``Program.session``.

    Methods are called like a program's: ``session.decode(token)``. Methods that name the same buffer share it, and all
    sessions share the weights. Calls of one session are serialised; calls of different sessions run concurrently. A
    CUDA graph (``session.decode.graph(…)``) belongs to its session.
    """

    def __init__(self, program: Program, core: _core.Session) -> None:
        super().__init__(program.path, core.methods(), "session")
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

    def _spec_of(self, name: str) -> Any:
        return self._program._spec_of(name)

    def _serial(self, name: str) -> tuple[str | None, int]:
        return None, 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgumentError(
            "a Session is neither pickled nor copied: its buffers belong to this process: call fork() for a copy of "
            "its state, or pickle its program and call session() there"
        )

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
