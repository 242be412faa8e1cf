"""Reads and writes ``.pt2`` files: zip archives with stored (uncompressed), 64-byte aligned entries. No torch.

Aligned, stored entries can be mapped into memory and used in place. The writer writes a temporary file beside the
target and renames it at the end, so the target is complete or untouched; equal inputs give equal bytes. The reader
checks names, sizes and offsets against the file before it returns anything.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from untorch.runtime.errors import InvalidFileError, file_error

__all__ = [
    "ALIGNMENT",
    "FORMAT_VERSION",
    "MANIFEST",
    "ArchiveReader",
    "ArchiveWriter",
    "Entry",
]

ALIGNMENT = 64
MANIFEST = "extra/untorch.json"
FORMAT_VERSION = 1

_LOCAL_HEADER = 30
_ZIP64_EXTRA = 20
_ZIP64_FROM = (1 << 31) - 1
_PADDING_ID = 0x4246
_CHUNK = 16 << 20
_MAX_ENTRIES = 1 << 20
_MAX_MANIFEST = 256 << 20


class ArchiveWriter:
    """Writes one archive. As a context manager it renames the file into place at the end, or removes it on an error.

    The top folder is the file's stem, as in PyTorch's archives. Raises FileMissingError (also a FileNotFoundError) if
    the directory does not exist, FilePermissionError (also a PermissionError) if it is not writable.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.root = self.path.stem
        self._names: set[str] = set()
        self._digest = hashlib.blake2b(digest_size=16)
        directory = self.path.parent
        if not directory.is_dir():
            text = f"cannot write {self.path}: the directory {directory} does not exist"
            raise file_error(text, errno.ENOENT, str(directory))
        if self.path.is_dir():
            raise file_error(f"cannot write {self.path}: it is a directory", errno.EISDIR, str(self.path))
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=f".{self.root}.", suffix=".pt2", dir=directory)
        except OSError as error:
            raise file_error(f"cannot write {self.path}: {error.strerror}", error.errno, str(self.path)) from error
        self._temporary = Path(temporary)
        self._file = os.fdopen(descriptor, "w+b")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True, strict_timestamps=True)

    def __enter__(self) -> ArchiveWriter:
        self.write("archive_format", b"pt2")
        self.write("archive_version", b"0")
        self.write("byteorder", b"little")
        self.write(".data/version", b"6\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.close()
            except BaseException:
                self.abort()
                raise
        else:
            self.abort()

    def write(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Add the entry ``name``, relative to the top folder."""
        if name in self._names:
            raise ValueError(f"the archive already has an entry {name!r}")
        if problem := _name_problem(name):
            raise ValueError(f"{name!r} cannot be an entry's name: {problem}")
        self._names.add(name)
        view = memoryview(data).cast("B")
        full = f"{self.root}/{name}"
        info = zipfile.ZipInfo(full, date_time=(1980, 1, 1, 0, 0, 0))
        info.external_attr = 0o644 << 16
        info.create_system = 3
        zip64 = len(view) > _ZIP64_FROM
        start = self._file.tell() + _LOCAL_HEADER + len(full.encode()) + (_ZIP64_EXTRA if zip64 else 0)
        padding = -(start + 4) % ALIGNMENT
        info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
        with self._zip.open(info, "w", force_zip64=zip64) as entry:
            for at in range(0, len(view), _CHUNK):
                entry.write(view[at : at + _CHUNK])
        self._digest.update(f"{name}\0{info.CRC}\0{len(view)}\0".encode())

    def finish(self) -> Path:
        """Write the zip directory and fsync. Returns the temporary path: complete, not yet renamed."""
        if not self._file.closed:
            self.write(".data/serialization_id", str(int(self._digest.hexdigest(), 16)).zfill(40)[:40].encode())
            self._zip.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._temporary

    def close(self) -> None:
        """Finish the file and rename it into place."""
        temporary = self.finish()
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, self.path)
        with contextlib.suppress(OSError):
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def abort(self) -> None:
        """Remove the temporary file. An existing file at the target path is not touched."""
        with contextlib.suppress(Exception):
            self._zip.close()
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _name_problem(name: str) -> str | None:
    if not name or "\0" in name or "\\" in name or name.startswith("/"):
        return "it is empty, absolute, or has a backslash or a zero byte"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "a part of it is empty, '.' or '..'"
    return None


@dataclass(frozen=True)
class Entry:
    """One entry: its name below the top folder, and the offset and size of its bytes in the file."""

    name: str
    offset: int
    size: int
    crc: int


class ArchiveReader:
    """Reads an archive. ``entries`` maps names below the top folder to ``Entry``.

    Raises InvalidFileError; if the file cannot be opened, FileMissingError and the like, which are Python's, too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise file_error(f"cannot open {self.path}: {error.strerror}", error.errno, str(self.path)) from error
        self._map: mmap.mmap | None = None
        try:
            self.file_size = os.fstat(self._file.fileno()).st_size
            if self.file_size == 0:
                raise self._fail("it is empty")
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            self.root, self.entries = self._read_directory()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def close(self) -> None:
        """Close the file. Live views keep the mapping alive."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
        self._file.close()

    def view(self, name: str) -> memoryview:
        """The bytes of an entry, mapped from the file and not copied."""
        entry = self.entries.get(name)
        if entry is None:
            raise self._fail(f"it has no entry {name!r}")
        if self._map is None or self._map.closed:
            raise ValueError(f"{self.path}: the archive was closed")
        return memoryview(self._map)[entry.offset : entry.offset + entry.size]

    def read(self, name: str) -> bytes:
        """A copy of the bytes of an entry."""
        return bytes(self.view(name))

    def has_manifest(self) -> bool:
        """True if untorch wrote this archive; a stock package has no manifest."""
        return MANIFEST in self.entries

    def manifest(self) -> dict[str, Any]:
        """The parsed ``extra/untorch.json``; format, version and the files that it names are checked."""
        if not self.has_manifest():
            raise self._fail(f"it has no {MANIFEST}, so untorch did not write it")
        if self.entries[MANIFEST].size > _MAX_MANIFEST:
            raise self._fail(f"{MANIFEST} is larger than {_MAX_MANIFEST} bytes")
        try:
            manifest = json.loads(self.read(MANIFEST))
        except (ValueError, RecursionError) as error:
            raise self._fail(f"{MANIFEST} is not valid JSON: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != "untorch":
            raise self._fail(f'{MANIFEST} does not say "format": "untorch"')
        version = manifest.get("format_version")
        if version != FORMAT_VERSION:
            raise self._fail(
                f"its format version is {version!r} and this untorch reads {FORMAT_VERSION}: export it again, "
                f"or install the untorch that wrote it ({manifest.get('untorch_version', 'unknown')})"
            )
        for field, kind in (("weights", list), ("methods", dict)):
            if not isinstance(manifest.get(field), kind):
                raise self._fail(f"{MANIFEST}: {field!r} is missing or not a {kind.__name__}")
        self._check_files(manifest)
        return manifest

    def verify(self) -> None:
        """Compare the checksum of every entry. Raises InvalidFileError at the first mismatch."""
        for entry in self.entries.values():
            crc = 0
            view = self.view(entry.name)
            for at in range(0, len(view), _CHUNK):
                crc = zlib.crc32(view[at : at + _CHUNK], crc)
            if crc != entry.crc:
                raise self._fail(f"the entry {entry.name!r} is damaged: checksum {crc:08x}, expected {entry.crc:08x}")

    def _check_files(self, manifest: dict[str, Any]) -> None:
        for i, weight in enumerate(manifest["weights"]):
            file, nbytes = (weight.get("file"), weight.get("nbytes")) if isinstance(weight, dict) else (None, None)
            entry = self.entries.get(file) if isinstance(file, str) else None
            if entry is None:
                raise self._fail(f"{MANIFEST}: weights[{i}] names the file {file!r}, which the archive does not have")
            if entry.size != nbytes:
                raise self._fail(f"{MANIFEST}: weights[{i}] should have {nbytes!r} bytes, {file} has {entry.size}")
        for name, method in manifest["methods"].items():
            library = method.get("library") if isinstance(method, dict) else None
            if not isinstance(library, str) or library not in self.entries:
                raise self._fail(
                    f"{MANIFEST}: method {name!r} names the library {library!r}, which the archive does not have"
                )

    def _fail(self, what: str) -> InvalidFileError:
        return InvalidFileError(f"{self.path}: not a usable .pt2 archive: {what}")

    def _read_directory(self) -> tuple[str, dict[str, Entry]]:
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, struct.error, ValueError, OSError, NotImplementedError, OverflowError) as error:
            raise self._fail(f"its zip directory cannot be read: {error}") from error
        if not infos or len(infos) > _MAX_ENTRIES:
            raise self._fail(f"it has {len(infos)} entries, expected 1 to {_MAX_ENTRIES}")
        root = infos[0].orig_filename.split("/", 1)[0]
        entries: dict[str, Entry] = {}
        for info in infos:
            full = info.orig_filename
            if problem := _name_problem(full):
                raise self._fail(f"the entry name {full!r} is refused: {problem}")
            top, _, name = full.partition("/")
            if top != root or not name:
                raise self._fail(f"the entry {full!r} is not in the top folder {root!r}")
            if name in entries:
                raise self._fail(f"the entry {name!r} occurs twice")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
                raise self._fail(f"the entry {name!r} is compressed or encrypted, expected stored bytes")
            entries[name] = Entry(name, self._data_offset(info, name), info.file_size, info.CRC)
        end = 0
        for entry in sorted(entries.values(), key=lambda e: (e.offset, e.size)):
            if entry.offset < end:
                raise self._fail(f"the entry {entry.name!r} overlaps another one")
            end = entry.offset + entry.size
        return root, entries

    def _data_offset(self, info: zipfile.ZipInfo, name: str) -> int:
        assert self._map is not None
        at = info.header_offset
        if at < 0 or at + _LOCAL_HEADER > self.file_size or self._map[at : at + 4] != b"PK\x03\x04":
            raise self._fail(f"the entry {name!r} has no header at offset {at}")
        name_length, extra_length = struct.unpack_from("<HH", self._map, at + 26)
        header_name = bytes(self._map[at + _LOCAL_HEADER : at + _LOCAL_HEADER + name_length])
        if header_name != info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437"):
            raise self._fail(f"the entry {name!r} has another name in its header")
        start: int = at + _LOCAL_HEADER + name_length + extra_length
        if start + info.file_size > self.file_size:
            raise self._fail(f"the entry {name!r} ends past the end of the file (truncated?)")
        return start
