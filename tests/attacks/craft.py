"""Builds zip archives, manifests and ELF images that may lie about anything. Standard library only."""

from __future__ import annotations

import copy
import hashlib
import json
import pathlib
import platform
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END64, LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"


@dataclass
class Lie:
    """One entry. Fields that are None are told truthfully."""

    name: str | bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0x800
    crc: int | None = None
    size: int | None = None
    packed: int | None = None
    offset: int | None = None
    local_name: str | bytes | None = None
    local_magic: bytes = LOCAL
    extra: bytes = b""
    central_magic: bytes = CENTRAL
    name_length: int | None = None
    align: int = 64


def _raw(name: str | bytes) -> bytes:
    return name.encode() if isinstance(name, str) else name


@dataclass
class Directory:
    """Lies of the end record."""

    entries: int | None = None
    size: int | None = None
    offset: int | None = None
    comment: bytes = b""
    comment_length: int | None = None
    zip64: dict[str, int] | None = None  # "at", "entries", "size", "offset": wide end record and locator
    tail: bytes = b""


def zip_bytes(entries: Sequence[Lie], directory: Directory | None = None) -> bytes:
    """The archive's bytes."""
    d = directory or Directory()
    out = bytearray()
    central = bytearray()
    for e in entries:
        at = len(out)
        name, local = _raw(e.name), _raw(e.name if e.local_name is None else e.local_name)
        crc = zlib.crc32(e.data) if e.crc is None else e.crc
        size = len(e.data) if e.size is None else e.size
        packed = len(e.data) if e.packed is None else e.packed
        padding = -(at + 30 + len(local) + 4) % e.align
        extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
        out += e.local_magic + struct.pack(
            "<HHHHHIIIHH",
            20,
            e.flags,
            e.method,
            0,
            0x21,
            crc,
            packed & 0xFFFFFFFF,
            size & 0xFFFFFFFF,
            len(local),
            len(extra),
        )
        out += local + extra + e.data
        length = len(name) if e.name_length is None else e.name_length
        offset = at if e.offset is None else e.offset
        central += e.central_magic + struct.pack(
            "<HHHHHHIIIHHHHHII",
            20, 20, e.flags, e.method, 0, 0x21, crc, packed & 0xFFFFFFFF, size & 0xFFFFFFFF,
            length, len(e.extra), 0, 0, 0, 0, offset & 0xFFFFFFFF,
        )  # fmt: skip
        central += name + e.extra
    at = len(out)
    out += central
    count = len(entries) if d.entries is None else d.entries
    size = len(central) if d.size is None else d.size
    offset = at if d.offset is None else d.offset
    if d.zip64 is not None:
        z = {"at": len(out), "entries": count, "size": size, "offset": offset, **d.zip64}
        out += END64 + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, z["entries"], z["entries"], z["size"], z["offset"])
        out += LOCATOR64 + struct.pack("<IQI", 0, z["at"], 1)
    comment_length = len(d.comment) if d.comment_length is None else d.comment_length
    out += END + struct.pack(
        "<HHHHIIH", 0, 0, count & 0xFFFF, count & 0xFFFF, size & 0xFFFFFFFF, offset & 0xFFFFFFFF, comment_length
    )
    return bytes(out + d.comment + d.tail)


WEIGHT = struct.pack("<4f", 1, 2, 3, 4)
MANIFEST = "extra/untorch.json"
LIBRARY = "data/aotinductor/forward/model.wrapper.so"


def manifest(architecture: str) -> dict[str, Any]:
    """A true manifest for the library that model.c makes."""
    method = {
        "library": LIBRARY,
        "extern_nodes": None,
        "device": "cpu",
        "cpu": {"target": "baseline", "architecture": architecture, "features": []},
        "inputs": [{"name": "x", "dtype": "float32", "shape": [4], "contiguous": True, "strides": [1]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [4]}],
        "constants": [
            {
                "name": "w", "fqn": "w", "dtype": "float32", "shape": [4], "strides": [1], "storage_offset": 0,
                "weight": 0, "mutated": False,
            }
        ],
        "options": {},
        "operators": [],
    }  # fmt: skip
    return {
        "format": "untorch",
        "format_version": 2,
        "untorch_version": "0.1.0",
        "torch_version": "2.13.0",
        "weights": [{"file": "data/weights/weight_0", "nbytes": 16}],
        "methods": {"forward": method},
    }


