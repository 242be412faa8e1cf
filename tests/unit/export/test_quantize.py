"""The option ``quantize``: on a copy, by method, shared weights, the generated calls, and the file from end to end."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import untorch
from untorch.export import CompileError, ExportReport, OptionError, QuantizeOptions, export
from untorch.export.compile import generate_code
from untorch.export.coverage import refuse_other_devices
from untorch.export.method import Method
from untorch.export.options import ExportOptions
from untorch.export.quantize import describe_quantized, quantize_methods, quantized_module
from untorch.export.target import CpuTarget, resolve_targets
from untorch.export.tracing import trace_method
from untorch.export.verify import from_numpy, to_numpy
from untorch.progress import Progress
from untorch.quant import Int4Linear, Int8Linear, QuantizeRules, W8A8Linear, quantize, quantize_nvfp4
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(200, 99), nn.Linear(99, 200, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))) + x


class Decoder(nn.Module):
    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.first = encoder.up
        self.out = nn.Linear(99, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.first(x)))


def methods(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    encoder = Encoder().eval()
    decoder = Decoder(encoder).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    x = torch.randn(4, 200).to(dtype)
    return {
        name: {"model": model.to(dtype), "args": (x,), "dynamic_shapes": ({0: batch},)}
        for name, model in (("encode", encoder), ("decode", decoder))
    }


def inputs(entries: dict[str, Any]) -> list[Method]:
    return [Method(name, e["model"], e["args"], None, e["dynamic_shapes"]) for name, e in entries.items()]


def reports_of(made: list[Method]) -> dict[str, Any]:
    return {method.name: method.quantization for method in made if method.quantization is not None}


def quantised(entries: dict[str, Any], value: Any) -> tuple[list[Method], dict[str, Any]]:
    options = ExportOptions(quantize=value)
    made = quantize_methods(inputs(entries), options.quantize_methods(list(entries)), Progress(False))
    return made, reports_of(made)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {}),
        ("int4", dict.fromkeys("ab", QuantizeOptions("int4"))),
        ({"dtype": "int4", "group_size": 64}, dict.fromkeys("ab", QuantizeOptions("int4", 64))),
        ({"a": "int4"}, {"a": QuantizeOptions("int4")}),
        (
            {"a": None, "b": {"dtype": "int4", "method": "rtn", "exclude": "x"}},
            {"b": QuantizeOptions("int4", 128, "rtn", None, "x")},
        ),
        ("nvfp4", dict.fromkeys("ab", QuantizeOptions("nvfp4", 16, "search"))),
        (QuantizeOptions("int4", 64), dict.fromkeys("ab", QuantizeOptions("int4", 64))),
        ({"a": QuantizeOptions("nvfp4"), "b": "int4"}, {"a": QuantizeOptions("nvfp4"), "b": QuantizeOptions("int4")}),
        ({"dtype": "nvfp4", "prefill": "fp8"}, dict.fromkeys("ab", QuantizeOptions("nvfp4", prefill="fp8"))),
        (
            {"a": "int4", "b": {"dtype": "nvfp4", "group_size": 16, "method": "rtn"}},
            {
                "a": QuantizeOptions("int4", 128, "hqq"),
                "b": QuantizeOptions("nvfp4", None, "rtn"),
            },
        ),
    ],
)
def test_forms_of_the_option(value: Any, expected: dict[str, QuantizeOptions]) -> None:
    assert ExportOptions(quantize=value).quantize_methods(["a", "b"]) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4, "option quantize: expected str or QuantizeOptions or QuantizeRules or Mapping or NoneType, got int (4)"),
        (
            "int2",
            "option quantize: dtype: expected one of 'int4', 'int8', 'fp8', 'nvfp4', got 'int2' (did you mean 'int8'?)",
        ),
        (
            {"dtype": "int8", "group_size": 64},
            "option quantize: group_size: int8 has a scale an output, no groups: leave it out, got 64",
        ),
        (
            {"dtype": "int8", "prefill": "fp8"},
            "option quantize: prefill: int8 has 'exact' alone, which need not be given; nvfp4 has others; got 'fp8'",
        ),
        (
            {"dtype": "int4", "calibration": [1]},
            "option quantize: calibration: it is for int8, whose activations are quantised: leave it out for int4",
        ),
        (
            {"dtype": "int8", "calibration": torch.ones(2)},
            "option quantize: calibration: expected an iterable of batches, such as a list of tuples of arguments, got "
            "Tensor",
        ),
        (
            {"dtype": "int8", "calibration": iter([1])},
            "option quantize: calibration: expected an iterable that can be iterated for each method, got "
            "list_iterator: give a list",
        ),
        (
            {"dtype": "int8", "observer": "max"},
            "option quantize: observer: expected one of 'minmax', 'percentile', 'mse', got 'max'",
        ),
        (
            {"dtype": "int8", "percentile": 40},
            "option quantize: percentile: expected above 50 and at most 100, got 40",
        ),
        ({"dtype": "int8", "percentile": "99"}, "option quantize: percentile: expected a number, got '99'"),
        ({"dtype": "int4", "group": 64}, "option quantize: unknown option 'group': did you mean 'group_size'?"),
        ({"dtype": "int4", "group_size": 16}, "option quantize: group_size: expected one of 32, 64, 128, 256, got 16"),
        (
            {"dtype": "int4", "method": "gptq"},
            "option quantize: method: expected one of 'hqq', 'rtn', 'symmetric', got 'gptq'",
        ),
        (
            {"dtype": "nvfp4", "group_size": 32},
            "option quantize: group_size: nvfp4 has blocks of 16, which cannot be chosen: leave it out, got 32",
        ),
        ({"dtype": "nvfp4", "method": "hqq"}, "option quantize: method: expected one of 'search', 'rtn', got 'hqq'"),
        (
            {"dtype": "nvfp4", "prefill": "fp9"},
            "option quantize: prefill: expected one of 'exact', 'fp8', 'fp4', got 'fp9'",
        ),
        (
            {"dtype": "int4", "prefill": "fp8"},
            "option quantize: prefill: int4 has 'exact' alone, which need not be given; nvfp4 has others; got 'fp8'",
        ),
        (
            {"group_size": 64},
            "option quantize: group_size: expected 'int4', 'int8', 'fp8', 'nvfp4', QuantizeOptions, a dictionary of options or ",
        ),
        ({"group_size": 64}, "None for the method, got int (64); a dictionary of options has the key 'dtype'"),
        ({"decode": {"group_size": 64}}, "option quantize: a dictionary of options needs 'dtype', such as {'dtype'"),
        ({3: "int4"}, "option quantize: expected names as keys, got [3]"),
    ],
)
def test_wrong_options(value: Any, text: str) -> None:
    with pytest.raises(OptionError) as error:
        ExportOptions(quantize=value)
    assert text in str(error.value)


def test_unknown_method(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="option quantize: there is no method 'decoder': did you mean 'decode'?"):
        export(methods=methods(), path=tmp_path / "m.pt2", quantize={"decoder": "int4"}, progress=False)
    assert not list(tmp_path.iterdir())


def test_json_of_the_option() -> None:
    def chosen(name: str, module: nn.Module) -> bool:
        return True

    value = {"decode": {"dtype": "int4", "include": ["a", chosen]}}
    json = ExportOptions(quantize=value).to_json()["quantize"]
    assert json == {"decode": {"dtype": "int4", "include": ["a", repr(chosen)]}}
    json = ExportOptions(quantize={"decode": QuantizeOptions("int4", exclude=chosen)}).to_json()["quantize"]
    assert json == {
        "decode": {"dtype": "int4", "group_size": 128, "method": "hqq", "exclude": repr(chosen), "prefill": "exact"}
    }


def test_the_options_are_public() -> None:
    assert untorch.quant.QuantizeOptions is untorch.export.QuantizeOptions is QuantizeOptions


def test_it_works_on_a_copy_and_shares_what_the_methods_share() -> None:
    entries = methods()
    encoder, decoder = entries["encode"]["model"], entries["decode"]["model"]
    made, reports = quantised(entries, "int4")
    assert type(encoder.up) is type(decoder.out) is nn.Linear
    assert decoder.first is encoder.up
    a, b = made[0].model, made[1].model
    assert isinstance(a, Encoder)
    assert isinstance(b, Decoder)
    assert isinstance(a.up, Int4Linear)
    assert a.up.packed_weight is b.first.packed_weight
    assert a.up.scale_and_zero is b.first.scale_and_zero
    assert [layer.names for layer in reports["decode"].layers] == [("first",), ("out",)]
    assert reports["decode"].layers[0].error == reports["encode"].layers[0].error


def test_methods_of_one_model_have_one_copy() -> None:
    """Quantised alike, and so traced once; by other options, or another model, it is another copy."""
    entry = methods()["encode"]
    entries = {"few": entry, "many": {**entry, "args": (torch.randn(40, 200),)}, "other": methods()["encode"]}
    options = ExportOptions(quantize="int4")
    few, many, other = quantize_methods(inputs(entries), options.quantize_methods(list(entries)), Progress(False))
    assert few.model is many.model is not entry["model"]
    assert few.quantization is many.quantization is not None
    assert other.model is not few.model
    apart = ExportOptions(quantize={"few": "int4", "many": "int8"})
    few, many = quantize_methods(
        inputs({name: entries[name] for name in ("few", "many")}), apart.quantize_methods(["few", "many"]),
        Progress(False),
    )  # fmt: skip
    assert few.model is not many.model


def test_one_method_alone() -> None:
    entries = methods()
    made, reports = quantised(entries, {"decode": {"dtype": "int4", "exclude": "out"}})
    assert made[0].model is entries["encode"]["model"]
    decoder = made[1].model
    assert isinstance(decoder, Decoder)
    assert isinstance(decoder.first, Int4Linear)
    assert decoder.out.weight is entries["decode"]["model"].out.weight  # not copied
    assert set(reports) == {"decode"}


def test_a_module_that_is_one_linear_layer() -> None:
    linear = nn.Linear(128, 64)
    entries = {"forward": {"model": linear, "args": (torch.randn(1, 128),), "dynamic_shapes": None}}
    [method], reports = quantised(entries, "int4")
    assert isinstance(method.model, Int4Linear)
    assert reports["forward"].module_nbytes_after == method.model.weight_nbytes + 64 * 4
    traced = trace_method(method)
    [entry] = describe_quantized(traced)
    assert entry["shape"] == [64, 128]


def test_methods_without_linear_layers() -> None:
    entries = methods()
    entries["embed"] = {"model": nn.Embedding(10, 4), "args": (torch.tensor([1]),), "dynamic_shapes": None}
    options = ExportOptions(quantize="int4")
    assert not options.quantizes_by_name
    wanted = options.quantize_methods(list(entries))
    made = quantize_methods(inputs(entries), wanted, Progress(False), by_name=False)
    reports = reports_of(made)
    assert made[2].model is entries["embed"]["model"]
    assert reports["embed"].layers == ()
    assert reports["embed"].module_nbytes_after == 160
    assert ExportOptions(quantize={"embed": "int4"}).quantizes_by_name
    with pytest.raises(InvalidArgumentError, match="method 'embed': quantize: nothing to quantise: the module has no "):
        quantised(entries, {"embed": "int4"})
    only = {"embed": entries["embed"]}
    with pytest.raises(InvalidArgumentError, match="option quantize: no method has a linear layer or experts"):
        quantize_methods(inputs(only), options.quantize_methods(["embed"]), Progress(False), by_name=False)
    # Without the option no method is looked at.
    made = quantize_methods(inputs(only), {}, Progress(False), by_name=ExportOptions().quantizes_by_name)
    assert made[0].model is only["embed"]["model"]
    assert reports_of(made) == {}


def test_errors_name_the_method() -> None:
    with pytest.raises(
        InvalidArgumentError, match="method 'encode': include: 'out' matches no linear layer; there are"
    ):
        quantised(methods(), {"dtype": "int4", "include": "out"})
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),))
    with pytest.raises(InvalidArgumentError, match="method 'a': option quantize: an ExportedProgram has no modules to"):
        quantised({"a": {"model": program, "args": None, "dynamic_shapes": None}}, "int4")
    with pytest.raises(InvalidArgumentError, match="method 'a': option quantize: an ExportedProgram has no modules to"):
        quantized_module("a", program, QuantizeOptions("int4"), by_name=False)
    embedding = nn.Embedding(3, 3)
    assert quantized_module("a", embedding, QuantizeOptions("int4"), by_name=False) is embedding
    assert quantized_module("a", None, QuantizeOptions("int4"), by_name=True) is None  # for others to refuse
    encoder = Encoder()
    encoder.lock = threading.Lock()
    with pytest.raises(CompileError, match="method 'a': option quantize works on a copy of the model, which cannot be"):
        quantised({"a": {"model": encoder, "args": (), "dynamic_shapes": None}}, "int4")


@pytest.mark.parametrize("inductor", [{}, {"freezing": True}])
def test_the_weight_stays_packed(inductor: dict[str, Any], tmp_path: Path) -> None:
    """What constant folding and freezing leave is one call of the C function for each layer, on the int32 tensor."""
    [encode, _], _ = quantised(methods(), "int4")
    options = ExportOptions(inductor=inductor, fold_limit=1 << 30)
    code = generate_code(replace(encode, options=options), tmp_path)
    calls = [line for line in code.wrapper.splitlines() if "CHECK(aoti_torch_cpu_int4_linear(" in line]
    assert len(calls) == 2
    assert "&temporary_reference(" in calls[0]  # the bias, by its address
    assert ", 128L, nullptr, &buf" in calls[1]  # none
    assert code.extern_nodes is None or '"nodes": []' in code.extern_nodes
    constants = [line for line in code.wrapper.splitlines() if "].shape = {" in line]
    assert len([line for line in constants if "{13, 2, 32, 4}" in line]) == 1
    assert not any("{99, 200}" in line or "{104, 256}" in line for line in constants)


@pytest.mark.parametrize(("inductor", "prefill"), [({}, "fp8"), ({"freezing": True}, "exact")])
def test_nvfp4_stays_packed(inductor: dict[str, Any], prefill: str, tmp_path: Path) -> None:
    """One call for each layer, on the tensors that the file stores: none of them is written anew before the call."""
    [encode, _], reports = quantised(methods(), {"dtype": "nvfp4", "prefill": prefill})
    assert [layer.method for layer in reports["encode"].layers] == ["search", "search"]
    options = ExportOptions(inductor=inductor, fold_limit=1 << 30)
    code = generate_code(replace(encode, options=options), tmp_path)
    calls = [line for line in code.wrapper.splitlines() if "CHECK(aoti_torch_cpu_nvfp4_linear(" in line]
    assert len(calls) == 2
    assert "&temporary_reference(" in calls[0]  # the bias, by its address
    assert ", nullptr, " in calls[1]  # none
    assert all(f', "{prefill}", &buf' in line for line in calls)
    for name in ("packed_weight", "block_scale", "global_scale"):
        assert f"up_{name}" in calls[0]
        assert f"down_{name}" in calls[1]
    assert code.extern_nodes is None or '"nodes": []' in code.extern_nodes
    shapes = [line.split(".shape = ")[1] for line in code.wrapper.splitlines() if "].shape = {" in line]
    # The bytes, block scales, global scales and bias of the first, and of the second without a bias.
    assert sorted(shapes) == sorted(
        f"{{{shape}}};" for shape in ("13, 2, 32, 4", "104, 16", "104", "104", "25, 1, 32, 4", "200, 8", "200")
    )


def test_what_the_manifest_says_about_nvfp4() -> None:
    nvfp4 = {"dtype": "nvfp4", "method": "rtn"}
    [encode, decode], _ = quantised(methods(), {"encode": nvfp4, "decode": "int4"})
    traced = trace_method(encode)
    assert describe_quantized(traced) == [
        {
            "name": "up", "dtype": "nvfp4", "group_size": 16, "operator": "nvfp4_linear", "activations": "float32",
            "tensors": ["up.packed_weight", "up.block_scale", "up.global_scale"],
            "packed_shape": [104, 256], "shape": [99, 200],
            "method": "rtn", "nbytes": 104 * 256 // 2 + 104 * 16 + 104 * 4,
        },
        {
            "name": "down", "dtype": "nvfp4", "group_size": 16, "operator": "nvfp4_linear", "activations": "float32",
            "tensors": ["down.packed_weight", "down.block_scale", "down.global_scale"],
            "packed_shape": [200, 128], "shape": [200, 99],
            "method": "rtn", "nbytes": 200 * 128 // 2 + 200 * 8 + 200 * 4,
        },
    ]  # fmt: skip
    [encode, _], _ = quantised(methods(), {"encode": {**nvfp4, "prefill": "fp8"}})
    traced = trace_method(encode)
    assert [entry["prefill"] for entry in describe_quantized(traced)] == ["fp8", "fp8"]
    traced = trace_method(decode)
    assert [entry["dtype"] for entry in describe_quantized(traced)] == ["int4", "int4"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_bytes_of_files_in_a_model_of_its_own(tmp_path: Path) -> None:
    """And no prefill, which the C function is called with all the same."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = quantize_nvfp4(torch.randn(8, 48))
            for name, tensor in vars(made).items():
                self.register_buffer(name, tensor)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.untorch.nvfp4_linear(x, self.packed, self.block_scale, self.global_scale)

    method = Method("forward", Own(), (torch.randn(2, 40),))
    traced = trace_method(method)
    [entry] = describe_quantized(traced)
    assert (entry["dtype"], entry["packed_shape"], entry["nbytes"]) == ("nvfp4", [8, 48], 8 * 24 + 8 * 3 + 4)
    code = generate_code(replace(method), tmp_path)
    [call] = [line for line in code.wrapper.splitlines() if "CHECK(aoti_torch_cpu_nvfp4_linear(" in line]
    assert ', nullptr, "exact", &buf' in call


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportReport, dict[str, Any]]:
    entries = methods()
    path = tmp_path_factory.mktemp("quantize") / "model.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = export(
            methods=entries, path=path, quantize={"dtype": "int4", "group_size": 32}, verify=True, progress=False
        )
    return path, report, entries


