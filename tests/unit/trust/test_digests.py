"""Digests of entries and of the whole file."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import craft

from untorch.archive import ArchiveReader
from untorch.trust.digests import SIGNATURE, digests_of


def test_digests_are_those_of_sha256sum(archive: Path, tmp_path: Path) -> None:
    with ArchiveReader(archive) as reader:
        digests = digests_of(reader.core, str(archive), with_file=True)
        assert digests_of(reader.core, str(archive), with_file=False).entries == digests.entries
    assert digests.file == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert digests.root == "model"
    assert digests.signature is None
    with zipfile.ZipFile(archive) as zipped:
        assert digests.entries == {name: hashlib.sha256(zipped.read(name)).hexdigest() for name in zipped.namelist()}
        zipped.extractall(tmp_path / "unpacked")
    # What the page says about computing the hash of the entries without untorch.
    command = "find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
    printed = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path / "unpacked", check=True, capture_output=True, text=True
    )
    assert digests.rules == (f"sha256:{digests.file}", f"entries-sha256:{printed.stdout.split()[0]}")


def test_the_signature_is_not_among_the_entries(tmp_path: Path) -> None:
    package = craft.Package(b"library", craft.manifest("x86_64"))
    (tmp_path / "a.pt2").write_bytes(package.bytes())
    package.extra = [craft.Lie(f"model/{SIGNATURE}", b"bundle")]
    (tmp_path / "b.pt2").write_bytes(package.bytes())
    digests = []
    for name in ("a.pt2", "b.pt2"):
        with ArchiveReader(tmp_path / name) as reader:
            digests.append(digests_of(reader.core, name, with_file=True))
            assert digests[-1].file == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert digests[0].entries == digests[1].entries
    assert digests[0].rules[1] == digests[1].rules[1]
    assert [item.signature for item in digests] == [None, b"bundle"]
