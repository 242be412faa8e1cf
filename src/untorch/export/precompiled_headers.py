"""Precompiled headers of generated C++, kept between exports where ``UNTORCH_HEADERS`` names a folder.

Parsing headers takes much of the time of a small model's compile. Inductor's own precompiled headers are keyed by the
compiler's command, which names export's temporary folder. Here the key is what decides the headers' meaning: the
compiler, the flags that are not paths of one compile, and the include directives that open the file. Object files are
the same, byte by byte.

Nothing but the standard library is imported: the tests' compiler loads this file by its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = [
    "CONTAINER",
    "drop_unused",
    "generated_source",
    "headers_folder",
    "identity",
    "precompiled_header",
    "shared_flags",
    "with_precompiled_header",
]

# Of the host's code, the runtime interface alone uses it, which has an object of its own (runtime_interface.py).
CONTAINER = "#include <torch/csrc/inductor/aoti_runtime/model_container.h>\n"
_FOLDER_VARIABLE = "UNTORCH_HEADERS"
_PREFIX_MAP = "-ffile-prefix-map="
_LIMIT = 12  # precompiled headers of up to 150 MB each; the one that was not used for the longest time goes


def headers_folder() -> Path | None:
    """Where ``UNTORCH_HEADERS`` says that precompiled headers are kept; None: nowhere."""
    given = os.environ.get(_FOLDER_VARIABLE)
    return Path(given) if given else None


def generated_source(arguments: Sequence[str]) -> str | None:
    """The file of AOTInductor's that a compiler with these arguments makes an object of."""
    sources = [item for item in arguments if item.endswith((".wrapper.cpp", ".kernel.cpp"))]
    return sources[0] if len(sources) == 1 and "-c" in arguments else None


def with_precompiled_header(compiler: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of g++, which includes a precompiled header first where there is one for its generated source."""
    source, folder = generated_source(arguments), headers_folder()
    if source is None or folder is None or "-include" in arguments:
        return list(arguments)
    header = precompiled_header(compiler, arguments, source, folder)
    return list(arguments) if header is None else ["-include", str(header), *arguments]


def precompiled_header(compiler: str, arguments: Sequence[str], source: str, folder: Path) -> Path | None:
    """The header to include first where ``source`` is compiled by g++ with these arguments.

    None for headers and flags that are seen for the first time, as one file does not pay; and where the folder cannot
    be written, or the headers do not compile.
    """
    directives, flags = _includes(source), shared_flags(arguments, source)
    if not directives:
        return None
    key = hashlib.sha256("\0".join([*identity(compiler, flags), *flags, *directives]).encode()).hexdigest()[:16]
    header = folder / f"{key}.h"
    output = folder / f"{key}.h.gch"
    with contextlib.suppress(OSError):
        if output.exists():
            os.utime(output)
            return header
        folder.mkdir(parents=True, exist_ok=True)
        if not header.exists():
            part = folder / f"{key}.h.{os.getpid()}"
            part.write_text("".join(directives))
            part.replace(header)
            return None
        with _locked(folder / f"{key}.h.lock") as is_first:
            if not is_first or (not output.exists() and not _precompile(compiler, flags, header, output)):
                return None
        drop_unused(folder, ".gch", _LIMIT)
        return header
    return None


def _includes(source: str) -> list[str]:
    """The include directives before the first line of code, without the container's."""
    found = []
    with open(source) as file:
        for line in file:
            if line.startswith("#include <"):
                found += [line] if line != CONTAINER else []
            elif line.strip() and not line.startswith("//"):
                break
    return found


def shared_flags(arguments: Sequence[str], source: str) -> list[str]:
    """The arguments without the source, the object file, and other names for folders that no header is in."""
    skipped = {source, "-c"}
    if "-o" in arguments:
        skipped |= {"-o", arguments[list(arguments).index("-o") + 1]}
    folders = tuple(f"{item[2:]}/" for item in arguments if item.startswith("-I"))

    def is_shared(item: str) -> bool:
        if not item.startswith(_PREFIX_MAP):
            return item not in skipped
        old = item.removeprefix(_PREFIX_MAP).rpartition("=")[0]
        return any(folder.startswith(old) for folder in folders)

    return [item for item in arguments if is_shared(item)]


def identity(compiler: str, flags: Sequence[str]) -> list[str]:
    """What tells that the compiler or headers changed, which g++ does not look at: where they are, and times."""
    folders = [flag[2:] for flag in flags if flag.startswith("-I") and os.path.exists(flag[2:])]
    places = [os.path.realpath(shutil.which(compiler) or compiler), *folders]
    return [*places, *(str(os.stat(place).st_mtime_ns) for place in places)]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether no other process holds the lock."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _precompile(compiler: str, flags: Sequence[str], header: Path, output: Path) -> bool:
    part = Path(f"{output}.part")
    command = [compiler, *flags, "-w", "-x", "c++-header", str(header), "-o", str(part)]
    if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode:
        part.unlink(missing_ok=True)
        return False
    part.replace(output)
    return True


def drop_unused(folder: Path, suffix: str, limit: int) -> list[Path]:
    """Removes all but the ``limit`` files that were used last, and returns them.

    g++ includes a header that is not precompiled any more as it is.
    """
    kept = sorted(folder.glob(f"*{suffix}"), key=lambda path: path.stat().st_mtime_ns)
    for path in kept[:-limit]:
        path.unlink(missing_ok=True)
    return kept[:-limit]
