"""Packages made by PyTorch itself: alone, and beside PyTorch and its own loader in every order."""

from __future__ import annotations

import hashlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import untorch
from tests.attacks.craft import RealPackage
from untorch.archive import ArchiveReader

UNTORCH = """
import untorch
program = untorch.load(path)
check("untorch", program["model"](x))
"""
TORCH = """
import torch
check("torch", torch._inductor.aoti_load_package(path)(torch.from_numpy(x)).numpy())
"""
IMPORT = "import torch\n"
AGAIN = 'check("untorch again", program["model"](x))\n'
HEADER = """
import sys
import numpy as np
path = sys.argv[1]
x = np.arange(8, dtype=np.float32).reshape(2, 4)
want = x @ np.arange(12, dtype=np.float32).reshape(3, 4).T + np.float32([10, 20, 30])
def check(who, got):
    np.testing.assert_allclose(got, want, rtol=1e-5)
    print(who, "right")
"""


def run(script: str, path: pathlib.Path) -> list[str]:
    """Runs the script in a process of its own; its lines."""
    result = subprocess.run(
        [sys.executable, "-c", HEADER + script, str(path)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_weights_in_the_library(stock_linear: pathlib.Path) -> None:
    script = UNTORCH + "assert 'torch' not in sys.modules\nassert program.is_stock\nassert program.manifest == {}\n"
    assert run(script, stock_linear) == ["untorch right"]


@pytest.mark.slow
def test_weights_beside_the_library(stock_blob: pathlib.Path) -> None:
    assert run(UNTORCH, stock_blob) == ["untorch right"]


@pytest.mark.slow
@pytest.mark.parametrize("script", [IMPORT + UNTORCH, UNTORCH + IMPORT + AGAIN], ids=["before", "after"])
def test_beside_an_imported_torch(script: str, stock_linear: pathlib.Path) -> None:
    pytest.importorskip("torch")
    assert run(script, stock_linear)[0] == "untorch right"


@pytest.mark.slow
@pytest.mark.parametrize("script", [UNTORCH + TORCH + AGAIN, TORCH + UNTORCH], ids=["untorch first", "torch first"])
def test_beside_torchs_own_loader(script: str, stock_linear: pathlib.Path) -> None:
    pytest.importorskip("torch")
    assert {"untorch right", "torch right"} <= set(run(script, stock_linear))


def test_trees_aliases_and_none(stock_tree: pathlib.Path) -> None:
    a, b = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((3, 4), np.float32)
    with untorch.load(stock_tree) as program:
        assert program.methods == ["model"]
        assert program.forward is program["model"]
        assert program.forward.inputs == ()
        out = program({"a": a, "b": b}, scale=np.float32(2))
        np.testing.assert_array_equal(out["s"], (a + b) * 2)
        assert np.shares_memory(out["in"], a)
        np.testing.assert_array_equal(out["l"][0], a.sum(0))
        assert out["l"][1] is None
        total = np.empty((3, 4), np.float32)
        again = program({"a": a, "b": b}, scale=np.float32(2), out={"s": total, "in": None, "l": [None, None]})
        assert again["s"] is total
        with pytest.raises(untorch.InvalidArgumentError, match=r"out\[3\]: expected None, as the output is"):
            program({"a": a, "b": b}, scale=np.float32(2), out={"s": None, "in": None, "l": [None, total]})


def test_inputs_are_checked_against_the_source(stock_tree: pathlib.Path) -> None:
    a, one = np.zeros((3, 4), np.float32), np.float32(1)
    with untorch.load(stock_tree) as program:
        with pytest.raises(untorch.InvalidArgumentError, match=r"input '0': expected float32\[3, 4\], got float64"):
            program({"a": a.astype(np.float64), "b": a}, scale=one)
        with pytest.raises(untorch.InvalidArgumentError, match=r"got float32\[2, 4\]: dimension 0 must be 3"):
            program({"a": a[:2], "b": a}, scale=one)
        with pytest.raises(untorch.InvalidArgumentError, match="missing keyword arguments scale"):
            program({"a": a, "b": a})
        with pytest.raises(
            untorch.InvalidArgumentError, match=r"args\[0\]: expected a dict with 'a', 'b'; missing 'b'"
        ):
            program({"a": a}, scale=one)


def dynamic_inputs(batch: int, n: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(batch * 1000 + n)
    shapes = {"0": (batch, 4), "2": (n, 4), "3": (2 * n,), "4": (4, 1, 3)}
    inputs = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return inputs | {"1": random.integers(0, 9, batch), "2": inputs["2"].T}


def dynamic_result(inputs: dict[str, np.ndarray], n: int) -> np.ndarray:
    x, i, t, v, fixed = (inputs[str(number)].astype(np.float64) for number in range(5))
    return (x + t.sum(1)) * i[:, None] + (v[:n] - v[n:]).sum() + fixed.sum((1, 2))


@pytest.mark.parametrize(("batch", "n"), [(2, 6), (1, 6), (37, 6), (2, 1), (2, 700), (0, 6)])
def test_ranges_of_sizes_are_not_checked(batch: int, n: int, stock_dynamic: pathlib.Path) -> None:
    inputs = dynamic_inputs(batch, n)
    with untorch.load(stock_dynamic) as program:
        got = program["model"].run(inputs)[0]
    np.testing.assert_allclose(got, dynamic_result(inputs, n), rtol=2e-4, atol=2e-4)


WRONG_INPUTS = {
    "another batch": (
        {"1": lambda a: np.resize(a, 3)},
        r"input '1': .* dimension 0 must be 2, as s\d+ is in input '0'",
    ),
    "no double": ({"3": lambda a: a[:-1]}, r"input '3': .* dimension 0 must be 2L?\*s\d+ = 12"),
    "dtype": ({"1": lambda a: a.astype(np.int32)}, r"input '1': expected int64\[s\d+\], got int32\[2\]: convert it"),
    "rank": ({"0": lambda a: a[0]}, r"input '0': expected float32\[s\d+, 4\], got float32\[4\] \(1-D instead of 2-D\)"),
    "fixed size": ({"4": lambda a: a[:, :, :2]}, r"input '4': .* dimension 2 must be 3"),
    "rows": ({"0": lambda a: np.asfortranarray(a)}, r"input '0': .* it must be contiguous"),
    "columns": ({"2": lambda a: np.ascontiguousarray(a)}, r"input '2': .* with strides \[6, 1\]: stride 1 must be 4"),
}


@pytest.mark.parametrize("what", WRONG_INPUTS)
def test_what_the_code_relies_on_is_checked(what: str, stock_dynamic: pathlib.Path) -> None:
    changes, message = WRONG_INPUTS[what]
    inputs = dynamic_inputs(2, 6)
    with untorch.load(stock_dynamic) as program, pytest.raises(untorch.InvalidArgumentError, match=message):
        program["model"].run(inputs | {name: change(inputs[name]) for name, change in changes.items()})


@pytest.mark.slow
def test_the_environment_switches_the_checks(stock_dynamic: pathlib.Path) -> None:
    """Unset: ours; 0: none; 1: the library's own, too, whose ranges are narrower."""
    script = """
import os, sys
import numpy as np, untorch
sys.path.insert(0, sys.argv[2])
from test_stock import dynamic_inputs
method = untorch.load(sys.argv[1])["model"]
for batch, fixed in ((37, (4, 1, 3)), (2, (4, 3, 1))):
    try:
        method.run(dynamic_inputs(batch, 6) | {"4": np.ones(fixed, np.float32)})
        print("ran")
    except untorch.InvalidArgumentError as error:
        print(error)
"""
    results = {}
    for value in (None, "0", "1"):
        environment = dict(os.environ)
        environment.pop("AOTI_RUNTIME_CHECK_INPUTS", None)
        if value is not None:
            environment["AOTI_RUNTIME_CHECK_INPUTS"] = value
        command = [sys.executable, "-c", script, str(stock_dynamic), str(pathlib.Path(__file__).parent)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        results[value] = done.stdout.splitlines()
    assert results["0"] == ["ran", "ran"]
    assert results[None][0] == "ran"
    assert "dimension 1 must be 1" in results[None][1]
    assert "the inputs do not fit: " in results["1"][0]
    assert "dim value is too large at 0, expected to be <= 15" in results["1"][0]


def test_without_a_source_the_library_checks(stock_dynamic: pathlib.Path) -> None:
    package = RealPackage.read(stock_dynamic)
    assert any(name.endswith("wrapper.cpp") for name in package.files)
    bare = RealPackage({name: data for name, data in package.files.items() if not name.endswith(".cpp")})
    before = dict(os.environ)
    with untorch.load(bare.bytes()) as program:
        method = program["model"]
        np.testing.assert_allclose(
            method.run(dynamic_inputs(2, 6))[0], dynamic_result(dynamic_inputs(2, 6), 6), rtol=2e-4, atol=2e-4
        )
        with pytest.raises(untorch.InvalidArgumentError, match=r"the inputs do not fit: .* expected to be <= 15"):
            method.run(dynamic_inputs(37, 6))
        with pytest.raises(untorch.InvalidArgumentError, match=r"the inputs do not fit: .*unmatched dtype"):
            method.run(dynamic_inputs(2, 6) | {"1": np.zeros(2, np.int32)})
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= ConstantHandle(input_handles[3]);", "= Handle(input_handles[3]);"),
        ("aoti_torch_dtype_int64()", "aoti_torch_dtype_int65()"),
        ("_size[0] < 2) {", "_size[99999999999999999999] < 2) {"),
        ("::run_impl(", "::run_it("),
        ("inputs.clear();", ""),
        (', "input")', ', "output")'),
        ("*s", "/s"),
        ("*s", "*(((((((((((((((((((((((((((((((((((s"),
        ("{", ""),
    ],
)
def test_a_source_of_another_form(old: str, new: str, stock_dynamic: pathlib.Path) -> None:
    """What cannot be read is not checked, or the library checks; right inputs run, and nothing ends the process."""
    package = RealPackage.read(stock_dynamic)
    name = next(name for name in package.files if name.endswith("wrapper.cpp"))
    source = package.files[name].decode()
    assert old in source
    changed = RealPackage({**package.files, name: source.replace(old, new).encode()})
    inputs = dynamic_inputs(2, 6)
    with untorch.load(changed.bytes()) as program:
        np.testing.assert_allclose(program["model"].run(inputs)[0], dynamic_result(inputs, 6), rtol=2e-4, atol=2e-4)


def test_a_source_with_other_inputs_is_refused(stock_dynamic: pathlib.Path) -> None:
    package = RealPackage.read(stock_dynamic)
    name = next(name for name in package.files if name.endswith("wrapper.cpp"))
    source = package.files[name].replace(b"void check_input_1(", b"void check_another_1(")
    program = untorch.load(RealPackage({**package.files, name: source}).bytes())
    with pytest.raises(untorch.InvalidFileError, match="takes 5 inputs, the source beside it has 1"):
        program["model"].open()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64_t s", "int64_t " * 1_000_000 + "s"),
        ("int64_t s", "".join(f"int64_t a{i} = s;\n" for i in range(300_000)) + "int64_t s"),
        ("_size[0] < 2) {", "_size[0] < 2" + "if (" * 2_000_000 + ") {"),
        ("assert_size_stride(", "assert_size_stride(" * 400_000),
        (', "input")', ', "input")' * 700_000),
        ("{4L, 1L}", "{" + "(" * 2000 + "}"),
        ("void check_input_0(", "void check_input_0(" * 400_000),
    ],
)
def test_no_source_takes_long(old: str, new: str, stock_dynamic: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A search that begins anew at every place takes hours for these."""
    package = RealPackage.read(stock_dynamic)
    name = next(name for name in package.files if name.endswith("wrapper.cpp"))
    source = package.files[name].decode()
    assert old in source
    source = source.replace(old, new, 1)
    path = tmp_path / "model.pt2"
    path.write_bytes(RealPackage({**package.files, name: source.encode()}).bytes())
    script = "import sys, untorch; untorch.load(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=60)


@pytest.mark.slow
def test_strict_reading_takes_pytorchs_own_archives(stock_linear: pathlib.Path, stock_blob: pathlib.Path) -> None:
    """Zero sizes in local headers, data descriptors, padding: as PyTorch writes them, and not otherwise."""
    for path in (stock_linear, stock_blob):
        data = path.read_bytes()
        with ArchiveReader(path) as archive:
            archive.verify()
            for name, digest in archive.digests().items():
                assert digest == hashlib.sha256(archive.read(name)).hexdigest()
        with untorch.load(path, verify=True) as program, untorch.load(data, verify=True) as other:
            x = np.ones((2, 4), np.float32)
            np.testing.assert_array_equal(program["model"](x), other["model"](x))
        descriptor, padding = data.index(b"PK\x07\x08"), data.index(b"ZZZ")
        for at, text in (
            (descriptor + 4, "data descriptor"),
            (descriptor + 9, "data descriptor"),
            (padding, "padding"),
        ):
            changed = bytearray(data)
            changed[at] ^= 1
            with pytest.raises(untorch.InvalidFileError, match=text):
                untorch.load(bytes(changed))


def test_a_damaged_entry_of_a_stock_package_is_found(stock_linear: pathlib.Path) -> None:
    data = bytearray(stock_linear.read_bytes())
    with ArchiveReader(stock_linear) as archive:
        entry = next(entry for entry in archive if entry.name.endswith(".so"))
    data[entry.offset + entry.size - 1] ^= 1
    text = "has the checksum [0-9a-f]{8}, the zip directory says [0-9a-f]{8}"
    with pytest.raises(untorch.InvalidFileError, match=text):
        untorch.load(bytes(data), verify=True)
    with untorch.load(bytes(data)) as program, pytest.raises(untorch.InvalidFileError, match=text):
        program["model"].open()