@pytest.mark.slow
def test_report_and_manifest(made: tuple[Path, ExportReport, dict[str, Any]]) -> None:
    path, report, entries = made
    assert type(entries["encode"]["model"].up) is nn.Linear
    encode, decode = report.methods["encode"], report.methods["decode"]
    assert "aoti_torch_cpu_int4_linear" in encode.operators
    assert all(d.max_rel < 1e-4 for method in (encode, decode) for d in method.differences)
    assert encode.quantization is not None
    assert [layer.names for layer in encode.quantization.layers] == [("up",), ("down",)]
    assert "encode: quantise" in report.seconds
    with untorch.load(path) as program:
        manifest = program.manifest
    assert manifest["methods"]["encode"]["quantization"] == [
        {
            "name": "up", "dtype": "int4", "group_size": 32, "operator": "int4_linear", "activations": "float32",
            "tensors": ["up.packed_weight", "up.scale_and_zero"], "packed_shape": [104, 256], "shape": [99, 200],
            "method": "hqq", "nbytes": 104 * 256 // 2 + 8 * 104 * 8,
        },
        {
            "name": "down", "dtype": "int4", "group_size": 32, "operator": "int4_linear", "activations": "float32",
            "tensors": ["down.packed_weight", "down.scale_and_zero"], "packed_shape": [200, 128], "shape": [200, 99],
            "method": "hqq", "nbytes": 200 * 128 // 2 + 4 * 200 * 8,
        },
    ]  # fmt: skip
    assert [entry["name"] for entry in manifest["methods"]["decode"]["quantization"]] == ["first", "out"]
    for method in manifest["methods"].values():
        names = {constant["fqn"] for constant in method["constants"]}
        assert all(names.issuperset(entry["tensors"]) for entry in method["quantization"])
    assert manifest["methods"]["encode"]["options"]["quantize"] == {"dtype": "int4", "group_size": 32}
    # The layer that both methods have is stored once.
    used = [{c["weight"] for c in manifest["methods"][name]["constants"]} for name in ("encode", "decode")]
    assert len(used[0] & used[1]) == 3  # values, scales, bias
    packed = encode.quantization.nbytes_after + decode.quantization.layers[1].nbytes_after
    assert packed < report.weight_nbytes < packed + 4 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.slow
