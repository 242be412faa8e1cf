"""Reads what a shared library needs and gives: machine, DT_NEEDED, symbols and their versions. Pure Python, no trust.

Only what the dynamic linker itself uses is read (program headers and the dynamic section), so a stripped library is
fine. Every offset is checked against the file before it is used. Layouts: System V gABI chapters 4 and 5, and the
GNU symbol versioning of the Linux Standard Base.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from untorch.runtime.errors import InvalidFileError

__all__ = ["ElfFile", "Symbol", "name_for_models", "parse_elf", "read_elf"]

_RUNTIME_FUNCTION = re.compile(r"^utda(?=[A-Z])")

MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 3: "i386", 40: "arm", 21: "ppc64", 22: "s390x"}

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 1, 4, 5, 6, 10, 11, 14
_DT_GNU_HASH, _DT_VERSYM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF
_MAX_DYNAMIC_ENTRIES = 65536
_MAX_SYMBOLS = 1 << 22
_MAX_CHAIN = 65536

_Locate = Callable[[int, str], int]
_Name = Callable[[int, str], str]


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


class _Reader:
    def __init__(self, data: bytes | memoryview, name: str) -> None:
        self.data = memoryview(data)
        self.name = name

    def fail(self, what: str) -> InvalidFileError:
        return InvalidFileError(f"{self.name}: not a usable shared library: {what}")

    def unpack(self, layout: str, offset: int, what: str) -> tuple[int, ...]:
        size = struct.calcsize(layout)
        if offset < 0 or offset + size > len(self.data):
            raise self.fail(f"{what} at offset {offset} lies outside of the file ({len(self.data)} bytes)")
        return struct.unpack_from(layout, self.data, offset)


def read_elf(path: str | Path) -> ElfFile:
    """The dynamic view of the file ``path``. Raises InvalidFileError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidFileError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_elf(data, str(path))


def name_for_models(symbol: str) -> str:
    """How model libraries call a function of libuntorch.so: the loader finds cudaMalloc under the name utdaMalloc."""
    return _RUNTIME_FUNCTION.sub("cuda", symbol)


