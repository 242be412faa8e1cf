"""untorch triton."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_one_method(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    done = cli("triton", package, "-o", tmp_path, "--json")
    assert done.code == 0, done.err
    assert done.document() == {
        "repository": str(tmp_path),
        "models": [{"method": "forward", "model": "affine", "max_batch_size": 64}],
        "left_out": [],
    }
    assert 'name: "affine"' in (tmp_path / "affine" / "config.pbtxt").read_text()
    done = cli("triton", package, "-o", tmp_path, "--name", "other", "--num-threads", 3)
    assert done.code == 0, done.err
    assert "method forward" in done.out and "model other, joins up to 64 rows" in done.out
    text = (tmp_path / "other" / "config.pbtxt").read_text()
    assert "max_batch_size: 64" in text and 'key: "num_threads" value { string_value: "3" }' in text


def test_several_methods(cli: Callable[..., Any], two_methods: Path, tmp_path: Path) -> None:
    done = cli("triton", two_methods, "-o", tmp_path, "--model-version", 7)
    assert done.code == 0, done.err
    assert "method encode  model two_encode, joins up to 64 rows" in done.out
    assert (tmp_path / "two_decode" / "7" / "model.py").is_file()
    done = cli("triton", two_methods, "-o", tmp_path / "one", "--method", "decode", "--json")
    assert [model["model"] for model in done.document()["models"]] == ["two_decode"]


def test_errors(cli: Callable[..., Any], package: Path, stock: Path, tmp_path: Path) -> None:
    assert cli("triton", package, "-o", tmp_path).code == 0
    done = cli("triton", package, "-o", tmp_path)
    assert (done.code, done.err) == (
        1, f"untorch: {tmp_path}/affine/1 is there already: remove it, or write another version\n",
    )  # fmt: skip
    done = cli("triton", stock, "-o", tmp_path)
    assert (done.code, "a stock package does not tell its inputs and outputs" in done.err) == (1, True)
    assert cli("triton", package).code == 2


def test_what_is_left_out_is_said(cli: Callable[..., Any], library: bytes, tmp_path: Path) -> None:
    from tests.unit.cli.conftest import write_package

    def change(manifest: dict[str, Any]) -> None:
        manifest["methods"]["decode"]["outputs"][0]["dtype"] = "complex64"

    file = write_package(tmp_path / "two.pt2", library, "encode", "decode", change=change)
    done = cli("triton", file, "-o", tmp_path / "repository")
    assert done.code == 0, done.err
    assert (
        "method decode  left out: method 'decode', output 'output': Triton has no data type for complex64" in done.out
    )
