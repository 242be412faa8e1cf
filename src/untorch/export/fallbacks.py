"""Every operator that a model calls instead of compiling it: what serves it, and what to do where nothing does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from untorch.archive import ArchiveReader
from untorch.export.compile import generate_code
from untorch.export.coverage import (
    MissingOperator,
    find_missing,
    function_calls,
    kernel_targets,
    raise_if_missing,
    sources_of,
)
from untorch.export.library import runtime_functions
from untorch.export.method import Method
from untorch.export.move import Movers
from untorch.export.options import ExportOptions
from untorch.export.target import CpuTarget, Target, resolve_targets
from untorch.runtime.coverage import needed_functions, operator_of
from untorch.runtime.elf import ElfFile, parse_elf, read_elf
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["Fallback", "check", "forecast_fallbacks", "list_fallbacks", "merge_fallbacks"]


@dataclass(frozen=True)
class Fallback:
    """One operator that the generated code calls.

    ``kind`` is "function", a C function of the runtime, or "kernel", a Python kernel. ``operator`` is the function
    without its prefix, or the kernel's operator; ``sources`` are the user's lines. ``todo`` is empty if it is served.
    """

    operator: str
    kind: str
    name: str
    served: bool
    sources: tuple[str, ...] = ()
    todo: str = ""

    def missing(self, device: str) -> MissingOperator:
        """The entry of an error that lists it."""
        kernel = "kernel" if device == "cpu" else "cuda kernel"
        return MissingOperator("shim" if self.kind == "function" else kernel, self.name, self.sources)

    def __str__(self) -> str:
        where = f" ({'; '.join(self.sources)})" if self.sources else ""
        return f"{self.operator}: {self.kind} {self.name}{where}: {self.todo or 'served'}"


def list_fallbacks(
    functions: Iterable[str],
    extern_nodes: str | None,
    *,
    wrapper: str | None = None,
    nodes: Mapping[str, fx.Node] | None = None,
    device: str = "cpu",
) -> list[Fallback]:
    """The operators among the C ``functions`` that a library needs and in its extern nodes JSON, for ``device``.

    Functions that are no operators (allocating, asking for sizes) are left out. ``wrapper``, the generated code, and
    the graph's ``nodes`` by name bring the source lines.
    """
    available = runtime_functions()
    functions = [name for name in sorted(set(functions)) if operator_of(name) is not None]
    found = find_missing(functions, extern_nodes, available, wrapper=wrapper, nodes=nodes, device=device)
    missing = {(item.kind == "shim", item.name): item for item in found}
    result = []
    for name, lines in sources_of(functions, kernel_targets(extern_nodes), wrapper, nodes):
        operator = operator_of(name)
        item = missing.get((operator is not None, name))
        kind = "kernel" if operator is None else "function"
        todo = item.todo if item is not None else ""
        result.append(Fallback(operator or name, kind, name, item is None, lines, todo))
    return result


def forecast_fallbacks(
    program: torch.export.ExportedProgram, options: ExportOptions | None = None, target: Target | None = None
) -> list[Fallback]:
    """What ``export`` of this program for ``target`` (default: this CPU) would call: its code is generated only.

    Kernels for a GPU are compiled, as the choice between them and a C function may depend on their speed. Raises what
    ``export`` raises before compiling.
    """
    method = Method("forward", program, options=options or ExportOptions(), target=target or CpuTarget())
    with tempfile.TemporaryDirectory(prefix="untorch-") as folder:
        code = generate_code(Movers().move(method), Path(folder))
    return list_fallbacks(
        function_calls(code.wrapper), code.extern_nodes, wrapper=code.wrapper, nodes=code.nodes,
        device=method.target.device,
    )  # fmt: skip


def check(
    subject: torch.export.ExportedProgram | str | Path, device: str = "cpu", arch: str | Sequence[str] | None = None
) -> list[Fallback]:
    """Every operator that an exported program, a compiled .so or a .pt2 file calls, if the runtime serves them all.

    For a program, ``device`` and ``arch`` say for which it would be exported, with the default options. A file brings
    its own.
    Raises UnsupportedOperatorsError with everything that is missing, and for a program what ``export`` raises.
    """
    if isinstance(subject, torch.export.ExportedProgram):
        found = merge_fallbacks(forecast_fallbacks(subject, target=target) for target in resolve_targets(device, arch))
        raise_if_missing([item.missing(device) for item in found if not item.served], "the exported program")
        return found
    if not isinstance(subject, str | Path):
        raise InvalidArgumentError(
            f"check: expected an ExportedProgram or the path of a .so or .pt2 file, got {type(subject).__name__}"
        )
    path = Path(subject)
    libraries = [(read_elf(path), None)] if path.suffix != ".pt2" else _libraries(path)
    available = runtime_functions()
    missing: list[MissingOperator] = []
    result: list[Fallback] = []
    for library, extern_nodes in libraries:
        device = "cuda" if "libcuda.so.1" in library.needed else "cpu"
        functions = needed_functions(library)
        missing += find_missing(functions, extern_nodes, available, device=device)
        result += list_fallbacks(functions, extern_nodes, device=device)
    raise_if_missing(list(dict.fromkeys(missing)), str(path))
    return list(dict.fromkeys(result))


def merge_fallbacks(found: Iterable[list[Fallback]]) -> list[Fallback]:
    """What code for several architectures calls."""
    return list(dict.fromkeys(item for items in found for item in items))


def _libraries(path: Path) -> list[tuple[ElfFile, str | None]]:
    """The model libraries of an archive, each with its extern nodes JSON."""
    found = []
    with ArchiveReader(path) as archive:
        for entry in archive:
            if entry.name.startswith("data/aotinductor/") and entry.name.endswith(".so"):
                beside = entry.name.removesuffix(".so") + ".json"
                nodes = archive.read(beside).decode() if beside in archive.entries else None
                found.append((parse_elf(archive.read(entry.name), f"{path}:{entry.name}"), nodes))
    return found
