"""Link options for model libraries that load with glibc 2.28 and the libstdc++ of GCC 8.

A library that is linked on a newer system asks for symbol versions that those do not have, and asks libc.so.6 for what
is in libpthread.so.0 there. The linker wraps these names by the functions in portable/manylinux_2_28.cpp, and finds
older ones in stand-ins for the libraries that have them, as in the project's own wheels. The object of that file is
kept between exports.
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from untorch.export.runtime_interface import cache_folder, kept_object
from untorch.runtime.log import INFO, log

__all__ = ["is_library_link", "portable_options"]

_FOLDER = Path(__file__).with_name("portable")
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-w")
_STAND_INS = ("libdl.so.2", "libpthread.so.0")


def is_library_link(arguments: Sequence[str]) -> bool:
    """Whether a compiler with these arguments links a model's library."""
    return "-shared" in arguments and "-c" not in arguments and any(item.endswith(".wrapper.so") for item in arguments)


@contextlib.contextmanager
def portable_options(compiler: str) -> Iterator[list[str]]:
    """The options to append to a link command; none where the names cannot be wrapped."""
    with tempfile.TemporaryDirectory(prefix="untorch-") as made:
        options: list[str] = []
        if platform.libc_ver()[0] == "glibc":
            try:
                options = _options(compiler, Path(made))
            except (OSError, subprocess.CalledProcessError) as error:
                log(INFO, "the library is for this system's glibc and newer ones: %s", error)
        yield options


def _options(compiler: str, folder: Path) -> list[str]:
    names = (_FOLDER / "manylinux_2_28.txt").read_text().split()
    stand_ins = [str(_stand_in(compiler, name, folder)) for name in _STAND_INS]
    return [
        str(_wrappers(compiler, folder)),
        *(f"-Wl,--wrap={name}" for name in names),
        "-Wl,--gc-sections",  # wrappers that are not called, and the names that they ask for
        *("-Wl,--push-state,--as-needed", *stand_ins, "-Wl,--pop-state"),
    ]


def _wrappers(compiler: str, folder: Path) -> Path:
    """The object with the wrappers, in the cache where that can be written."""
    source = (_FOLDER / "manylinux_2_28.cpp").read_text()
    if (cache := cache_folder()) is not None:
        with contextlib.suppress(OSError):
            return kept_object(compiler, _FLAGS, source, cache)
    return kept_object(compiler, _FLAGS, source, folder)


def _stand_in(compiler: str, name: str, folder: Path) -> Path:
    """A library with the names that this one has in glibc 2.28, for the linker alone."""
    define = f"-DUNTORCH_{name.replace('.', '_')}"
    options = ["-x", "c", "-shared", "-fPIC", "-nostdlib", define, f"-Wl,-soname,{name}"]
    script = f"-Wl,--version-script={_FOLDER / 'libraries.map'}"
    command = [compiler, *options, script, str(_FOLDER / "libraries.c"), "-o", str(folder / name)]
    subprocess.run(command, check=True, capture_output=True)
    return folder / name