def digests(entries: Sequence[Lie]) -> dict[str, Any]:
    """True digests of the entries; signatures are made later."""
    entries = [e for e in entries if b"/extra/signatures/" not in _raw(e.name)]
    names = [_raw(e.name).decode(errors="replace").partition("/")[2] for e in entries]
    hexes = [hashlib.sha256(e.data).hexdigest() for e in entries]
    return {
        "algorithm": "sha256",
        "block_bytes": 4 << 20,
        "entries": dict(zip(names, hexes, strict=True)),
        "blocks": {},
    }


@dataclass
class Package:
    """A package in parts; ``bytes()`` puts it together with right checksums."""

    library: bytes
    manifest: Any
    weight: bytes = WEIGHT
    top: str = "model"
    extra: list[Lie] = field(default_factory=list)

    def entries(self) -> list[Lie]:
        others = [
            Lie(f"{self.top}/archive_format", b"pt2"),
            Lie(f"{self.top}/{LIBRARY}", self.library),
            Lie(f"{self.top}/data/weights/weight_0", self.weight),
        ]
        return [*others, Lie(f"{self.top}/extra/untorch.json", self.text([*others, *self.extra])), *self.extra]

    def text(self, entries: Sequence[Lie]) -> bytes:
        """The manifest with the digests of these entries, unless it has some."""
        if isinstance(self.manifest, bytes):
            return self.manifest
        document = {"digests": digests(entries), **self.manifest} if isinstance(self.manifest, dict) else self.manifest
        return json.dumps(document).encode()

    def bytes(self, directory: Directory | None = None) -> bytes:
        return zip_bytes(self.entries(), directory)

    def with_manifest(self, path: Sequence[str | int], value: Any) -> Package:
        """A copy whose manifest has ``value`` at ``path``; ``...`` as the value removes it."""
        other = copy.deepcopy(self)
        node = other.manifest
        for key in path[:-1]:
            node = node[key]
        if value is ...:
            del node[path[-1]]
        else:
            node[path[-1]] = value
        return other


@dataclass
class RealPackage:
    """The entries of a package with a real model library, by name; ``bytes()`` puts them together again."""

    files: dict[str, bytes]

    @classmethod
    def read(cls, path: pathlib.Path) -> RealPackage:
        """The entries of a file, without the top folder."""
        with zipfile.ZipFile(path) as archive:
            return cls({name.partition("/")[2]: archive.read(name) for name in archive.namelist()})

    @property
    def library_name(self) -> str:
        """The entry of the only library."""
        return next(name for name in self.files if name.endswith(".so"))

    @property
    def library(self) -> bytes:
        """The only library."""
        return self.files[self.library_name]

    @property
    def manifest(self) -> Any:
        """A copy of the manifest."""
        return json.loads(self.files[MANIFEST])

    def bytes(self) -> bytes:
        """The archive, with right checksums."""
        return zip_bytes([Lie(f"model/{name}", data) for name, data in self.files.items()])

    def with_library(self, library: bytes) -> RealPackage:
        """A copy with another library, whose digest the manifest has."""
        return RealPackage({**self.files, self.library_name: library}).with_manifest(self.manifest)

    def with_manifest(self, manifest: Any) -> RealPackage:
        """A copy with another manifest, in which the digests are put right."""
        digests = manifest["digests"]
        for table, step in (("entries", 1 << 62), ("blocks", digests["block_bytes"])):
            for name in digests[table].keys() & self.files.keys():
                data = self.files[name]
                parts = [data[at : at + step] for at in range(0, max(len(data), 1), step)]
                digests[table][name] = "".join(hashlib.sha256(part).hexdigest() for part in parts)
        return RealPackage({**self.files, MANIFEST: json.dumps(manifest).encode()})


def elf_sections(image: bytes) -> dict[str, tuple[int, int]]:
    """File offset and size of each section, by name."""
    (table,) = struct.unpack_from("<Q", image, 40)
    count, names = struct.unpack_from("<HH", image, 60)
    headers = [struct.unpack_from("<IIQQQQ", image, table + 64 * i) for i in range(count)]
    start = headers[names][4]
    return {image[start + h[0] : image.index(b"\0", start + h[0])].decode(): (h[4], h[5]) for h in headers}


