"""untorch verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(("kind", "algorithm"), [("package", "SHA-256"), ("stock", "CRC-32")])
def test_verify(kind: str, algorithm: str, cli: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    document = cli("verify", path, "--json").document()
    assert document.pop("seconds") >= 0
    assert document == {
        "file": str(path),
        "format": "untorch" if kind == "package" else "stock",
        "algorithm": algorithm,
        "entries": document["entries"],
        "bytes": document["bytes"],
        "external_weights": 0,
        "external_bytes": 0,
        "hashes": document["hashes"],
        "signed_inside": False,
        "trusted": None,
    }
    assert document["entries"] >= 8 and 0 < document["bytes"] < path.stat().st_size
    done = cli("verify", path)
    assert (done.code, done.err) == (0, "")
    assert f" by {algorithm} in " in done.out and ": all right\n" in done.out
    assert "trust                not asked for: --key, --certificate, --identity or --trust\n" in done.out


def test_damage(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    data = bytearray(package.read_bytes())
    data[data.index(b"\x7fELF") + 100] ^= 1
    path = tmp_path / "affine.pt2"
    path.write_bytes(data)
    done = cli("verify", path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        f"untorch: {path} is damaged: entry 'data/aotinductor/forward/m.wrapper.so' has the SHA-"
    )
    assert (
        cli("verify", tmp_path / "none.pt2").err
        == f"untorch: cannot open {tmp_path}/none.pt2: No such file or directory\n"
    )