def parse_elf(data: bytes | memoryview, name: str = "<memory>") -> ElfFile:
    """The dynamic view of a library's bytes; ``name`` appears in errors. Raises InvalidFileError."""
    r = _Reader(data, name)
    if len(r.data) < 64 or bytes(r.data[:4]) != b"\x7fELF":
        raise r.fail("no ELF header")
    if r.data[4] != 2 or r.data[5] != 1:
        raise r.fail("expected a 64-bit little-endian file")
    kind, machine = r.unpack("<HH", 16, "ELF header")
    if kind != 3:
        raise r.fail(f"expected a shared object (ELF type 3), got type {kind}")
    (phoff,) = r.unpack("<Q", 32, "ELF header")
    phentsize, phnum = r.unpack("<HH", 54, "ELF header")
    if phentsize != 56:
        raise r.fail(f"program header size {phentsize}, expected 56")
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for i in range(phnum):
        p_type, _, offset, vaddr, _, filesz, _, _ = r.unpack("<IIQQQQQQ", phoff + i * 56, "program header")
        if p_type in (_PT_LOAD, _PT_DYNAMIC) and offset + filesz > len(r.data):
            raise r.fail(f"segment {i} ends behind the file")
        if p_type == _PT_LOAD:
            loads.append((vaddr, offset, filesz))
        elif p_type == _PT_DYNAMIC:
            dynamic = (offset, filesz)
    if dynamic is None:
        raise r.fail("no dynamic section")

    def to_offset(address: int, what: str) -> int:
        for vaddr, offset, size in loads:
            if vaddr <= address < vaddr + size:
                return offset + (address - vaddr)
        raise r.fail(f"{what} has the address {address:#x}, which no segment of the file holds")

    tags: dict[int, int] = {}
    needed_offsets: list[int] = []
    for i in range(min(dynamic[1] // 16, _MAX_DYNAMIC_ENTRIES)):
        tag, value = r.unpack("<QQ", dynamic[0] + i * 16, "dynamic entry")
        if tag == 0:
            break
        if tag == _DT_NEEDED:
            needed_offsets.append(value)
        tags.setdefault(tag, value)
    for tag, what in ((_DT_STRTAB, "string table"), (_DT_SYMTAB, "symbol table"), (_DT_STRSZ, "string table size")):
        if tag not in tags:
            raise r.fail(f"the dynamic section has no {what}")
    if tags.get(_DT_SYMENT, 24) != 24:
        raise r.fail(f"symbol size {tags[_DT_SYMENT]}, expected 24")
    strings_at = to_offset(tags[_DT_STRTAB], "the string table")
    strings_size = tags[_DT_STRSZ]
    if strings_at + strings_size > len(r.data):
        raise r.fail("the string table ends behind the file")
    strings = bytes(r.data[strings_at : strings_at + strings_size])

    def string(offset: int, what: str) -> str:
        end = strings.find(b"\0", offset) if offset < strings_size else -1
        if end < 0:
            raise r.fail(f"{what} lies outside of the string table")
        return strings[offset:end].decode("utf-8", "backslashreplace")

    versions, needs = _version_needs(r, tags, to_offset, string)
    versym_at = to_offset(tags[_DT_VERSYM], "the version table") if _DT_VERSYM in tags else None
    symtab_at = to_offset(tags[_DT_SYMTAB], "the symbol table")
    symbols: list[Symbol] = []
    for i in range(1, _symbol_count(r, tags, to_offset)):
        st_name, info, _, shndx, _, _ = r.unpack("<IBBHQQ", symtab_at + 24 * i, "symbol")
        if info >> 4 == 0 or st_name == 0:
            continue
        version, version_file = None, None
        if versym_at is not None and shndx == 0:
            (index,) = r.unpack("<H", versym_at + 2 * i, "symbol version")
            version_file, version = versions.get(index & 0x7FFF, (None, None))
        symbols.append(Symbol(string(st_name, "a symbol's name"), shndx != 0, info >> 4 == 2, version, version_file))
    return ElfFile(
        machine=MACHINES.get(machine, f"machine-{machine}"),
        soname=string(tags[_DT_SONAME], "the soname") if _DT_SONAME in tags else None,
        needed=tuple(string(offset, "a needed library's name") for offset in needed_offsets),
        symbols=tuple(symbols),
        version_needs=needs,
    )


def _version_needs(
    r: _Reader, tags: dict[int, int], to_offset: _Locate, string: _Name
) -> tuple[dict[int, tuple[str, str]], dict[str, tuple[str, ...]]]:
    versions: dict[int, tuple[str, str]] = {}
    needs: dict[str, tuple[str, ...]] = {}
    if _DT_VERNEED not in tags:
        return versions, needs
    at = to_offset(tags[_DT_VERNEED], "the version needs")
    for _ in range(min(tags.get(_DT_VERNEEDNUM, 0), _MAX_CHAIN)):
        _, count, file, aux, following = r.unpack("<HHIII", at, "version need")
        file_name = string(file, "a version need's file")
        names: list[str] = []
        aux_at = at + aux
        for _ in range(count):
            _, _, other, name, next_aux = r.unpack("<IHHII", aux_at, "version need entry")
            names.append(string(name, "a version's name"))
            versions[other & 0x7FFF] = (file_name, names[-1])
            if next_aux == 0:
                break
            aux_at += next_aux
        needs[file_name] = needs.get(file_name, ()) + tuple(names)
        if following == 0:
            break
        at += following
    return versions, needs


def _symbol_count(r: _Reader, tags: dict[int, int], to_offset: _Locate) -> int:
    """The symbol table has no length of its own: the hash tables tell it."""
    if _DT_HASH in tags:
        _, count = r.unpack("<II", to_offset(tags[_DT_HASH], "the hash table"), "hash table")
        if count > _MAX_SYMBOLS:
            raise r.fail(f"{count} symbols are more than the limit of {_MAX_SYMBOLS}")
        return count
    if _DT_GNU_HASH not in tags:
        raise r.fail("the dynamic section has no hash table")
    at = to_offset(tags[_DT_GNU_HASH], "the hash table")
    buckets, first, bloom, _ = r.unpack("<IIII", at, "hash table")
    if buckets > _MAX_SYMBOLS or first > _MAX_SYMBOLS or bloom > _MAX_SYMBOLS:
        raise r.fail("the hash table's sizes are out of range")
    buckets_at = at + 16 + 8 * bloom
    heads = r.unpack(f"<{buckets}I", buckets_at, "hash buckets")
    last = max(heads, default=0)
    if last < first:
        return first
    chains_at = buckets_at + 4 * buckets
    while True:
        (value,) = r.unpack("<I", chains_at + 4 * (last - first), "hash chain")
        last += 1
        if value & 1:
            return last
        if last > _MAX_SYMBOLS:
            raise r.fail(f"more than {_MAX_SYMBOLS} symbols")
