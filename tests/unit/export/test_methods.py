"""What export() is asked for, method by method."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import untorch
from untorch.archive import MANIFEST, ArchiveReader
from untorch.export import ExportOptions, OptionError, export
from untorch.export.method import Method
from untorch.export.methods import plan_methods, read_methods
from untorch.export.move import Movers
from untorch.export.target import CpuTarget, CudaTarget
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError
from untorch.runtime.names import reserved_method_names

X = torch.randn(2, 16)


def read(entry: Any) -> Any:
    [request] = read_methods(methods={"a": entry})
    return request


def plans(*entries: Any, device: str = "cpu", arch: str | None = None, **options: Any) -> list[list[Method]]:
    """The planned methods of each entry, one a target."""
    requests = read_methods(methods={f"m{i}": entry for i, entry in enumerate(entries)})
    planned = plan_methods(requests, device, arch, ExportOptions(**options))
    return [[method for method in planned if method.name == f"m{i}"] for i in range(len(entries))]


def targets(methods: list[Method]) -> list[tuple[str | None, str]]:
    return [(method.target.architecture, method.target.gpu.name) for method in methods]  # type: ignore[attr-defined]


def entry(**others: Any) -> dict[str, Any]:
    return {"model": nn.Linear(16, 16), "args": (X,), **others}


def test_the_forms_of_an_entry() -> None:
    model = nn.Linear(16, 16)
    program = torch.export.export(model, (X,))
    assert read((model, (X,))).method.model is model
    assert read(program).method.args is None
    assert read({"model": program}).method.model is program
    request = read(entry(device="cuda", arch="sm_90", options={"strict": True}))
    assert (request.device, request.arch, request.options) == ("cuda", "sm_90", {"strict": True})
    requests = read_methods(model, (X,))
    assert [r.method.name for r in requests] == ["forward"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (entry(devise="cpu"), "method 'a': unknown keys 'devise'; known are model, args, .*, device, arch, options"),
        ({"args": (X,)}, "method 'a': the key 'model' is missing"),
        (entry(options=["strict"]), "method 'a': options: expected a dictionary of fields of ExportOptions, got list"),
        (3, r"method 'a': expected \(model, args\), a dictionary or an ExportedProgram, got int"),
    ],
)
def test_wrong_entries(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read(value)


RESERVED = (
    "reset",
    "close",
    "memory",
    "path",
    "device",
    "methods",
    "session",
    "fork",
    "manifest",
    "is_stock",
    "nbytes",
)


@pytest.mark.parametrize("name", [*RESERVED, "program"])
def test_names_that_program_or_session_has(name: str) -> None:
    assert name in reserved_method_names()
    with pytest.raises(InvalidArgumentError) as caught:
        read_methods(methods={name: (nn.Linear(16, 16), (X,))})
    assert str(caught.value) == (
        f"export: method {name!r}: untorch.Program or untorch.Session has an attribute {name!r}, which would hide the "
        f"method: use another name"
    )


def test_reserved_names_are_the_classes_own() -> None:
    found = {name for owner in (untorch.Program, untorch.Session) for name in dir(owner) if not name.startswith("_")}
    assert reserved_method_names() == found
    assert not {"forward", "encode", "decode"} & found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
def test_levels_of_cpus() -> None:
    [codes] = plans(entry(), cpu=("x86-64-v3", "x86-64-v4"))
    assert [method.target.host.name for method in codes] == ["x86-64-v3", "x86-64-v4"]
    assert [method.target.code_name for method in codes] == ["x86-64-v3", "x86-64-v4"]
    [[portable]] = plans(entry(), cpu=("portable",))
    assert portable.target.host.name == "x86-64-v3"
    for levels, device, text in (
        ((), "cpu", "option cpu: expected a level, or a list of them, got an empty one"),
        (("portable", "x86-64-v3"), "cpu", "option cpu: a level is there twice: x86-64-v3, x86-64-v3"),
        (("x86-64-v3", "x86-64-v4"), "cuda", "option cpu: several levels are for device='cpu': give one"),
    ):
        with pytest.raises(OptionError, match=re.escape(text)):
            plans(entry(), cpu=levels, device=device, arch="H200" if device == "cuda" else None)


def test_a_methods_own_choices() -> None:
    [[own], [common]] = plans(
        entry(options={"attention": "math", "cpu": "x86-64-v3"}), entry(), attention="native", fold_limit=7
    )
    assert (own.options.attention, own.options.fold_limit, own.target.host.name) == ("math", 7, "x86-64-v3")
    assert (common.options.attention, common.options.fold_limit, common.target.host.name) == ("native", 7, "x86-64-v3")
    gpu, [cpu], other = plans(entry(), entry(device="cpu"), entry(arch="A100"), device="cuda", arch="H200")
    assert isinstance(cpu.target, CpuTarget) and cpu.target.architecture is None
    assert targets(gpu) == [("sm_90", "H200")]
    assert [method.target.architecture for method in other] == ["sm_80"]
    only, [cpu] = plans(entry(device="cuda", arch=["sm_90", "L4"]), entry())
    assert isinstance(cpu.target, CpuTarget) and targets(only) == [("sm_90", "H100"), ("sm_89", "L4")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": True}, "method 'm0': verify is an option of the whole file"),
        ({"progress": False}, "method 'm0': progress is an option of the whole file"),
        (
            {"quantize": "int4"},
            "method 'm0': quantize is an option of the whole file: options.quantize has names of met",
        ),
        ({"atention": "math"}, "method 'm0': unknown option 'atention': did you mean 'attention'"),
        ({"attention": "flash"}, "method 'm0': option attention: expected one of"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plans(entry(options=options))


def test_a_wrong_device() -> None:
    with pytest.raises(UnsupportedError, match="device: expected 'cpu', 'cuda' or 'cuda:<index>', got 'gpu'"):
        plans(entry(device="gpu"))
    with pytest.raises(InvalidArgumentError, match="arch='sm_90' .* device must be 'cuda', got 'cpu'"):
        plans(entry(arch="sm_90"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_methods_of_a_file_differ(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU()).eval()
    report = export(
        methods={
            "packed": (model, (X,)),
            "plain": {"model": model, "args": (X,), "options": {"pack_linears": False}},
            "gpu": {"model": model, "args": (X,), "device": "cuda", "arch": "sm_90"},
        },
        path=tmp_path / "a.pt2",
        progress=False,
    )
    assert "aoti_torch_cpu_untorch_packed_linear" in report.methods["packed"].operators
    assert not [name for name in report.methods["plain"].operators if "packed_linear" in name]
    with ArchiveReader(report.path) as archive:
        manifest = json.loads(archive.read(MANIFEST))
    methods = manifest["methods"]
    assert {name: m["device"] for name, m in methods.items()} == {"packed": "cpu", "plain": "cpu", "gpu": "cuda"}
    assert methods["plain"]["options"]["pack_linears"] is False and methods["packed"]["options"]["pack_linears"] is True
    used = [{c["weight"] for c in methods[name]["constants"]} for name in ("plain", "gpu")]
    assert used[0] == used[1]
    with pytest.raises(InvalidArgumentError, match="method 'gpu' was compiled for cuda and cannot run on cpu"):
        untorch.load(report.path, device="cpu")
    # Which GPU is meant says nothing about the methods for the CPU; here there is none.
    with pytest.raises(UnsupportedError, match="method 'gpu' was compiled for cuda"):
        untorch.load(report.path, device="cuda")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_of_the_cpu_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU()).eval()
    methods = {"a": (model, (X,)), "b": {"model": model, "args": (X,), "options": {"cpu": "x86-64-v3"}}}
    export(methods=methods, path=tmp_path / "a.pt2", progress=False)
    with untorch.load(tmp_path / "a.pt2") as program, torch.no_grad():
        for name in methods:
            numpy.testing.assert_allclose(program[name](X.numpy()), model(X).numpy(), rtol=1e-5, atol=1e-5)


def test_what_methods_share_is_moved_once() -> None:
    model = nn.Linear(16, 16)
    movers = Movers()
    gpu = CudaTarget("sm_90", "meta")
    moved = [movers.move(Method(name, model, (X,), target=gpu)) for name in ("a", "b")]
    assert isinstance(moved[0].model, nn.Linear) and isinstance(moved[1].model, nn.Linear)
    assert moved[0].model.weight is moved[1].model.weight and moved[0].model.weight.is_meta
    assert moved[0].args is not None and moved[0].args[0].is_meta and not model.weight.is_meta


def test_a_stage_is_set_once_and_not_read_before() -> None:
    method = Method("a", nn.Linear(16, 16), (X,))
    with pytest.raises(AssertionError, match="method 'a': traced is not set yet"):
        _ = method.module
    method.traced = "once"  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="method 'a': traced is set already"):
        method.traced = "twice"  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore")
def test_the_forecast_follows_each_method() -> None:
    from untorch.cli.forecast import forecast

    found = forecast(None, {"methods": {"a": entry(), "b": entry(device="cuda", arch="sm_90")}})
    names = [[item["name"] for item in method["fallbacks"]] for method in found["methods"]]
    assert all(name.startswith("aoti_torch_cpu_") for name in names[0])
    assert names[1] and all(name.startswith("aoti_torch_cuda_") for name in names[1])
    with pytest.raises(InvalidArgumentError, match="method 'a': unknown keys 'devise'"):
        forecast(None, {"methods": {"a": entry(devise="cuda")}})
