"""Call specifications that a package's library gives, which are no such thing."""

from __future__ import annotations

import pytest
from compiler import model_library
from craft import Package
from probe import Prober

ROOM = 256
PREFIX = "InvalidFileError: the package's call specification is damaged: "


@pytest.fixture(scope="module")
def roomy_library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """With room for the two specifications."""
    return model_library(tmp_path_factory.mktemp("roomy"), f"-DSPECIFICATION={ROOM}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xff\xfe", "it is not UTF-8"),
        (b'[1, {"type": "\xc3"}]', "it is not UTF-8"),
        (b"[1", "Expecting"),
        (b"1", "expected a list of the protocol and the tree"),
        (b"[1, 2]", "a node is malformed"),
    ],
)
def test_a_damaged_specification(roomy_library: bytes, package: Package, prober: Prober, text: bytes, why: str) -> None:
    at = roomy_library.index(b"[1, {in")
    library = bytearray(roomy_library)
    library[at : at + ROOM - 1] = text.ljust(ROOM - 1)
    answer = prober.open(Package(bytes(library), package.manifest).bytes())
    assert answer.startswith(PREFIX + why), answer
