"""Packages made by PyTorch itself: alone, and beside PyTorch and its own loader in every order."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest

import untorch

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


def test_weights_beside_the_library(stock_blob: pathlib.Path) -> None:
    assert run(UNTORCH, stock_blob) == ["untorch right"]


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


def test_the_librarys_own_checks_are_argument_errors(stock_tree: pathlib.Path) -> None:
    a, one = np.zeros((3, 4), np.float32), np.float32(1)
    with untorch.load(stock_tree) as program:
        with pytest.raises(untorch.InvalidArgumentError, match=r"the inputs do not fit: .*unmatched dtype"):
            program({"a": a.astype(np.float64), "b": a}, scale=one)
        with pytest.raises(untorch.InvalidArgumentError, match=r"the inputs do not fit: .*unmatched dim value at 0"):
            program({"a": a[:2], "b": a}, scale=one)
        with pytest.raises(untorch.InvalidArgumentError, match="missing keyword arguments scale"):
            program({"a": a, "b": a})
        with pytest.raises(
            untorch.InvalidArgumentError, match=r"args\[0\]: expected a dict with 'a', 'b'; missing 'b'"
        ):
            program({"a": a}, scale=one)
