"""untorch export: options, scripts, and one real export in a process of its own."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.warm_process import run_warm
from untorch.cli.export import parse_options
from untorch.cli.script import export_arguments, load_models
from untorch.runtime.errors import InvalidArgumentError, ModelError

from .test_errors import run_process

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

SCRIPT = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.relu(self.linear(x))

def build():
    torch.manual_seed(0)
    return Net().eval(), (torch.ones(2, 4),)

def large():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3)).eval(), (torch.ones(2, 64),)

class Sorter(torch.nn.Module):
    def forward(self, x):
        return torch.ops.shop.discount(x)

def unknown():
    torch.library.define("shop::discount", "(Tensor x) -> Tensor")
    torch.library.register_fake("shop::discount", lambda x: torch.empty_like(x))
    torch.library.impl("shop::discount", "CPU", lambda x: x * 0.9)
    return Sorter(), (torch.ones(3),)
"""


def export_warm(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``untorch export`` in another process, which ends with it."""
    return run_warm(["-m", "untorch", "export", *arguments])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "models_of_test.py"
    path.write_text(SCRIPT)
    return path


def plain_script(folder: Path, text: str) -> Path:
    path = folder / "plain_models.py"
    path.write_text(text)
    return path


def test_options() -> None:
    texts = [
        "verify=True",
        "verify_tolerance=1e-2",
        "wrapper_optimisation=O2",
        "inductor.cpp.simdlen=8",
        "inductor.x=none",
    ]
    assert parse_options(texts) == {
        "verify": True,
        "verify_tolerance": 0.01,
        "wrapper_optimisation": "O2",
        "inductor": {"cpp.simdlen": 8, "x": None},
    }
    assert parse_options(['inductor={"a": [1]}']) == {"inductor": {"a": [1]}}


@pytest.mark.parametrize("text", ["verify", "=1"])
def test_malformed_option(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_options([text])
    assert str(caught.value) == f"--option {text}: expected NAME=VALUE, such as pack_linears=false"


def test_option_as_a_whole_and_in_parts() -> None:
    with pytest.raises(InvalidArgumentError, match="inductor was given as a whole before"):
        parse_options(["inductor=1", "inductor.x=1"])


def test_forms_of_what_a_function_returns() -> None:
    model = object()
    assert export_arguments((model, (1,)), "s:f") == (model, {"args": (1,)})
    assert export_arguments((model, (1,), {"k": 2}), "s:f") == (model, {"args": (1,), "kwargs": {"k": 2}})
    assert export_arguments((model, (1,), None), "s:f") == (model, {"args": (1,)})
    keywords = {"model": model, "args": (1,), "dynamic_shapes": {"x": None}, "kwargs": None}
    assert export_arguments(keywords, "s:f") == (model, {"args": (1,), "dynamic_shapes": {"x": None}})
    methods = {"a": (model, (1,)), "b": (model, (1,), {"k": 2})}
    assert export_arguments(methods, "s:f") == (
        None,
        {"methods": {"a": (model, (1,)), "b": {"model": model, "args": (1,), "kwargs": {"k": 2}}}},
    )
    assert export_arguments({"model": (model, (1,))}, "s:f") == (None, {"methods": {"model": (model, (1,))}})


@pytest.mark.parametrize(("value", "what"), [(1, "a value of type int"), ((1,), "a tuple of 1"), ({}, "a dict of 0")])
def test_other_forms(value: Any, what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"s:f returned {what}, expected "):
        export_arguments(value, "s:f")


def test_script_runs_with_its_own_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("value = 7")
    path = plain_script(tmp_path, "import beside_it\nfrom dataclasses import dataclass\n"
                        "@dataclass\nclass C:\n    x: int\ndef build(): return C(beside_it.value)")  # fmt: skip
    assert load_models(f"{path}:build").x == 7


def test_module_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_models.py").write_text("def build(): return 5")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert load_models("some_models:build") == 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("model.py", "model.py: expected SCRIPT:FUNCTION, such as model.py:build or package.module:build"),
        (":build", ":build: expected SCRIPT:FUNCTION, such as model.py:build or package.module:build"),
        ("no_such.py:build", "no_such.py: there is no such file"),
        ("no_such_module:build", "no_such_module: there is no such module (a file's name ends in .py)"),
        ("no_such.module:build", "no_such.module: there is no such module (a file's name ends in .py)"),
    ],
)
def test_wrong_sources(spec: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load_models(spec)
    assert str(caught.value) == message


def printed(document: dict[str, Any], verbose: bool) -> str:
    from rich.console import Console

    from untorch.cli.export import _render

    console = Console(width=200, file=io.StringIO())
    _render(console, document, verbose)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_passes_that_changed_something_are_shown() -> None:
    def made(name: str, changed: list[str], skipped: dict[str, str], not_run: str | None = None) -> dict[str, Any]:
        return {"name": name, "changed": changed, "skipped": skipped, "not_run": not_run}

    passes = [
        made("pack_linears", ["linear", "linear_1"], {"linear_2": "too small"}), made("fold_constants", [], {}),
        made("repack_int4", [], {}, "it is for cuda"),
    ]  # fmt: skip
    method = {
        "name": "forward", "inputs": [], "outputs": [], "operators": [], "passes": passes, "differences": [],
        "quantization": None,
    }  # fmt: skip
    document = {
        "methods": [method], "seconds": {"write": 0.5}, "file": "m.pt2", "file_bytes": 2048, "weight_bytes": 1024,
        "external_files": [], "calls": {"python": "p", "command": "untorch run m.pt2 cat.jpg"},
    }  # fmt: skip
    lines = printed(document, verbose=False).splitlines()
    assert [line for line in lines if line.startswith("pass")] == [
        "pass pack_linears: changed: linear, linear_1", "passes that changed nothing: 2 (--verbose lists them)",
    ]  # fmt: skip
    assert lines[-2:] == ["written  m.pt2 (2.0 KiB, weights 1.0 KiB)", "next     untorch run m.pt2 cat.jpg"]
    lines = printed(document, verbose=True).splitlines()
    assert [line for line in lines if line.startswith("pass")] == [
        "pass pack_linears: changed: linear, linear_1; skipped: {'linear_2': 'too small'}",
        "pass fold_constants: nothing to do",
        "pass repack_int4: not run: it is for cuda",
    ]


@needs_torch
def test_what_a_folder_lacks_is_said(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    done = cli("export", "no_such_folder", "-o", tmp_path / "m.pt2", "--json")
    text = (
        "no_such_folder: there is no such folder; expected a Hugging Face folder, or SCRIPT:FUNCTION such as model.py:"
    )
    assert done.err == f"untorch: {text}build\n"
    assert done.document()["error"]["type"] == "FileMissingError"
    for task in ((), ("--task", "text-generation"), ("--task", "fill-mask")):
        done = cli("export", tmp_path / "none", "-o", tmp_path / "m.pt2", *task)
        assert done.code == 1 and "there is no" in done.err and str(tmp_path / "none") in done.err
    done = cli("export", tmp_path, "-o", tmp_path / "missing" / "m.pt2", "--stream-weights")  # before anything is read
    assert done.code == 1 and f"cannot write {tmp_path / 'missing' / 'm.pt2'}: No such file" in done.err
    for dtype, hint in (("bf16", "; did you mean bfloat16?"), ("FP16", "; did you mean float16?"), ("q", "")):
        done = cli("export", tmp_path, "-o", tmp_path / "m.pt2", "--dtype", dtype)
        assert done.code == 2
        assert f"expected float32, bfloat16, float16, got {dtype}{hint}; see untorch export --help" in done.err


def test_missing_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = plain_script(tmp_path, "value = 3\ndef build(): pass\ndef _hidden(): pass")
    with pytest.raises(InvalidArgumentError) as caught:
        load_models(f"{path}:bild")
    assert str(caught.value) == f"{path} has no function 'bild', there are: build"
    with pytest.raises(InvalidArgumentError) as caught:
        load_models(f"{path}:value")
    assert str(caught.value) == f"{path}: 'value' is no function, it has the type int"


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        ("def build():\n    raise KeyError('a')", 2, "KeyError: 'a'"),
        ("import json\n\ndef build():\n    return json.loads('{')", 4, "JSONDecodeError: Expecting property name"),
        ("def build(: pass", None, "SyntaxError: "),
    ],
)
def test_failing_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: int | None, error: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = plain_script(tmp_path, text)
    with pytest.raises(ModelError) as caught:
        load_models(f"{path}:build")
    assert error in str(caught.value)
    if line is not None:
        # The innermost line of the user's own, not that of the library that it called.
        assert f" failed at {path}:{line}: " in str(caught.value)


def test_without_torch(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = cli("export", "model.py:build", "-o", tmp_path / "m.pt2")
    assert (done.code, done.out) == (1, "")
    assert done.err == "untorch: export needs PyTorch: pip install 'untorch[export]'\n"


def test_output_is_missing(cli: Callable[..., Any]) -> None:
    done = cli("export", "model.py:build")
    assert done.code == 2
    assert done.err == (
        "untorch: Invalid value for --output: name the file to write, such as -o model.pt2; see untorch export --help\n"
    )


@needs_torch
def test_unknown_option_before_the_script_runs(tmp_path: Path) -> None:
    done = export_warm("no_such.py:build", "-o", tmp_path / "m.pt2", "--option", "verfy=true")
    assert done.returncode == 1
    assert done.stderr == "untorch: unknown option 'verfy': did you mean 'verify'?\n"


@pytest.mark.slow
@needs_torch
def test_check(script: Path) -> None:
    done = export_warm(f"{script}:build", "--check", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    [method] = document["methods"]
    called = method.pop("fallbacks")
    assert document == {
        "source": f"{script}:build",
        "methods": [{"name": "forward", "operators": {"aten.linear.default": 1, "aten.relu.default": 1}}],
        "missing": [],
    }
    assert called
    for item in called:
        assert set(item) == {"operator", "kind", "name", "served", "sources", "todo"}
        assert item["served"] is True
        assert item["name"].startswith("aoti_torch_cpu_")


@pytest.mark.slow
@needs_torch
def test_check_names_what_is_missing(script: Path) -> None:
    done = export_warm(f"{script}:unknown", "--check", "--json")
    assert done.returncode == 1, done.stderr
    (missing,) = json.loads(done.stdout)["missing"]
    assert (missing["method"], missing["kind"], missing["name"]) == ("forward", "kernel", "shop::discount")
    assert any("torch.ops.shop.discount" in line for line in missing["sources"])


@pytest.mark.slow
@needs_torch
def test_export_then_run(script: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    path = tmp_path / "net.pt2"
    done = run_process("export", f"{script}:build", "-o", path, "--cpu", "x86-64-v3", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {
        "source", "file", "file_bytes", "weight_bytes", "external_files", "external_bytes", "seconds", "methods", "calls",
    }  # fmt: skip
    assert (document["external_files"], document["external_bytes"]) == ([], 0)
    assert document["file_bytes"] == path.stat().st_size
    assert document["calls"]["command"] == f"untorch run {path} --input x=random"
    (method,) = document["methods"]
    assert set(method) == {"name", "inputs", "outputs", "operators", "passes", "differences", "quantization"}
    assert method["quantization"] is None
    assert method["inputs"][0]["name"] == "x"
    result = cli("run", path, "--input", "x=ones", "--output", tmp_path, "--json")
    assert result.code == 0, result.err
    (output,) = result.document()["outputs"]
    assert output["shape"] == [2, 3]
    assert numpy.load(output["file"]).min() >= 0


@needs_torch
@pytest.mark.slow
def test_cross_compilation(script: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    source, output = f"{script}:build", tmp_path / "gpu.pt2"
    done = export_warm(source, "-o", str(output), "--device", "cuda", "--arch", "sm_90", "--arch", "A100", "--json")
    assert done.returncode == 0, done.stderr
    [method] = cli("inspect", output, "--json").document()["methods"]
    assert (method["device"], method["gpu_architectures"]) == ("cuda", ["sm_90", "sm_80"])
    assert all(entry["served"] for entry in method["operators"])
    done = export_warm(source, "--check", "--device", "cuda", "--arch", "sm_90", "--json")
    assert done.returncode == 0 and not json.loads(done.stdout)["missing"]
    refused = cli("export", source, "-o", output, "--arch", "sm_90")
    assert refused.code != 0 and "device must be 'cuda', got 'cpu'" in refused.err


@needs_torch
@pytest.mark.slow
def test_quantize(script: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    path = tmp_path / "net.pt2"
    command = (f"{script}:large", "--quantize", "int4", "--option", "quantize.group_size=32")
    wrong = cli("export", *command, "--option", "quantize.method=gptq", "-o", path)
    assert wrong.err == "untorch: option quantize: method: expected one of 'hqq', 'rtn', 'symmetric', got 'gptq'\n"

    done = export_warm(*command, "--check", "--json")
    [method] = json.loads(done.stdout)["methods"]
    assert method["operators"]["untorch.int4_linear.default"] == 1
    called = {item["name"]: item["served"] for item in method["fallbacks"]}
    assert called["aoti_torch_cpu_int4_linear"]

    done = export_warm(*command, "-o", path, "--verify", "--stream-weights")
    assert done.returncode == 0, done.stderr
    assert "quantised: 1 weights, 10.0 KiB → 3.8 KiB, largest error 0.0" in done.stdout
    assert "(0); left alone: 2 (it would grow from 480 to 768 bytes)" in done.stdout
    (method,) = cli("inspect", path, "--json").document()["methods"]
    assert method["quantization"]["weights"] == 1
    result = cli("run", path, "--input", "random", "--output", tmp_path, "--json")
    assert result.document()["outputs"][0]["shape"] == [2, 3]