def test_a_file_computes_what_the_quantised_module_does(dtype: torch.dtype, tmp_path: Path) -> None:
    entry = methods(dtype)["encode"]
    path = tmp_path / "model.pt2"
    model = entry["model"]
    export(
        model, entry["args"], path, dynamic_shapes=entry["dynamic_shapes"], progress=False,
        quantize={"dtype": "int4", "method": "rtn", "group_size": 64},
    )  # fmt: skip
    quantize(model, group_size=64, method="rtn", progress=False)
    with untorch.load(path) as program:
        for rows in (1, 2, 33):
            x = torch.randn(rows, 200).to(dtype)
            with torch.no_grad():
                expected = model(x)
            result = numpy.asarray(program.forward(_array(x)))
            bits = result.view(numpy.uint16) if dtype == torch.bfloat16 else result
            got = from_numpy(bits, str(dtype).removeprefix("torch."))
            tolerance = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


class Views(nn.Module):
    """A linear layer on what is not contiguous: columns, and rows with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 40), nn.Linear(64, 17)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed = self.a(y[:, 3:67])
        # A view that a slice of the padded result would not allow.
        return self.a(x.transpose(1, 2)), mixed, self.b(mixed @ mixed.T @ y[:, 3:67]).view(-1)


@pytest.mark.slow
def test_inputs_that_are_not_contiguous(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch, length, rows = (torch.export.Dim(name, min=1, max=64) for name in ("batch", "length", "rows"))
    path = tmp_path / "model.pt2"
    report = export(
        Views(), (torch.randn(3, 64, 5), torch.randn(7, 80)), path, dynamic_shapes=({0: batch, 2: length}, {0: rows}),
        quantize={"dtype": "int4", "include": "*", "group_size": 32}, verify=True, progress=False,
    )  # fmt: skip
    assert all(difference.max_rel < 1e-5 for difference in report.methods["forward"].differences)
    with untorch.load(path) as program:
        shapes = [array.shape for array in program.forward(*(numpy.ones(s, numpy.float32) for s in _SHAPES))]
    assert shapes == [(2, 1, 40), (1, 40), (17,)]


_SHAPES = ((2, 64, 1), (1, 80))


def test_the_running_layer_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress()
    with progress.step("encode: quantise") as show:
        show("3 of 12: layers.up")
        time.sleep(0.2)  # it is drawn some times a second
    assert "encode: quantise 3 of 12: layers.up" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert progress.seconds["encode: quantise"] >= 0.2


def _array(x: torch.Tensor) -> Any:
    if x.dtype != torch.bfloat16:
        return to_numpy(x)
    import ml_dtypes

    return to_numpy(x).view(ml_dtypes.bfloat16)


def test_int8_is_described() -> None:
    made, _ = quantised(methods(), {"encode": "int8"})
    up, down = describe_quantized(trace_method(made[0]))
    assert up == {
        "name": "up", "dtype": "int8", "group_size": 200, "operator": "int8_linear",
        "tensors": ["up.packed_weight", "up.scale", "up.column_sums"], "activations": "float32",
        "packed_shape": [112, 200], "shape": [99, 200], "method": "rtn", "nbytes": 112 * 200 + 112 * 8,
    }  # fmt: skip
    assert (down["packed_shape"], down["shape"], down["group_size"]) == ([208, 100], [200, 99], 99)


def for_gpu(entries: dict[str, Any], value: Any, gpu: str = "sm_90") -> list[Method]:
    options = ExportOptions(quantize=value)
    [target] = resolve_targets("cuda", gpu)
    given = [replace(method, target=target) for method in inputs(entries)]
    return quantize_methods(given, options.quantize_methods(list(entries)), Progress(False))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_eight_bits_for_gpus_are_described(dtype: str) -> None:
    encode, decode = for_gpu(methods(), dtype)
    assert isinstance(encode.model, nn.Module)
    assert isinstance(encode.model.up, W8A8Linear)
    assert encode.model.up.weight_values is decode.model.first.weight_values  # type: ignore[union-attr]
    up, down = describe_quantized(trace_method(replace(encode, target=CpuTarget())))
    assert up == {
        "name": "up", "dtype": dtype, "group_size": 200, "operator": "w8a8_linear",
        "tensors": ["up.weight_values", "up.scale"], "activations": "float32",
        "packed_shape": [112, 208], "shape": [99, 200], "method": "rtn", "nbytes": 112 * 208 + 112 * 4,
    }  # fmt: skip
    assert (down["packed_shape"], down["shape"], down["group_size"]) == ([208, 112], [200, 99], 99)


def test_scales_of_blocks_are_described() -> None:
    values, scale = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    layer = W8A8Linear.from_values(values, scale, None, method="fp8")
    [entry] = describe_quantized(trace_method(Method("m", layer, (torch.randn(2, 300),))))
    assert entry == {
        "name": "weight_values", "dtype": "fp8", "group_size": 128, "operator": "w8a8_linear",
        "tensors": ["weight_values", "scale"], "activations": "float32", "packed_shape": [208, 304],
        "shape": [200, 300], "method": "fp8", "nbytes": 208 * 304 + 2 * 4 * 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "gpu", "text"),
    [
        (
            {"encode": "fp8"}, "sm_80",
            "method 'encode': option quantize: fp8 needs a GPU of sm_89 or newer, and the method is for sm_80: take "
            "'int8', 'int4' or 'nvfp4'",
        ),
        (
            {"encode": {"up*": "fp8"}}, "sm_86",
            "method 'encode': up: option quantize: fp8 needs a GPU of sm_89 or newer, and the method is for sm_86: take "
            "'int8', 'int4' or 'nvfp4'",
        ),
        (
            {"encode": {"dtype": "int8", "calibration": [1]}}, "sm_90",
            "method 'encode': option quantize: calibration: static ranges are for CPUs, and the method is for cuda: leave "
            "calibration, observer and smooth out, as rows of activations are rounded when a layer runs",
        ),
        (
            "fp8", None,
            "method 'encode': option quantize: fp8 is for GPUs, and the method is for the CPU: take 'int8', 'int4' or "
            "'nvfp4', or export it for a GPU with device='cuda'",
        ),
        (
            {"encode": {"*": "fp8"}}, None,
            "method 'encode': up: option quantize: fp8 is for GPUs, and the method is for the CPU: take 'int8', 'int4' or "
            "'nvfp4', or export it for a GPU with device='cuda'",
        ),
    ],
)  # fmt: skip
def test_what_a_target_does_not_serve(value: Any, gpu: str | None, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        for_gpu(methods(), value, gpu) if gpu is not None else quantised(methods(), value)
    assert str(error.value) == text


def test_convolutions_stay_in_floating_point_on_gpus() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 16, 64))
    entries = {"m": {"model": model, "args": (torch.ones(1, 3, 6, 6),), "dynamic_shapes": None}}
    for value in ("int8", {"[2]": "int8"}):
        [made] = for_gpu(entries, value)
        assert made.quantization is not None
        assert made.quantization.skipped == {"0": "convolutions stay in floating point: those in int8 are for CPUs"}


def test_methods_for_cpus_and_gpus_share_weights_by_target() -> None:
    [target] = resolve_targets("cuda", "sm_90")
    encode, decode = inputs(methods())
    options = QuantizeOptions("int8")
    made = quantize_methods(
        [encode, replace(decode, target=target)], {"encode": options, "decode": options}, Progress(False)
    )
    assert isinstance(made[0].model.up, Int8Linear)  # type: ignore[union-attr]
    assert isinstance(made[1].model.first, W8A8Linear)  # type: ignore[union-attr]
    forecast = quantized_module("decode", decode.model, options, True, target=target)
    assert isinstance(forecast.first, W8A8Linear)
    forecast = quantized_module("decode", decode.model, QuantizeRules.read({"*": "fp8"}), True, target=target)
    assert forecast.first.dtype == "fp8"


def test_layers_for_gpus_in_a_method_for_a_cpu_and_for_old_gpus(tmp_path: Path) -> None:
    for dtype in ("int8", "fp8"):
        model = nn.Sequential(nn.Linear(64, 64))
        quantize(model, dtype, target="cuda", progress=False)
        with pytest.raises(UnsupportedError) as error:
            export(model, (torch.randn(2, 64),), tmp_path / "m.pt2", progress=False)
        assert str(error.value).startswith("method 'forward': operator untorch.w8a8_linear.default")
        assert str(error.value).endswith(
            f": linear layers in {dtype} for GPUs (W8A8Linear) have no kernel for CPUs: export it with device='cuda', or "
            "quantise the model in floating point with export(…, quantize='int8')"
        )
        traced = trace_method(Method("m", model, (torch.randn(2, 64),)))
        refuse_other_devices(traced.module.graph, "method 'm'", "cuda", "sm_90")
        old, first = ("sm_75", "sm_80") if dtype == "int8" else ("sm_86", "sm_89")
        with pytest.raises(UnsupportedError) as error:
            refuse_other_devices(traced.module.graph, "method 'm'", "cuda", old)
        assert (
            f"linear layers in {dtype} for GPUs (W8A8Linear) need {first} or newer, and the method is for {old}"
            in str(error.value)
        )


@pytest.mark.slow
def test_int8_from_end_to_end(tmp_path: Path) -> None:
    """Both methods, a batch that varies, verified against eager with the same integers; the layer is stored once."""
    entries = methods()
    report = export(methods=entries, path=tmp_path / "m.pt2", quantize="int8", verify=True, progress=False)
    found = report.methods["decode"].quantization
    assert found is not None
    assert [layer.names for layer in found.layers] == [("first",), ("out",)]
    with untorch.load(tmp_path / "m.pt2") as program:
        for name, entry in entries.items():
            for batch in (1, 17):
                x = torch.randn(batch, 200)
                got = torch.from_numpy(getattr(program, name)(x.numpy()))
                expected = entry["model"](x).detach()
                assert (got - expected).norm() < 0.02 * expected.norm()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.skip = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x) * self.skip(x)
        return y


class OnlyExperts(nn.Module):
    """Experts as transformers has them, and no linear layer: a router may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(4, 64, 64))
        self.experts.down_proj = nn.Parameter(torch.randn(4, 64, 32))
        self.experts.act_fn = nn.SiLU()


