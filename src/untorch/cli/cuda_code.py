"""Which GPUs libuntorch.so has machine code for: the headers of the fat binaries that nvcc put into its sections."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

__all__ = ["compiled_architectures"]

_SECTION = b".nv_fatbin"
_ELF_HEADER = struct.Struct("<40xQ10xHHH")  # e_shoff, e_shentsize, e_shnum, e_shstrndx of ELF64
_SECTION_HEADER = struct.Struct("<I20xQQ24x")  # sh_name, sh_offset, sh_size
_FAT_BINARY = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes behind it
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<H2xIQ12xI")  # kind, bytes of this header, bytes of code, architecture
_PTX, _CUBIN = 1, 2


def compiled_architectures(library: Path) -> list[str]:
    """["sm_80", "sm_90"], and "compute_90" for PTX that newer GPUs compile; empty: a build without CUDA.

    Raises OSError if the file cannot be read, ValueError if it is not what is expected.
    """
    found: set[tuple[int, int]] = set()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for begin, end in _sections(data):
                found |= _entries(data, begin, end)
        except struct.error as error:
            raise ValueError(f"{library} ends within a header: {error}") from None
    return [
        f"{'sm' if kind == _CUBIN else 'compute'}_{architecture}"
        for kind, architecture in sorted(found, key=lambda item: (-item[0], item[1]))
    ]


def _sections(data: mmap.mmap) -> list[tuple[int, int]]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("expected an ELF file, little-endian, 64 bits")
    table, size, count, names = _ELF_HEADER.unpack_from(data)
    headers = [_SECTION_HEADER.unpack_from(data, table + size * index) for index in range(count)]
    texts = headers[names][1]
    return [
        (offset, offset + length)
        for name, offset, length in headers
        if data[texts + name : texts + name + len(_SECTION) + 1] == _SECTION + b"\0"
    ]


def _entries(data: mmap.mmap, begin: int, end: int) -> set[tuple[int, int]]:
    """(kind, architecture) of each piece of code."""
    found = set()
    while begin < end:
        magic, _, header, length = _FAT_BINARY.unpack_from(data, begin)
        if magic != _MAGIC:
            begin += 8  # padding between fat binaries
            continue
        entry, last = begin + header, begin + header + length
        while entry < last:
            kind, entry_header, code, architecture = _ENTRY.unpack_from(data, entry)
            if kind in (_PTX, _CUBIN):
                found.add((kind, architecture))
            entry += max(entry_header + code, 8)
        begin = max(last, begin + 8)
    return found
