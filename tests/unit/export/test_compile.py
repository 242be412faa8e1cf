"""Tests of export() from end to end with small models."""

from __future__ import annotations

import contextlib
import copy
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import untorch
from untorch.archive import ALIGNMENT, ArchiveReader
from untorch.export import CompileError, ExportReport, OptionError, UnsupportedOperatorsError, VerificationError, export
from untorch.export.compile import temporary_folder
from untorch.export.host_cpu import compiler_features, resolve_host_cpu
from untorch.export.library import find_runtime_library
from untorch.export.verify import compare, from_numpy, to_numpy
from untorch.runtime.elf import parse_elf, read_elf
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

if "aoti_torch_cpu_untorch_packed_linear" not in read_elf(find_runtime_library()).exported():
    pytest.skip("libuntorch.so has no packed linear", allow_module_level=True)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.register_buffer("calls", torch.zeros(16))

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        self.calls += 1
        y = self.down(torch.nn.functional.gelu(self.up(x))) + x
        return {"y": y + more["shift"], "calls": self.calls.clone(), "none": None}


class Decoder(nn.Module):
    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.up = encoder.up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


LOGGED: list[str] = []  # while ``made`` was exported


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What the logger of the package is given."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("untorch")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportReport, Encoder]:
    torch.manual_seed(0)
    encoder = Encoder().eval()
    path = tmp_path_factory.mktemp("export") / "model.pt2"
    batch = torch.export.Dim("batch", min=2, max=64)
    more = {"shift": torch.randn(4, 32)}
    shapes = {"x": {0: batch}, "more": {"shift": {0: batch}}}
    encode = {"model": encoder, "args": (torch.randn(4, 32), more), "dynamic_shapes": shapes}
    methods = {"encode": encode, "decode": (Decoder(encoder), (torch.randn(3, 32),))}
    with warnings.catch_warnings(), logged() as records:
        warnings.simplefilter("ignore")
        report = export(methods=methods, path=path, verify=True, progress=False)
    LOGGED[:] = records
    return path, report, encoder


@pytest.mark.slow
def test_the_report(made: tuple[Path, ExportReport, Encoder]) -> None:
    path, report, _ = made
    assert report.path == path
    assert report.nbytes == path.stat().st_size
    encode = report.methods["encode"]
    assert encode.passes[-1].changed == ["linear + gelu", "linear_1 + add"]
    assert [d.name for d in encode.differences] == ["y", "calls"]
    assert all(d.max_rel < 1e-5 for d in encode.differences)
    assert "aoti_torch_cpu_untorch_packed_linear" in encode.operators
    assert {"encode: torch.export", "encode: AOTInductor", "write", "verify"} <= report.seconds.keys()


def test_the_logger_tells_of_methods(made: tuple[Path, ExportReport, Encoder]) -> None:
    _, report, _ = made
    encode, decode = LOGGED
    count = len(report.methods["encode"].operators)
    assert encode == f"compiled method encode for cpu: {count} functions of the runtime, kernels by name: none"
    assert decode.startswith("compiled method decode for cpu: ")


def test_the_manifest_and_the_library(made: tuple[Path, ExportReport, Encoder]) -> None:
    path, _, encoder = made
    with ArchiveReader(path) as archive:
        archive.verify()
        assert all(entry.offset % ALIGNMENT == 0 for entry in archive)
        assert not any(entry.name.endswith(".cpp") for entry in archive)
        manifest = archive.manifest()
        encode, decode = manifest["methods"]["encode"], manifest["methods"]["decode"]
        library = parse_elf(archive.read(encode["library"]))
        assert "libuntorch.so" in library.needed
        assert not any("torch_" in name or name == "libtorch.so" for name in library.needed)
        constants = {c["fqn"]: c for c in encode["constants"]}
        assert set(constants) == {"up.bias", "down.bias", "up.weight_packed", "down.weight_packed", "calls"}
        assert [fqn for fqn, c in constants.items() if c["mutated"]] == ["calls"]
        shared = {c["fqn"]: c["weight"] for c in decode["constants"]}
        assert shared == {fqn: constants[fqn]["weight"] for fqn in ("up.bias", "up.weight_packed")}
        bias = constants["down.bias"]
        stored = numpy.frombuffer(archive.read(manifest["weights"][bias["weight"]]["file"]), numpy.float32)
        assert numpy.array_equal(stored, encoder.down.bias.detach().numpy())
    assert [i["name"] for i in encode["inputs"]] == ["x", "more['shift']"]
    assert encode["inputs"][0]["shape"][0]["max"] == 64
    assert encode["outputs"][2] is None
    assert encode["cpu"]["target"] == "x86-64-v3"
    assert encode["options"]["pack_linears"] is True


