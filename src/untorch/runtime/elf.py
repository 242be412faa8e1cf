"""What a shared library needs and gives: machine, DT_NEEDED, symbols and their versions, read by the native reader."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from untorch import _core
from untorch.runtime.errors import InvalidFileError

__all__ = ["ElfFile", "Symbol", "name_for_models", "parse_elf", "read_elf"]

_RUNTIME_FUNCTION = re.compile(r"^utda(?=[A-Z])")


@dataclass(frozen=True)
class Symbol:
    """One dynamic symbol. ``version`` and ``version_file`` are set for versioned undefined symbols."""

    name: str
    defined: bool
    weak: bool
    version: str | None = None
    version_file: str | None = None


@dataclass(frozen=True)
class ElfFile:
    """The dynamic view of a 64-bit little-endian shared library."""

    machine: str
    soname: str | None
    needed: tuple[str, ...]
    symbols: tuple[Symbol, ...]
    version_needs: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def exported(self) -> frozenset[str]:
        """Names that other libraries can bind to."""
        return frozenset(s.name for s in self.symbols if s.defined)

    def undefined(self) -> tuple[Symbol, ...]:
        """Symbols that some other library has to give; weak ones included."""
        return tuple(s for s in self.symbols if not s.defined)


def read_elf(path: str | Path) -> ElfFile:
    """The dynamic view of the file ``path``. Raises InvalidFileError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidFileError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_elf(data, str(path))


def parse_elf(data: bytes | memoryview, name: str = "<memory>", max_symbols: int = 1 << 24) -> ElfFile:
    """The dynamic view of a library's bytes; ``name`` appears in errors.

    Raises InvalidFileError, for more symbols than ``max_symbols`` as well.
    """
    machine, soname, needed, symbols, versions = _core.read_elf(data, name, max_symbols)
    needs: dict[str, list[str]] = {}
    for file, version in versions:
        needs.setdefault(file, []).append(version)
    found = tuple(Symbol(*symbol) for symbol in symbols)
    return ElfFile(machine, soname, tuple(needed), found, {file: tuple(names) for file, names in needs.items()})


def name_for_models(symbol: str) -> str:
    """How model libraries call a function of libuntorch.so: the loader finds cudaMalloc under the name utdaMalloc."""
    return _RUNTIME_FUNCTION.sub("cuda", symbol)
