"""Reads and writes ``.pt2`` files: zip archives with stored (uncompressed), 64-byte aligned entries. No torch.

Aligned, stored entries can be mapped into memory and used in place. The writer writes a temporary file beside the
target and renames it at the end, so the target is complete or untouched; equal inputs give equal bytes. The reader is
the loader's own (``native/model/archive.cpp``), which ``load``, ``untorch inspect`` and the writer's last check share.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from untorch import _core
from untorch.files import umask
from untorch.runtime.errors import FileOpenError, InvalidFileError, file_error

__all__ = [
    "ALIGNMENT",
    "BLOCK_BYTES",
    "EXTERNAL_VERSION",
    "FORMAT_VERSION",
    "MANIFEST",
    "ArchiveReader",
    "ArchiveWriter",
    "Entry",
    "open_archive",
]

ALIGNMENT = 64
MANIFEST = "extra/untorch.json"
FORMAT_VERSION = 2
EXTERNAL_VERSION = 3  # of files that take weights from .safetensors files
# Weights are hashed in blocks, so that several threads can, and a copy of a part can be checked.
BLOCK_BYTES = 4 << 20

_WEIGHTS = "data/weights/"
_LOCAL_HEADER = 30
_ZIP64_EXTRA = 20
_ZIP64_FROM = (1 << 31) - 1
_PADDING_ID = 0x4246
_CHUNK = 16 << 20


class ArchiveWriter:
    """Writes one archive. As a context manager it renames the file into place at the end, or removes it on an error.

    The top folder is always "model": equal models give equal bytes, whatever their files are called. Raises
    FileMissingError (also a FileNotFoundError) if the directory does not exist, FilePermissionError (also a
    PermissionError) if it is not writable.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.root = "model"
        self.on_bytes: Callable[[int], None] | None = None  # told of every part that is written
        directory = self.path.parent
        if not directory.is_dir():
            text = f"cannot write {self.path}: the directory {directory} does not exist"
            raise file_error(text, errno.ENOENT, str(directory))
        if self.path.is_dir():
            raise file_error(f"cannot write {self.path}: it is a directory", errno.EISDIR, str(self.path))
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=f".{self.path.stem}.", suffix=".pt2", dir=directory)
        except OSError as error:
            raise file_error(f"cannot write {self.path}: {error.strerror}", error.errno, str(self.path)) from error
        self._temporary = Path(temporary)
        self._file = os.fdopen(descriptor, "w+b")
        self._begin()

    def _begin(self) -> None:
        self._names: dict[str, tuple[int, int]] = {}  # size and checksum
        self._digests: dict[str, dict[str, str]] = {"entries": {}, "blocks": {}}
        self._serialization = hashlib.sha256()
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True, strict_timestamps=True)

    def __enter__(self) -> ArchiveWriter:
        self._write_versions()
        return self

    def _write_versions(self) -> None:
        self.write("archive_format", b"pt2")
        self.write("archive_version", b"0")
        self.write("byteorder", b"little")
        self.write(".data/version", b"6\n")

    def restart(self) -> None:
        """Take back all entries."""
        self._zip.close()
        self._file.seek(0)
        self._file.truncate()
        self._begin()
        self._write_versions()

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

    def write(self, name: str, data: bytes | bytearray | memoryview, digest: str | None = None) -> None:
        """Add the entry ``name``, relative to the top folder.

        digest: the blocks' digests of a weight of several blocks, where they are known.
        """
        if name in self._names:
            raise ValueError(f"the archive already has an entry {name!r}")
        if problem := _name_problem(name):
            raise ValueError(f"{name!r} cannot be an entry's name: {problem}")
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
                part = view[at : at + _CHUNK]
                entry.write(part)
                if self.on_bytes is not None:
                    self.on_bytes(len(part))
        self._names[name] = (len(view), info.CRC)
        if name.startswith(_WEIGHTS) and len(view) > BLOCK_BYTES:
            self._digests["blocks"][name] = digest or _core.sha256(view, BLOCK_BYTES)
        else:
            self._digests["entries"][name] = _core.sha256(view)
        self._serialization.update(f"{name}\0{info.CRC}\0{len(view)}\0".encode())

    def sync(self) -> None:
        """Puts what was written so far on the disk: ``finish`` need not wait for it then."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Add ``extra/untorch.json`` with the digests of all entries. The last entry: nothing may follow."""
        self._write_serialization_id()
        digests = {"algorithm": "sha256", "block_bytes": BLOCK_BYTES, **self._digests}
        document = {**manifest, "digests": digests}
        self.write(MANIFEST, json.dumps(document, indent=1, ensure_ascii=False).encode())

    def _write_serialization_id(self) -> None:
        # PyTorch's readers log it: 40 decimal digits that differ between different files.
        if (name := ".data/serialization_id") not in self._names:
            self.write(name, str(int(self._serialization.hexdigest(), 16)).zfill(40)[:40].encode())

    def finish(self) -> Path:
        """Write the zip directory, fsync, and read it as the loader does.

        Returns the temporary path: complete, not yet renamed. Raises InvalidFileError if the loader would refuse it.
        """
        if not self._file.closed:
            self._write_serialization_id()
            self._zip.close()
            self.sync()
            self._file.close()
            self._check()
        return self._temporary

    def _check(self) -> None:
        with ArchiveReader(self._temporary) as reader:
            if {entry.name: (entry.size, entry.crc) for entry in reader} != self._names:
                raise InvalidFileError(f"{self.path}: what was written is not what the file holds")
            if reader.has_manifest():
                reader.manifest()

    def close(self) -> None:
        """Finish the file and rename it into place."""
        temporary = self.finish()
        os.chmod(temporary, 0o666 & ~umask())
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
    """The loader's own reader of archives. ``entries`` maps names below the top folder to ``Entry``.

    The whole directory is checked against the file and its local headers before anything is returned. Raises
    InvalidFileError; if the file cannot be opened, FileMissingError and the like, which are Python's, too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._core: _core.Archive | None = open_archive(path)
        self.file_size = self._core.nbytes
        self.root = self._core.root
        self.entries = {entry[0]: Entry(*entry) for entry in self._core.entries()}

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def close(self) -> None:
        """Close the file. Live views keep the mapping alive."""
        self._core = None

    @property
    def core(self) -> _core.Archive:
        """The loader's object. Raises ValueError when the archive was closed."""
        if self._core is None:
            raise ValueError(f"{self.path}: the archive was closed")
        return self._core

    def view(self, name: str) -> memoryview:
        """The bytes of an entry, mapped from the file: neither copied nor compared with the checksums."""
        return self.core.view(name)

    def read(self, name: str) -> bytes:
        """A copy of the bytes of an entry, not compared with the checksums."""
        data = bytes(self.core.view(name))
        self.core.check_whole()
        return data

    def read_json(self, name: str) -> Any:
        """An entry that is JSON as the loader accepts it, compared with its checksum."""
        self.core.check_json(name)
        return json.loads(self.core.text(name))

    def has_manifest(self) -> bool:
        """True if untorch wrote this archive; a stock package has no manifest."""
        return MANIFEST in self.entries

    def manifest(self) -> dict[str, Any]:
        """The parsed ``extra/untorch.json``; the loader has checked all that it and ``untorch inspect`` use of it."""
        if not self.has_manifest():
            raise InvalidFileError(f"{self.path} has no {MANIFEST}, so untorch did not write it")
        self.core.methods()
        manifest: dict[str, Any] = json.loads(self.core.text(MANIFEST))
        return manifest

    def methods(self) -> list[dict[str, Any]]:
        """What the loader knows of every method, also of a stock package: name, library, device, CPU features, GPUs."""
        methods: list[dict[str, Any]] = json.loads(self.core.methods())
        return methods

    def verify(self) -> None:
        """Compare every entry with its SHA-256 in the manifest; in a stock package with its CRC-32. On all cores.

        Raises InvalidFileError at a mismatch.
        """
        self.core.verify()

    def verify_external(self, weights: str | os.PathLike[str] | None = None) -> None:
        """Compare the weights in .safetensors files, if there are any, with their SHA-256 in the manifest.

        weights: that file, or the folder of several; None: where ``load`` looks. Raises InvalidFileError at a mismatch,
        FileMissingError if a file is not there.
        """
        if self.has_manifest() and self.manifest().get("external_files"):
            self.core.verify_external(None if weights is None else os.fsencode(weights))

    def digests(self) -> dict[str, str]:
        """The SHA-256 of every entry as it is in the file, in hexadecimal digits, by name. On all cores."""
        return self.core.digests()


def open_archive(path: str | os.PathLike[str], copy: bool = False) -> _core.Archive:
    """The loader's archive of a file; errors of the operating system have the file's name."""
    try:
        return _core.open_archive(os.fsencode(path), copy)
    except FileOpenError as error:
        error.filename = os.fspath(path)
        raise
