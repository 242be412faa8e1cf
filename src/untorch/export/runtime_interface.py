"""The object of torch's runtime interface, compiled once and kept between exports.

The host's code of every package opens with the text of torch's interface.cpp, which makes the model's container: the
same text in all packages, and two thirds of what g++ then has to generate. It is compiled apart, the rest of the source
beside it, and ``ld -r`` joins the two where Inductor expects one object.

Nothing but the standard library is imported: the tests' compiler loads this file without the package.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from untorch.export.precompiled_headers import CONTAINER, drop_unused, generated_source, identity, shared_flags

__all__ = ["cache_folder", "compile_in_parts", "kept_object"]

_FOLDER_VARIABLE = "UNTORCH_CACHE"
_LIMIT = 32  # objects of 0.1 MB; the one that was not used for the longest time goes
# From a folder of torch's headers, torch/include.
_INTERFACE = "../_inductor/codegen/aoti_runtime/interface.cpp"


def cache_folder() -> Path | None:
    """Where objects are kept: ``UNTORCH_CACHE``, or untorch in the user's folder of caches. None: nowhere."""
    given = os.environ.get(_FOLDER_VARIABLE)
    if given is not None:
        return Path(given) if given else None
    with contextlib.suppress(RuntimeError):  # no home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "untorch"
    return None


def compile_in_parts(compiler: str, arguments: Sequence[str], cwd: str | None = None) -> bool:
    """Compiles the host's code as these arguments ask, with the interface's object from the cache.

    False where it has to be compiled whole: other sources, no cache, or an error, which is then the whole source's.
    """
    source, folder = generated_source(arguments), cache_folder()
    if source is None or folder is None or not source.endswith(".wrapper.cpp") or "-o" not in arguments:
        return False
    output = arguments[list(arguments).index("-o") + 1]
    parts = _split(Path(source).read_text(), _interface(arguments))
    if parts is None:
        return False
    interface, rest = parts
    own = arguments[2:] if arguments[0] == "-include" else arguments  # a precompiled header is for the rest alone
    rest_object = f"{output}.rest"
    command = [compiler, *(argument for argument in arguments if argument not in (source, output))]
    command[command.index("-o") : command.index("-o") + 1] = ["-x", "c++", "-", "-o", rest_object]
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="untorch-interface") as pool:
            kept = pool.submit(kept_object, compiler, shared_flags(own, source), interface, folder)
            _run(command, rest, cwd)
        _run([compiler, "-r", "-nostdlib", rest_object, str(kept.result()), "-o", output], "", cwd)
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        Path(rest_object).unlink(missing_ok=True)
    return True


def _run(command: Sequence[str], text: str, cwd: str | None) -> None:
    subprocess.run(command, input=text.encode(), cwd=cwd, capture_output=True, check=True)


def _interface(arguments: Sequence[str]) -> str | None:
    for argument in arguments:
        path = Path(argument.removeprefix("-I")) / _INTERFACE
        if argument.startswith("-I") and path.is_file():
            return path.read_text()
    return None


def _split(text: str, interface: str | None) -> tuple[str, str] | None:
    """The source of the interface, and the rest, which keeps its directives but the container's header.

    None where there is no interface.
    """
    if not interface or text.count(interface) != 1:
        return None
    before, after = text.split(interface)
    if any(line.strip() and not line.startswith(("//", "#include ")) for line in before.splitlines()):
        return None
    directives = re.findall(r"^#(?:.*\\\n)*.*\n?", interface, re.MULTILINE)
    if "ModelContainer" not in after:
        directives = [directive for directive in directives if directive != CONTAINER]
    return before + interface, before + "".join(directives) + after


def kept_object(compiler: str, flags: Sequence[str], text: str, folder: Path) -> Path:
    """The object, which is compiled where there is none, or where a header that it was compiled of has changed."""
    key = hashlib.sha256("\0".join([*identity(compiler, flags), *flags, text]).encode()).hexdigest()[:16]
    kept, record = folder / f"{key}.o", folder / f"{key}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{key}.lock"):
        if _is_usable(kept, record):
            os.utime(kept)
            return kept
        part, headers = folder / f"{key}.o.part", folder / f"{key}.d.part"
        try:
            _run([compiler, *flags, "-MD", "-MF", str(headers), "-c", "-x", "c++", "-", "-o", str(part)], text, "/")
            written = folder / f"{key}.json.part"
            states = {path: _state(path) for path in _prerequisites(headers.read_text())}
            written.write_text(json.dumps({"sha256": _digest(part), "headers": states}))
            record.unlink(missing_ok=True)
            part.replace(kept)
            written.replace(record)
        finally:
            part.unlink(missing_ok=True)
            headers.unlink(missing_ok=True)
    for dropped in drop_unused(folder, ".o", _LIMIT):
        dropped.with_suffix(".json").unlink(missing_ok=True)
    return kept


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _state(path: str) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_usable(kept: Path, record: Path) -> bool:
    """Whether the object is whole, and its headers are those that it was compiled of."""
    try:
        written = json.loads(record.read_text())
        states = written["headers"].items()
        return written["sha256"] == _digest(kept) and all(_state(path) == state for path, state in states)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _prerequisites(rule: str) -> list[str]:
    """The files of a rule of make's, whose spaces have backslashes. The source came from standard input."""
    words = re.findall(r"(?:\\.|[^\s\\])+", rule.partition(":")[2].replace("\\\n", " "))
    names = [re.sub(r"\\(.)", r"\1", word) for word in words]
    return [name for name in names if name not in ("-", "<stdin>")]
