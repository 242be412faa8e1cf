"""Builds zip archives, manifests and ELF images that may lie about anything. Standard library only."""

from __future__ import annotations

import copy
import json
import struct
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
        "format_version": 1,
        "untorch_version": "0.1.0",
        "torch_version": "2.13.0",
        "weights": [{"file": "data/weights/weight_0", "nbytes": 16, "hash": "blake2b:0"}],
        "methods": {"forward": method},
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
        text = self.manifest if isinstance(self.manifest, bytes) else json.dumps(self.manifest).encode()
        return [
            Lie(f"{self.top}/archive_format", b"pt2"),
            Lie(f"{self.top}/{LIBRARY}", self.library),
            Lie(f"{self.top}/data/weights/weight_0", self.weight),
            Lie(f"{self.top}/extra/untorch.json", text),
            *self.extra,
        ]

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
