"""untorch run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest


def test_runs_and_saves(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    x = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    numpy.save(tmp_path / "x.npy", x)
    done = cli("run", package, "--input", f"x={tmp_path}/x.npy", "--output", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    document = done.document()
    assert set(document) == {"file", "method", "device", "seconds", "outputs"}
    assert document["method"] == "forward"
    assert document["outputs"] == [
        {
            "name": "output", "file": str(tmp_path / "out" / "output.npy"), "dtype": "float32", "shape": [3, 4],
            "min": 0.5, "max": 22.5, "mean": 11.5, "saved_dtype": "float32",
        }
    ]  # fmt: skip
    numpy.testing.assert_array_equal(numpy.load(tmp_path / "out" / "output.npy"), 2 * x + 0.5)


def test_table(cli: Callable[..., Any], package: Path) -> None:
    done = cli("run", package, "--input", "ones:float32[2,4]")
    assert done.code == 0, done.err
    header, _, row = (line.split() for line in done.out.strip().splitlines()[:3])
    assert header == ["output", "dtype", "shape", "min", "max", "mean", "file"]
    assert row == ["output", "float32", "[2,", "4]", "2.5", "2.5", "2.5"]


def test_npz_holds_inputs_by_name(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    numpy.savez(tmp_path / "all.npz", x=numpy.ones((2, 4), numpy.float32))
    assert cli("run", package, "--input", tmp_path / "all.npz", "--json").document()["outputs"][0]["max"] == 2.5


def test_shape_of_the_manifest_with_a_chosen_size(cli: Callable[..., Any], package: Path) -> None:
    done = cli("run", package, "--input", "x=random", "--dim", "s0=5", "--json")
    assert done.document()["outputs"][0]["shape"] == [5, 4]


def test_same_seed_same_numbers(cli: Callable[..., Any], package: Path) -> None:
    means = [
        cli("run", package, "--input", "x=random", "--seed", seed, "--json").document()["outputs"][0]["mean"]
        for seed in (1, 1, 2)
    ]
    assert means[0] == means[1] != means[2]


def test_chosen_method(cli: Callable[..., Any], two_methods: Path) -> None:
    done = cli("run", two_methods, "--method", "decode", "--input", "x=zeros", "--json")
    assert done.document()["method"] == "decode"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--input: x not given; pass --input x=FILE.npy or --input x=random"),
        (("--input", "y=zeros"), "--input: the method has no input 'y', it takes x"),
        (("--input", "x=no.npy"), "--input no.npy: there is no such file"),
        (
            ("--input", "x=model.onnx"),
            "--input model.onnx: expected a .npy or .npz file, or random, zeros or ones (random:float32[2,3])",
        ),
        (("--input", "=zeros"), "--input =zeros: the name before '=' is empty"),
        (("--input", "x=zeros", "--input", "x=ones"), "--input: 'x' is given twice"),
        (("--input", "zeros", "--input", "ones"), "--input: 2 inputs without a name for 1 inputs to fill"),
        (
            ("--input", "x=zeros:float32"),
            "--input zeros:float32: expected random, zeros or ones, with a dtype and a shape such as "
            "random:float32[2,3], and for integers with bounds such as random:int64[2,3]:0..99",
        ),
        (
            ("--input", "x=random:int64[2]:5..3"),
            "--input random:int64[2]:5..3: the bounds 5..3 are the wrong way round",
        ),
        (("--input", "x=zeros:floot[2]"), "dtype 'floot' is not known"),
        (("--input", "x=zeros", "--dim", "s9=3"), "--dim s9=3: the method has no such dimension, there are: s0"),
        (("--input", "x=zeros", "--dim", "s0=65"), "--dim s0=65: expected 2 to 64"),
        (("--input", "x=zeros", "--dim", "s0=x"), "--dim s0=x: expected NAME=SIZE such as batch=16"),
    ],
)
def test_errors(cli: Callable[..., Any], package: Path, arguments: tuple[str, ...], message: str) -> None:
    done = cli("run", package, *arguments)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"untorch: {message}\n"


def test_damaged_array_file(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"no array")
    done = cli("run", package, "--input", f"x={tmp_path}/x.npy")
    assert done.code == 1
    assert done.err.startswith(f"untorch: --input {tmp_path}/x.npy: cannot be read: ")


def test_pickles_are_not_read(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    numpy.save(tmp_path / "x.npy", numpy.array([object()], dtype=object), allow_pickle=True)
    done = cli("run", package, "--input", f"x={tmp_path}/x.npy")
    assert done.code == 1
    assert "cannot be read" in done.err


def test_wrong_dtype_is_the_runtimes_error(cli: Callable[..., Any], package: Path) -> None:
    done = cli("run", package, "--input", "x=zeros:float64[2,4]")
    assert done.code == 1
    assert "forward" in done.err
    assert "float64" in done.err


def test_several_methods_need_a_choice(cli: Callable[..., Any], two_methods: Path) -> None:
    done = cli("run", two_methods, "--input", "x=zeros")
    assert done.err == f"untorch: {two_methods} has several methods, choose one with --method: decode, encode\n"