def elf_image(num_symbols: int, num_versions: int, num_needed: int, name_length: int) -> bytes:
    """A library of this machine whose symbols, versions and needed libraries all have one name, of this length."""
    strings = b"\0" + b"a" * name_length + b"\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 0, 0, 0) * num_symbols
    header, programs = 64, 2 * 56
    at_strings = header + programs
    at_symbols = -(-(at_strings + len(strings)) // 8) * 8
    at_hash = at_symbols + len(symbols)
    table = struct.pack("<III", 1, num_symbols + 1, 0) + bytes(4 * (num_symbols + 1))
    at_versions = -(-(at_hash + len(table)) // 8) * 8
    need = struct.pack("<HHIII", 1, num_versions, 1, 16, 0)
    auxiliary = b"".join(
        struct.pack("<IHHII", 0, 0, 2 + i % 1000, 1, 16 if i + 1 < num_versions else 0) for i in range(num_versions)
    )
    versions = need + auxiliary
    at_indices = at_versions + len(versions)
    indices = struct.pack("<H", 2) * (num_symbols + 1)
    at_dynamic = -(-(at_indices + len(indices)) // 8) * 8
    tags = [(1, 1)] * num_needed + [(5, at_strings), (10, len(strings)), (6, at_symbols), (11, 24), (4, at_hash)]
    if num_versions:
        tags += [(0x6FFFFFFE, at_versions), (0x6FFFFFFF, 1), (0x6FFFFFF0, at_indices)]
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in [*tags, (0, 0)])
    size = at_dynamic + len(dynamic)
    machine = {"x86_64": 62, "aarch64": 183}[platform.machine()]
    out = bytearray(size)
    out[:64] = b"\x7fELF\2\1\1".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, machine, 1, 0, header, 0, 0, 64, 56, 2, 64, 0, 0
    )
    out[64:176] = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 4096) + struct.pack(
        "<IIQQQQQQ", 2, 6, at_dynamic, at_dynamic, at_dynamic, len(dynamic), len(dynamic), 8
    )
    for at, part in (
        (at_strings, strings), (at_symbols, symbols), (at_hash, table), (at_versions, versions),
        (at_indices, indices), (at_dynamic, dynamic),
    ):  # fmt: skip
        out[at : at + len(part)] = part
    return bytes(out)


def elf_fields(image: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, file offset and width of each field of the ELF header, the program headers and the dynamic section."""
    for name, at, width in (
        ("ei_class", 4, 1), ("ei_data", 5, 1), ("ei_version", 6, 1), ("ei_osabi", 7, 1), ("ei_abiversion", 8, 1),
        ("e_type", 16, 2), ("e_machine", 18, 2), ("e_version", 20, 4), ("e_entry", 24, 8), ("e_phoff", 32, 8),
        ("e_shoff", 40, 8), ("e_flags", 48, 4), ("e_ehsize", 52, 2), ("e_phentsize", 54, 2), ("e_phnum", 56, 2),
        ("e_shentsize", 58, 2), ("e_shnum", 60, 2), ("e_shstrndx", 62, 2),
    ):  # fmt: skip
        yield name, at, width
    (phoff,) = struct.unpack_from("<Q", image, 32)
    (phnum,) = struct.unpack_from("<H", image, 56)
    layout = (("type", 0, 4), ("flags", 4, 4), ("offset", 8, 8), ("vaddr", 16, 8), ("filesz", 32, 8), ("memsz", 40, 8),
              ("align", 48, 8))  # fmt: skip
    for i in range(phnum):
        for name, at, width in layout:
            yield f"phdr[{i}].{name}", phoff + 56 * i + at, width
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", image, phoff + 56 * i)
        if kind == 2:
            for k in range(size // 16):
                tag, _ = struct.unpack_from("<QQ", image, offset + 16 * k)
                yield f"dynamic[{k}:{tag:#x}].tag", offset + 16 * k, 8
                yield f"dynamic[{k}:{tag:#x}].value", offset + 16 * k + 8, 8
                if tag == 0:
                    break


def dynamic_value(image: bytes, wanted: int) -> int:
    """The value of a dynamic tag (also a file offset in the first segments of the libraries made here)."""
    for name, at, _ in elf_fields(image):
        if name.startswith("dynamic") and name.endswith(".value"):
            tag, value = struct.unpack_from("<QQ", image, at - 8)
            if tag == wanted:
                return int(value)
    raise KeyError(wanted)


def patched(image: bytes, offset: int, width: int, value: int) -> bytes:
    """The image with an integer overwritten."""
    out = bytearray(image)
    out[offset : offset + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return bytes(out)
