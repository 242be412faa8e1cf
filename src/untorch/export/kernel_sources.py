"""The Python of a method's Triton kernels, with calls of them on random tensors, which is timed on a GPU.

Inductor writes it for every method and runs it where there is a GPU. A file that was made with ``keep_sources`` has it,
so that ``untorch tune FILE`` can run it later, on another machine, with the same version of torch.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from untorch.archive import ArchiveReader
from untorch.export.errors import CompileError
from untorch.export.kernel_choice import Choices, read_tuning, recording, write_tuning
from untorch.export.patches import kernel_sources
from untorch.runtime.errors import UnsupportedError

__all__ = ["SUFFIX", "keeping_sources", "tune_file"]

SUFFIX = ".kernels.py"
# Paths of the build machine do not belong into the file.
_PATHS = re.compile(r"^# kernel path:.*\n", re.MULTILINE)


@contextlib.contextmanager
def keeping_sources() -> Iterator[list[str]]:
    """Fills what it gives with the source of each graph that Inductor compiles meanwhile."""
    found: list[str] = []

    def keep(definitions: str, calls: str) -> None:
        found.append(_PATHS.sub("", f"{definitions}\nasync_compile.wait(globals())\ndel async_compile\n{calls}\n"))

    with kernel_sources(keep):
        yield found


def tune_file(path: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Times the kernels of a .pt2 file on this machine's GPU, and writes the fastest configurations to ``output``.

    Runs Python code that is in the file: for files that you trust.

    Raises:
        InvalidFileError: The file is damaged, or none of untorch's.
        UnsupportedError: It has no sources, was made by another version of torch or for another GPU, or there is none.
        InvalidArgumentError: ``output`` is a file of another kind.
        CompileError: The kernels cannot be compiled or run.
    """
    import torch

    if Path(output).exists():
        read_tuning(output)
    name = os.fspath(path)
    with ArchiveReader(path) as archive:
        manifest = archive.manifest() if archive.has_manifest() else {}
        architectures = {
            str(Path(code["library"]).parent): code["gpu_architecture"]
            for method in manifest.get("methods", {}).values()
            for code in (method, *method.get("variants", ()))
            if code.get("gpu_architecture")
        }
        sources = {entry.name: archive.read(entry.name).decode() for entry in archive if entry.name.endswith(SUFFIX)}
    if not architectures:
        raise UnsupportedError(f"tune: {name!r} has no kernels for a GPU")
    if not sources:
        raise UnsupportedError(
            f"tune: {name!r} has no sources of its kernels: export it with keep_sources=True, or give SCRIPT:FUNCTION"
        )
    made_by = manifest.get("torch_version", "an unknown version")
    if _version(made_by) != _version(torch.__version__):
        raise UnsupportedError(
            f"tune: the kernels' sources in {name!r} are for torch {made_by}, which made them, and this is "
            f"{torch.__version__}: install that version, or give SCRIPT:FUNCTION"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError("tune: torch finds no GPU to time kernels on")
    here = "sm_{}{}".format(*torch.cuda.get_device_capability())
    fitting = [text for file, text in sources.items() if architectures.get(str(Path(file).parent)) == here]
    if not fitting:
        raise UnsupportedError(
            f"tune: {name!r} has kernels for {', '.join(sorted(set(architectures.values())))}, and this GPU is {here}"
        )
    choices: Choices = {}
    for text in fitting:
        with recording(here, saves=False) as found:
            try:
                exec(compile(text, f"<kernels of {name}>", "exec"), {})
            except Exception as error:
                raise CompileError(f"tune: the kernels of {name!r} cannot be timed: {error}") from error
        choices.setdefault(here, {}).update(found[here])
    write_tuning(output, choices)


def _version(text: str) -> str:
    return text.partition("+")[0]