@pytest.mark.parametrize("dtype", ["int4", "nvfp4"])
def test_experts_are_layers(dtype: str) -> None:
    method = Method("forward", OnlyExperts(), (torch.ones(1, 64),))
    options = {"forward": QuantizeOptions(dtype)}  # type: ignore[arg-type]
    [made] = quantize_methods([method], options, Progress(False), by_name=False)
    assert type(made.model.experts).__name__ in ("Int4Experts", "NVFP4Experts")  # type: ignore[union-attr]


def test_convolutions_without_calibration_are_in_the_report() -> None:
    method = Method("forward", Convolution(), (torch.ones(1, 3, 4, 4),))
    other = Method("other", nn.Sequential(nn.Linear(4, 64)), (torch.ones(1, 4),))
    options = dict.fromkeys(("forward", "other"), QuantizeOptions("int8"))
    made, _ = quantize_methods([method, other], options, Progress(False), by_name=False)
    reason = "convolutions need static ranges: give 'calibration', batches of inputs"
    assert made.quantization is not None
    assert made.quantization.skipped == {"conv": reason, "skip": reason}
    with pytest.raises(InvalidArgumentError, match="option quantize: no method has a linear layer or experts"):
        quantize_methods([method], options, Progress(False), by_name=False)


def test_patterns_name_convolutions() -> None:
    method = Method("forward", Convolution(), (torch.ones(1, 3, 4, 4),))
    batches = [torch.ones(1, 3, 4, 4)]
    for how, left in (({"exclude": "sk*"}, "in exclude"), ({"include": ["conv"]}, "not in include")):
        options = {"forward": QuantizeOptions("int8", calibration=batches, **how)}  # type: ignore[arg-type]
        [made] = quantize_methods([method], options, Progress(False), by_name=False)
        assert made.calibration is not None
        assert made.calibration.excluded == {"skip": left}
    options = {"forward": QuantizeOptions("int8", calibration=batches, exclude="fc")}
    with pytest.raises(InvalidArgumentError, match="exclude: 'fc' matches no .*layer.*; there are: conv, skip"):
        quantize_methods([method], options, Progress(False))