def test_it_runs(made: tuple[Path, ExportReport, Encoder]) -> None:
    path, _, encoder = made
    program = untorch.load(path)
    x, shift = torch.randn(9, 32), torch.randn(9, 32)
    with torch.no_grad():
        expected = copy.deepcopy(encoder)(x, {"shift": shift})
    result = program["encode"](x.numpy(), {"shift": shift.numpy()})
    assert list(result) == ["y", "calls", "none"]
    numpy.testing.assert_allclose(result["y"], expected["y"].numpy(), rtol=1e-5, atol=1e-5)
    assert result["none"] is None


@pytest.mark.slow
def test_a_missing_operator_stops_the_export_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @torch.library.custom_op("untorch_test::unknown", mutates_args=())
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    unknown.register_fake(torch.empty_like)

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.untorch_test.unknown(x) + 1

    def never(*_: Any) -> None:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr("untorch.export.compile.begin_inductor", never)
    path = tmp_path / "m.pt2"
    path.write_bytes(b"old")
    with pytest.raises(UnsupportedOperatorsError) as error:
        export(Model(), (torch.randn(3),), path, cpu="x86-64-v3", progress=False)
    assert "method 'forward': the runtime lacks 1 operator:" in str(error.value)
    assert "operator untorch_test::unknown" in str(error.value)
    assert "return torch.ops.untorch_test.unknown(x) + 1" in str(error.value)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt2"]


Linear = nn.Linear(16, 16)
PROGRAM = torch.export.export(nn.Linear(16, 16), (torch.ones(16),))
CALLS = "the call is export(model, args, path), or export(methods={…}, path=path) for several methods"


@pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning"
)  # of an import of torch's, in whichever test is first
@pytest.mark.parametrize(
    ("arguments", "fields", "error", "text"),
    [
        ((Linear, (torch.ones(16),), "m.onnx"), {}, InvalidArgumentError, "path: expected a path that ends in .pt2"),
        (
            (Linear, (torch.ones(16),)),
            {},
            InvalidArgumentError,
            "path: expected a path that ends in .pt2, got NoneType",
        ),
        ((Linear, torch.ones(16), "m.pt2"), {}, InvalidArgumentError, "got Tensor: write (x,) for one"),
        ((3, (), "m.pt2"), {}, InvalidArgumentError, "expected a torch.nn.Module or an ExportedProgram, got int"),
        (
            ("m.pt2", Linear),
            {},
            InvalidArgumentError,
            f"model: expected a torch.nn.Module or an ExportedProgram, got the path 'm.pt2': {CALLS}",
        ),
        (((), "m.pt2"), {}, InvalidArgumentError, f"ExportedProgram, got tuple: {CALLS}"),
        ((), {"path": "m.pt2"}, InvalidArgumentError, f"ExportedProgram, got NoneType: {CALLS}"),
        (
            (nn.Linear, (), "m.pt2"),
            {},
            InvalidArgumentError,
            "ExportedProgram, got the class Linear: give an object of",
        ),
        (
            (Linear, "m.pt2"),
            {},
            InvalidArgumentError,
            f"args: expected a tuple of example inputs, got the path 'm.pt2': {CALLS}",
        ),
        ((Linear, "m.pt2", (torch.ones(16),)), {}, InvalidArgumentError, f"inputs, got the path 'm.pt2': {CALLS}"),
        (
            (Linear, Linear, "m.pt2"),
            {},
            InvalidArgumentError,
            f"args: expected a tuple of example inputs, got Linear: {CALLS}",
        ),
        ((Linear, {"x": torch.ones(16)}, "m.pt2"), {}, InvalidArgumentError, f"example inputs, got dict: {CALLS}"),
        ((Linear, (torch.ones(16),), Linear), {}, InvalidArgumentError, f"ends in .pt2, got Linear: {CALLS}"),
        (
            (PROGRAM, "m.pt2"),
            {},
            InvalidArgumentError,
            "args: an ExportedProgram has its own inputs, got the path 'm.pt2': write export(program, path='m.pt2')",
        ),
        (
            ({"a": (Linear, ())}, "m.pt2"),
            {},
            InvalidArgumentError,
            "got dict: give several methods by name, export(methods={…}, path=path)",
        ),
        *(
            ((), {"methods": methods, "path": "m.pt2", **more}, InvalidArgumentError, text)
            for methods, more, text in (
                ({}, {}, "methods: expected at least one method, got an empty dictionary"),
                ([Linear], {}, "methods: expected a dictionary of methods by name, got list"),
                ({"a b": (Linear, ())}, {}, "must be a Python identifier, got 'a b'"),
                ({1: (Linear, ())}, {}, "must be a Python identifier, got 1"),
                (
                    {"class": (Linear, ())},
                    {},
                    "method 'class': it is a Python keyword, and program.class would be a syn",
                ),
                ({"a": 3}, {}, "method 'a': expected (model, args), a dictionary or an"),
                ({"a": {"modle": 1}}, {}, "method 'a': unknown keys 'modle'; known are model, args"),
                ({"a": {"args": ()}}, {}, "method 'a': the key 'model' is missing"),
                ({"a": (Linear, ())}, {"kwargs": {}}, "with methods=, leave out kwargs: each entry has its own"),
                (
                    {"a": (Linear, ())},
                    {"model": Linear, "args": ()},
                    "with methods=, leave out model, args: each entry",
                ),
            )
        ),
        ((Linear, (torch.ones(16),), "m.pt2"), {"device": "xpu"}, UnsupportedError, "device: expected 'cpu'"),
        ((Linear, (torch.ones(16),), "m.pt2"), {"verfy": True}, OptionError, "did you mean 'verify'?"),
        ((Linear, (torch.ones(15),), "m.pt2"), {}, CompileError, "method 'forward': torch.export failed: "),
        ((Linear, (torch.ones(16),), "none/m.pt2"), {}, FileNotFoundError, "does not exist"),
    ],
)
def test_errors(
    arguments: tuple[Any, ...], fields: dict[str, Any], error: type[Exception], text: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        export(*arguments, progress=False, **fields)
    assert text in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_temporary_folders_are_removed() -> None:
    with temporary_folder() as first, temporary_folder() as second:
        assert first != second
        (first / "file").write_text("x")
    assert not first.exists()
    assert not second.exists()


def test_features_of_the_targets() -> None:
    v3, v4 = (compiler_features(resolve_host_cpu(name), "g++") for name in ("x86-64-v3", "x86-64-v4"))
    assert {"avx2", "fma", "f16c", "bmi2"} <= set(v3)
    assert not any(feature.startswith("avx512") for feature in v3)
    assert set(v4) - set(v3) == {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    with pytest.raises(CompileError, match="no-such-compiler"):
        compiler_features(resolve_host_cpu("x86-64-v3"), "no-such-compiler")


def test_compare() -> None:
    one, two = torch.tensor([1.0, float("nan"), float("inf")]), torch.tensor([1.5, float("nan"), float("inf")])
    (difference,) = compare("f", [two], [one], ["y"], 1.0)
    assert (difference.name, difference.max_abs, difference.max_rel) == ("y", 0.5, 0.5)
    with pytest.raises(VerificationError, match=r"method 'f', output y: the largest difference from eager is 0\.5"):
        compare("f", [two], [one], ["y"], 0.1)
    with pytest.raises(VerificationError, match="expected 1 outputs, got 0"):
        compare("f", [], [one], ["y"], 1)
    with pytest.raises(VerificationError, match=r"expected float32\[3\], got float32\[2\]"):
        compare("f", [two[:2]], [one], ["y"], 1)
    with pytest.raises(VerificationError, match=r"expected None, got float32\[3\]"):
        compare("f", [two], [None], [None], 1)
    assert compare("f", [torch.empty(0)], [torch.empty(0)], ["y"], 1)[0].max_abs == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64])
