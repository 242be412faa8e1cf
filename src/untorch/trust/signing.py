"""Signs a file: the bundle goes beside it (``model.pt2.sig``), or into the archive."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

from untorch.archive import ALIGNMENT, ArchiveReader
from untorch.files import replacing
from untorch.runtime.errors import InvalidFileError
from untorch.trust.bundle import Signer, Statement, sign_entries
from untorch.trust.digests import SIGNATURE, digests_of

__all__ = ["sign"]

_PADDING_ID = 0x4246
_LOCAL_HEADER = 30


def sign(path: str | os.PathLike[str], signer: Signer, *, inside: bool = False, output: str | None = None) -> Path:
    """Sign the list of a file's entries with their SHA-256, in the OpenSSF Model Signing format.

    Args:
        path: The ``.pt2`` file.
        signer: Who signs.
        inside: Put the bundle into the archive, as its last entry, instead of beside it. The file is written anew and
            renamed into place; its other entries stay as they are, where they are.
        output: Where to write the bundle; None: ``<path>.sig``.

    Returns:
        The file that now has the bundle.

    Raises:
        InvalidFileError: The file is no archive.
        UnsupportedError: The package model-signing is missing.
        InvalidArgumentError: The key or certificate cannot be used.
        UntrustedError: Sigstore gave no signature.
    """
    name = os.fspath(path)
    with ArchiveReader(name) as reader:
        digests = digests_of(reader.core, name, with_file=False)
        data = sign_entries(Statement(digests.entries, digests.root, lambda: ""), signer)
    if inside:
        _embed(Path(name), digests.root, data)
        return Path(name)
    target = Path(output if output is not None else f"{name}.sig")
    with replacing(target) as temporary:
        temporary.write_bytes(data)
    return target


def _embed(path: Path, root: str, data: bytes) -> None:
    """Adds the signature, or exchanges it. What lies before it in the file is copied as it is."""
    name = f"{root}/{SIGNATURE}"
    with replacing(path) as temporary:
        with open(path, "rb") as source, open(temporary, "wb") as target:
            _copy(source.fileno(), target.fileno(), os.fstat(source.fileno()).st_size)
        with zipfile.ZipFile(temporary, "a", zipfile.ZIP_STORED) as archive:
            before = archive.NameToInfo.get(name)
            if before is not None:
                if before is not max(archive.filelist, key=lambda info: info.header_offset):
                    raise InvalidFileError(
                        f"{path}: its signature is not the last entry, so it cannot be exchanged: sign beside the file"
                    )
                # The new signature is written where the old one was.
                archive.filelist.remove(before)
                del archive.NameToInfo[name]
                archive.start_dir = before.header_offset
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.create_system = 3
            padding = -(archive.start_dir + _LOCAL_HEADER + len(name.encode()) + 4) % ALIGNMENT
            info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
            archive.writestr(info, data)
        os.chmod(temporary, os.stat(path).st_mode & 0o777)


def _copy(source: int, target: int, size: int) -> None:
    done = 0
    while done < size:
        count = os.sendfile(target, source, done, size - done)
        if count == 0:
            raise InvalidFileError("the file became shorter while it was copied")
        done += count
