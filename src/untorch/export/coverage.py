"""Does the runtime have everything that a compiled model calls? All gaps at once, each with the user's source line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from untorch.archive import ArchiveReader
from untorch.export.errors import UnsupportedOperatorsError
from untorch.export.library import find_runtime_library
from untorch.ops.packed_linear import C_SHIM
from untorch.runtime.elf import ElfFile, parse_elf, read_elf
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "MissingOperator",
    "check",
    "find_missing",
    "needed_symbols",
    "origins_in_wrapper",
    "predict_missing",
    "source_line",
]

_SOURCE_NODES = re.compile(r"Source Nodes: \[([^\]]*)\]")
_SHIM_CALL = re.compile(r"\b((?:aoti_torch|torch)_\w+)\(")
_PROXY_CALL = re.compile(r"aoti_torch_proxy_executor_call_function\(\s*proxy_executor\s*,\s*(\d+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(.*))?')
_DRIVER_FUNCTION = re.compile(r"cu[A-Z]\w*")
_RUNTIME_FUNCTION = re.compile(r"cuda[A-Z]\w*")
_LIBRARY_CODE = ("/torch/", "/site-packages/", "/dist-packages/", "<")
# A declaration may give a function another symbol; calls use the function's name.
_SYMBOLS = dict(re.findall(r'(\w+)\([^)]*\) __asm__\("(\w+)"\)', C_SHIM))


@dataclass(frozen=True)
class MissingOperator:
    """One thing that the runtime lacks.

    ``kind`` is "shim" (a C function), "kernel" (an operator without one), or "cuda kernel" (likewise, in a model for
    CUDA, where Python kernels do not serve).
    """

    kind: str
    name: str
    sources: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" ({'; '.join(self.sources)})" if self.sources else ""
        if self.kind == "kernel":
            todo = f'register a kernel with untorch.register_kernel("{self.name}", fn), or change the model'
            return f"operator {self.name}{where}: it has no C shim and no registered kernel; {todo}"
        if self.kind == "cuda kernel":
            return (
                f"operator {self.name}{where}: it has no C shim, and Python kernels work on the CPU's memory only; "
                f"change the model, or export it for the CPU"
            )
        return f"C function {self.name}{where}: libuntorch.so does not have it; change the model, or update untorch"


def needed_symbols(library: ElfFile) -> list[str]:
    """The functions that a model library takes from the runtime: undefined, not weak, and of no system library.

    System libraries version their symbols, and libuntorch.so and libtorch do not. NVIDIA's driver does not either: its
    functions are known by their prefix. Those of the CUDA runtime are the runtime's to give.
    """
    driver = "libcuda.so.1" in library.needed
    return sorted(
        symbol.name
        for symbol in library.undefined()
        if not symbol.weak
        and symbol.version_file in (None, "libuntorch.so")
        and not (driver and _DRIVER_FUNCTION.fullmatch(symbol.name))
    )


def _name_in_runtime(symbol: str) -> str:
    """Under which name libuntorch.so has a function: the loader renames those of the CUDA runtime (cudaMalloc)."""
    return f"ut{symbol[2:]}" if _RUNTIME_FUNCTION.fullmatch(symbol) else symbol


def origins_in_wrapper(source: str) -> tuple[dict[str, set[str]], dict[int, set[str]]]:
    """From the generated wrapper: C function → names of graph nodes, and index of an external call → names.

    Inductor writes the source nodes of each call as a comment above it.
    """
    shims: dict[str, set[str]] = {}
    externals: dict[int, set[str]] = {}
    names: set[str] = set()
    for line in source.splitlines():
        if match := _SOURCE_NODES.search(line):
            names = {name.strip() for name in match[1].split(",") if name.strip()}
        elif match := _PROXY_CALL.search(line):
            externals.setdefault(int(match[1]), set()).update(names)
        else:
            for name in _SHIM_CALL.findall(line):
                shims.setdefault(_SYMBOLS.get(name, name), set()).update(names)
    return shims, externals


def source_line(node: fx.Node) -> str | None:
    """The innermost line of the user's own code that made the node, as "file:line: text"."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    frames = _FRAME.findall(trace)
    own = [f for f in frames if not any(part in f[0] for part in _LIBRARY_CODE)] or frames
    if not own:
        return None
    path, line, _, text = own[-1]
    return f"{path}:{line}" + (f": {text.strip()}" if text else "")


