"""Moves a package of random weights to another machine without them: megabytes where the package has gigabytes.

    python benchmarks/weightless.py pack model.pt2 model.xz        # where it was compiled
    python benchmarks/weightless.py unpack model.xz model.pt2      # where it is measured

Of each weight the first 8 KiB travel; they repeat over the rest of it. All else is the package's own, so the times are,
too. ``untorch verify`` refuses the result: weights are not those that the manifest has digests of.
"""

from __future__ import annotations

import json
import lzma
import pathlib
import sys

from untorch.archive import ArchiveReader

KEPT = 8 << 10
_PART = 64 << 20


def pack(source: pathlib.Path, target: pathlib.Path) -> None:
    """All bytes but those that repeat, behind a line of JSON that says where they belong."""
    with ArchiveReader(source) as archive:
        size = archive.file_size
        weights = sorted(
            (entry.offset, entry.size)
            for entry in archive
            if entry.name.startswith("data/weights/") and entry.size > 8 * KEPT
        )
    ends = [(offset + KEPT, offset + length) for offset, length in weights]
    begins = [0, *(end for _, end in ends)]
    pieces = list(zip(begins, [*(begin for begin, _ in ends), size], strict=True))
    with source.open("rb") as file, lzma.open(target, "wb", preset=4) as packed:
        packed.write(json.dumps({"size": size, "weights": weights, "pieces": pieces}).encode() + b"\n")
        for begin, end in pieces:
            file.seek(begin)
            packed.write(file.read(end - begin))


def unpack(source: pathlib.Path, target: pathlib.Path) -> None:
    """The package of ``pack``, with its weights drawn out to their sizes."""
    with lzma.open(source) as packed, target.open("w+b") as file:
        layout = json.loads(packed.readline())
        file.truncate(layout["size"])
        for begin, end in layout["pieces"]:
            file.seek(begin)
            file.write(packed.read(end - begin))
        for offset, length in layout["weights"]:
            file.seek(offset)
            block = file.read(KEPT) * (min(_PART, length) // KEPT + 1)
            file.seek(offset)
            for begin in range(0, length, _PART):
                file.write(block[: min(_PART, length - begin)])


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
