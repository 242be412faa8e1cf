"""SHA-256 of a file and of its entries, over the bytes that were opened."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from untorch import _core
from untorch.runtime.errors import InvalidFileError

__all__ = ["SIGNATURE", "Digests", "digests_of", "entries_digest"]

# The entry that holds a signature inside an archive, below the top folder. It is not among what is signed.
SIGNATURE = "extra/signatures/model-signing.json"
_MAX_SIGNATURE = 64 << 20


@dataclass(frozen=True)
class Digests:
    """``file``: SHA-256 of the file, if it was asked for. ``entries``: of each entry, by its name with the top folder.

    ``signature``: the bytes of the signature inside the archive, which is not in ``entries``; None if there is none.
    """

    file: str | None
    entries: Mapping[str, str]
    root: str
    signature: bytes | None

    @property
    def rules(self) -> tuple[str, ...]:
        """The hashes that a policy could name."""
        own = f"entries-sha256:{entries_digest(self.entries)}"
        return (own,) if self.file is None else (f"sha256:{self.file}", own)


def digests_of(archive: _core.Archive, path: str, *, with_file: bool) -> Digests:
    """The digests of an archive's entries; with that of the file as a whole, both are of the same bytes."""
    file, entries = archive.file_digests() if with_file else (None, archive.digests())
    signature = None
    if entries.pop(SIGNATURE, None) is not None:
        with archive.view(SIGNATURE) as view:
            if view.nbytes > _MAX_SIGNATURE:
                raise InvalidFileError(f"{path}: its signature has more than {_MAX_SIGNATURE} bytes")
            signature = bytes(view)
    root = archive.root
    return Digests(file, {f"{root}/{name}": digest for name, digest in entries.items()}, root, signature)


def entries_digest(entries: Mapping[str, str]) -> str:
    """SHA-256 of the lines that ``sha256sum`` prints for the entries, sorted by name (bytewise)."""
    lines = sorted((name.encode(), digest) for name, digest in entries.items())
    return hashlib.sha256(b"".join(digest.encode() + b"  " + name + b"\n" for name, digest in lines)).hexdigest()