def test_the_manifest_has_no_batches() -> None:
    options = ExportOptions(quantize={"dtype": "int8", "calibration": [torch.ones(2)]})
    assert options.to_json()["quantize"] == {"dtype": "int8", "calibration": "list"}
    options = ExportOptions(quantize=QuantizeOptions("int8", calibration=[torch.ones(2)]))
    assert options.to_json()["quantize"]["calibration"] == "list"


def test_patterns_of_layers() -> None:
    rules = {"*.up": "int8", "out": None, "*": "nvfp4"}
    options = ExportOptions(quantize=rules)
    assert not options.quantizes_by_name
    assert options.to_json()["quantize"]["out"] is None
    assert options.to_json()["quantize"]["*.up"] == "int8"
    models = {"encode": nn.ModuleDict({"a": Encoder()}), "decode": Decoder(Encoder()), "none": nn.ReLU()}
    entries = {name: {"model": model, "args": (), "dynamic_shapes": None} for name, model in models.items()}
    wanted = options.quantize_methods(list(entries))
    encode, decode, none = quantize_methods(inputs(entries), wanted, Progress(False), by_name=False)
    assert [type(part).__name__ for part in encode.model.a.children()] == ["Int8Linear", "NVFP4Linear"]  # type: ignore[union-attr]
    # "*.up" and "out" are in one of the methods, which is enough.
    assert [type(part).__name__ for part in decode.model.children()] == ["NVFP4Linear", "Linear"]  # type: ignore[union-attr]
    assert none.quantization is not None
    assert none.quantization.layers == ()
    by_method = ExportOptions(quantize={"encode": rules, "decode": "int4"})
    assert by_method.quantizes_by_name
    with pytest.raises(InvalidArgumentError, match="method 'encode': option quantize: 'out' matches no layer"):
        quantize_methods(inputs(entries), by_method.quantize_methods(list(entries)), Progress(False))
    module = quantized_module("encode", models["encode"], wanted["encode"], False, [models["decode"]])
    assert type(module.a.up).__name__ == "Int8Linear"


@pytest.mark.slow
def test_mixed_precision_from_end_to_end(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder, x = Encoder().eval(), torch.randn(4, 200)
    path = tmp_path / "mixed.pt2"
    report = export(encoder, (x,), path, quantize={"up": "int8", "*": {"dtype": "int4", "group_size": 32}}, verify=True)
    quantization = report.methods["forward"].quantization
    assert quantization is not None
    assert [layer.quantized_dtype for layer in quantization.layers] == ["int8", "int4"]
    program = untorch.load(path)
    assert {entry["dtype"] for entry in program.manifest["methods"]["forward"]["quantization"]} == {"int8", "int4"}