def find_missing(
    symbols: Iterable[str],
    extern_nodes: str | None,
    available: frozenset[str],
    *,
    wrapper: str | None = None,
    nodes: Mapping[str, fx.Node] | None = None,
    device: str = "cpu",
) -> list[MissingOperator]:
    """What of ``symbols`` and of the operators in the extern nodes JSON the runtime does not have on ``device``."""
    shims, externals = origins_in_wrapper(wrapper) if wrapper else ({}, {})

    def sources(names: Iterable[str]) -> tuple[str, ...]:
        lines = (source_line(nodes[name]) for name in sorted(names) if nodes and name in nodes)
        return tuple(dict.fromkeys(line for line in lines if line))

    missing = [
        MissingOperator("shim", name, sources(shims.get(name, ())))
        for name in symbols
        if _name_in_runtime(name) not in available
    ]
    kernels: dict[str, set[str]] = {}
    for i, node in enumerate(_parse_extern_nodes(extern_nodes)):
        target = str(node.get("target", ""))
        if device != "cpu" or not _has_kernel(target):
            kernels.setdefault(target, set()).update(externals.get(i, ()))
    kind = "kernel" if device == "cpu" else "cuda kernel"
    return missing + [MissingOperator(kind, name, sources(names)) for name, names in kernels.items()]


def raise_if_missing(missing: list[MissingOperator], what: str) -> None:
    """Raises UnsupportedOperatorsError that lists everything in ``missing``."""
    if missing:
        count = f"{len(missing)} operator{'s' if len(missing) > 1 else ''}"
        lines = "".join(f"\n  {entry}" for entry in missing)
        raise UnsupportedOperatorsError(f"{what}: the runtime lacks {count}:{lines}", tuple(missing))


def check(subject: torch.export.ExportedProgram | str | Path) -> None:
    """Checks an exported program, a compiled .so or a .pt2 file against the runtime.

    For a program this is a forecast from its operators; export() checks again what was really compiled.
    Raises UnsupportedOperatorsError with everything that is missing.
    """
    if isinstance(subject, torch.export.ExportedProgram):
        raise_if_missing(predict_missing(subject), "the exported program")
        return
    if not isinstance(subject, str | Path):
        raise InvalidArgumentError(
            f"check: expected an ExportedProgram or the path of a .so or .pt2 file, got {type(subject).__name__}"
        )
    path = Path(subject)
    available = read_elf(find_runtime_library()).exported()
    if path.suffix != ".pt2":
        raise_if_missing(find_missing(needed_symbols(read_elf(path)), None, available), str(path))
        return
    missing: list[MissingOperator] = []
    with ArchiveReader(path) as archive:
        for entry in archive:
            if entry.name.startswith("data/aotinductor/") and entry.name.endswith(".so"):
                beside = entry.name.removesuffix(".so") + ".json"
                nodes = archive.read(beside).decode() if beside in archive.entries else None
                library = parse_elf(archive.read(entry.name), f"{path}:{entry.name}")
                device = "cuda" if "libcuda.so.1" in library.needed else "cpu"
                missing += find_missing(needed_symbols(library), nodes, available, device=device)
    raise_if_missing(list(dict.fromkeys(missing)), str(path))


def predict_missing(program: torch.export.ExportedProgram) -> list[MissingOperator]:
    """A forecast: operators of the graph that Inductor does not compile itself and that the runtime lacks.

    Operators that Inductor decomposes are taken as served, so this can miss a gap but names no false one.
    """
    import torch._inductor.lowering as lowering
    from torch._inductor.decomposition import select_decomp_table
    from torchgen.aoti.fallback_ops import inductor_fallback_ops  # type: ignore[import-untyped]

    available = read_elf(find_runtime_library()).exported()
    table: Any = select_decomp_table()
    found: dict[tuple[str, str], list[str]] = {}
    for node in program.graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        served = target in lowering.lowerings and target not in lowering.fallbacks
        if served or target in table or composite or target.namespace == "untorch":
            continue
        name, overload = target._schema.name.split("::")[-1], target._overloadname
        suffix = "" if overload == "default" else f"_{overload}"
        shim = f"aoti_torch_{_device_type(node)}_{name}{suffix}"
        if target.namespace == "aten" and f"aten.{name}.{overload}".removesuffix(".default") in {
            key.removesuffix(".default") for key in inductor_fallback_ops
        }:
            key = ("shim", shim) if shim not in available else None
        else:
            operator = target._schema.name + ("" if overload == "default" else f".{overload}")
            key = ("kernel", operator) if not _has_kernel(operator) else None
        if key is not None:
            line = source_line(node)
            found.setdefault(key, []).extend([line] if line else [])
    return [MissingOperator(kind, name, tuple(dict.fromkeys(lines))) for (kind, name), lines in found.items()]


def _device_type(node: fx.Node) -> str:
    values = pytree.tree_leaves([node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]])
    types = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return "cuda" if "cuda" in types else "cpu"


def _parse_extern_nodes(text: str | None) -> list[dict[str, Any]]:
    if text is None:
        return []
    nodes = json.loads(text).get("nodes", [])
    return [entry.get("node", {}) for entry in nodes]


def _has_kernel(target: str) -> bool:
    try:
        from untorch.runtime.registry import find_kernel
    except ModuleNotFoundError:
        return False
    try:
        find_kernel(target)
    except UnsupportedError:
        return False
    return True
