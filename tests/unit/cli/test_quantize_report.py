"""untorch quantize-report."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

SCRIPT = """
import torch

def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))

def pair():
    return module(), (torch.ones(2, 256),)

def methods():
    a = module()
    return {"encode": (a, (torch.ones(2, 256),)), "decode": {"model": torch.nn.Sequential(a[0]), "args": None}}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "models_to_quantise.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("function", ["module", "pair"])
def test_json(script: Path, cli: Callable[..., Any], function: str) -> None:
    done = cli("quantize-report", f"{script}:{function}", "--group-size", 64, "--quantize-method", "rtn", "--json")
    assert done.code == 0, done.err
    document = done.document()
    assert (document["group_size"], document["method"], document["plot"]) == (64, "rtn", None)
    [method] = document["methods"]
    [layer] = method["layers"]
    assert (layer["names"], layer["shape"]) == (["0"], [40, 256])
    assert (layer["before_bytes"], layer["after_bytes"]) == (40 * 256 * 4, 40 * 256 // 2 + 40 * 4 * 8)
    assert 0.03 < layer["error"] < 0.1
    assert method["skipped"] == {"2": "it would grow from 480 to 640 bytes"}
    assert (
        method["before_bytes"] - method["after_bytes"] == method["module_before_bytes"] - method["module_after_bytes"]
    )
    assert not math.isnan(method["seconds"])


def test_nvfp4_shows_the_error_of_rounding_to_nearest_too(script: Path, cli: Callable[..., Any]) -> None:
    document = cli("quantize-report", f"{script}:module", "--quantize", "nvfp4", "--json").document()
    assert (document["dtype"], document["group_size"], document["method"]) == ("nvfp4", 16, "search")
    [layer] = document["methods"][0]["layers"]
    assert 0.05 < layer["error"] < 0.95 * layer["rtn_error"] < 0.12
    assert layer["after_bytes"] == 40 * 256 // 2 + 40 * 256 // 16 + 40 * 4
    out = cli("quantize-report", f"{script}:module", "--quantize", "nvfp4").out
    assert "rtn error" in out
    assert f"{layer['error']:.4f}" in out
    assert f"{layer['rtn_error']:.4f}" in out
    assert (
        "rtn error"
        not in cli("quantize-report", f"{script}:module", "--quantize", "nvfp4", "--quantize-method", "rtn").out
    )


def test_text_and_patterns(script: Path, cli: Callable[..., Any]) -> None:
    out = cli("quantize-report", f"{script}:methods", "--include", "0").out
    assert "method encode" in out
    assert "method decode" in out
    assert "40 × 256" in out
    assert "weights     40.0 KiB → 5.6 KiB (0.141)" in out
    assert "left alone  2: not in include" in out
    done = cli("quantize-report", f"{script}:module", "--exclude", "x*")
    assert done.code == 1
    assert done.err == "untorch: method 'forward': exclude: 'x*' matches no linear layer; there are: 0, 2\n"
    assert cli("quantize-report", f"{script}:module", "-q").out == ""


def test_wrong_options_before_the_script_runs(cli: Callable[..., Any]) -> None:
    done = cli("quantize-report", "no_such.py:build", "--group-size", 48)
    assert done.err == "untorch: option quantize: group_size: expected one of 32, 64, 128, 256, got 48\n"
    done = cli("quantize-report", "no_such.py:build", "--quantize", "nvfp4", "--group-size", 32)
    text = "nvfp4 has blocks of 16, which cannot be chosen: leave it out, got 32"
    assert done.err == f"untorch: option quantize: group_size: {text}\n"
    done = cli("quantize-report", "no_such.py:build", "--quantize", "fp4")
    assert "option quantize: dtype: expected one of 'int4', 'int8', 'fp8', 'nvfp4', got 'fp4'" in done.err


@pytest.mark.parametrize(
    ("package", "arguments", "text"),
    [
        ("torch", (), "quantize-report needs PyTorch: pip install 'untorch[export]'"),
        ("matplotlib", ("--plot", "x.png"), "--plot needs matplotlib: pip install 'untorch[plot]'"),
    ],
)
def test_what_is_not_installed(
    package: str, arguments: tuple[str, ...], text: str, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a))
    done = cli("quantize-report", "no_such.py:build", *arguments)
    assert (done.code, done.err) == (1, f"untorch: {text}\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # matplotlib's own
def test_plot(script: Path, cli: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        path = tmp_path / f"errors.{ending}"
        done = cli("quantize-report", f"{script}:methods", "--plot", path, "--json")
        assert done.code == 0, done.err
        assert done.document()["plot"] == str(path)
        assert path.read_bytes().startswith(start)
    assert b"encode: 1 weights" in (tmp_path / "errors.svg").read_bytes() or sys.platform == "darwin"
    done = cli("quantize-report", f"{script}:methods", "--plot", tmp_path / "errors.xyz")
    assert done.code == 1
    assert done.err.startswith(f"untorch: --plot {tmp_path}/errors.xyz: Format 'xyz' is not supported")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
def test_a_recipe_with_the_sensitivity_of_layers(script: Path, cli: Callable[..., Any], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    done = cli(
        "quantize-report", f"{script}:pair", "--quantize", "int8", "--recipe", recipe, "--limit", 1e-9, "--fallback",
        "none", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    [method] = done.document()["methods"]
    [first] = json.loads(recipe.read_text())["rules"]
    assert first["match"] == "0"
    assert first["dtype"] == "none"  # above the limit
    assert first["sensitivity"] == pytest.approx(method["sensitivity"]["0"], rel=1e-3)
    assert 1e-4 < method["sensitivity"]["0"] < 0.1
    out = cli("quantize-report", f"{script}:methods", "--sensitivity", "--include", "0")
    assert "decode': sensitivity needs example inputs: return (model, args)" in out.err
    out = cli("quantize-report", f"{script}:pair", "--sensitivity").out
    assert "sensitivity" in out
    toml = tmp_path / "recipe.toml"
    assert cli("quantize-report", f"{script}:pair", "--recipe", toml).code == 0
    assert 'match = "0"\ndtype = "int4"' in toml.read_text()
    file = tmp_path / "model.pt2"
    done = cli("export", f"{script}:pair", "--recipe", toml, "-o", file, "--json")
    assert done.code == 0, done.err
    [layer] = done.document()["methods"][0]["quantization"]["layers"]
    assert (layer["names"], layer["quantized_dtype"]) == (["0"], "int4")
    done = cli("export", f"{script}:pair", "--recipe", toml, "--quantize", "int4", "-o", file)
    assert "is in the place of --quantize" in done.err


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_layers_for_gpus(script: Path, cli: Callable[..., Any], dtype: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    target = ("--target", "cuda") if dtype == "int8" else ()
    done = cli("quantize-report", f"{script}:pair", "--quantize", dtype, *target, "--recipe", recipe, "--json")
    assert done.code == 0, done.err
    document = done.document()
    assert document["target"] == "cuda"
    [method] = document["methods"]
    [layer] = method["layers"]
    assert (layer["quantized_dtype"], layer["packed_shape"]) == (dtype, [48, 256])
    assert layer["after_bytes"] == 48 * 256 + 48 * 4
    assert layer["error"] < (0.006 if dtype == "int8" else 0.03)
    assert 0 < method["sensitivity"]["0"] < (0.01 if dtype == "int8" else 0.04)
    [rule] = json.loads(recipe.read_text())["rules"]
    assert (rule["match"], rule["dtype"]) == ("0", dtype)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--quantize", "fp8", "--target", "cpu"),
            "--quantize fp8: it is for GPUs: leave --target cpu out, or take int8",
        ),
        (("--target", "gpu"), "--target gpu: expected cpu or cuda"),
        (
            ("--recipe", "a.json", "--limit", "0.1", "--fallback", "fp8"),
            "--fallback fp8: it is for GPUs: give --target",
        ),
        (("--recipe", "a.yaml"), "--recipe a.yaml: expected a name that ends in .json or .toml"),
        (("--limit", "0.1"), "--limit 0.1: it is for the recipe: name its file with --recipe"),
        (("--fallback", "int8"), "--fallback int8: it is for layers above a limit"),
        (("--fallback", "int3"), "--fallback int3: expected none, int8, fp8, int4 or nvfp4"),
    ],
)
def test_wrong_options_of_recipes(script: Path, cli: Callable[..., Any], arguments: tuple[str, ...], text: str) -> None:
    done = cli("quantize-report", f"{script}:pair", *arguments)
    assert done.code != 0
    assert text in done.err