def test_arrays_and_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(dtype).t()
    array = to_numpy(tensor)
    assert torch.equal(from_numpy(array, str(dtype).removeprefix("torch.")), tensor)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
@pytest.mark.parametrize("transposed", [False, True])
def test_a_complex_convolution_is_refused(transposed: bool, tmp_path: Path) -> None:
    layer = nn.ConvTranspose1d if transposed else nn.Conv1d
    model = layer(2, 3, 3, dtype=torch.complex64).eval()
    with pytest.raises(UnsupportedError) as caught:
        export(model, (torch.randn(1, 2, 9, dtype=torch.complex64),), tmp_path / "model.pt2", progress=False)
    text = str(caught.value)
    assert text.startswith("method 'forward': operator aten.conv")
    assert " of complex64 (" in text
    assert text.endswith(
        "): there is no convolution of complex numbers. Write it with real and imaginary parts: "
        "torch.complex(conv(x.real, w.real) - conv(x.imag, w.imag), conv(x.real, w.imag) + conv(x.imag, w.real))"
    )
    assert not (tmp_path / "model.pt2").exists()


_TWICE = """
import sys, torch
from torch import nn
from untorch.export import export
from untorch.quant import quantize

class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.scale = nn.Embedding(64, 32), nn.Parameter(torch.randn(32))
        self.linears = nn.ModuleList(nn.Linear(32, 32 * (i + 1), bias=False) for i in range(3))

    def forward(self, tokens):
        x = self.table(tokens)
        x = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return [linear(x) for linear in self.linears]

torch.manual_seed(0)
model = Three().eval()
quantize(model, "int4", group_size=32, method="rtn", progress=False)
for path in sys.argv[1:]:
    shapes = {"tokens": {1: torch.export.Dim("tokens", max=64)}}
    export(model, (torch.randint(0, 64, (1, 3)),), path, dynamic_shapes=shapes, int8_activations=True,
           passes={"merge_linears": False}, progress=False)
"""


@pytest.mark.slow
def test_what_a_process_compiled_before_makes_no_difference(tmp_path: Path) -> None:
    """Three layers read one result, which is computed once, also for the first operator of its kind."""
    paths = [str(tmp_path / name) for name in ("first.pt2", "second.pt2")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", _TWICE, *paths], check=True)
    first, second = (Path(path).read_bytes() for path in paths)
    assert first == second
