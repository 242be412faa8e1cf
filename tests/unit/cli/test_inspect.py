"""untorch inspect."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

from .conftest import SHAPE, build_library, write_package


def update_method(manifest: dict[str, Any], fields: dict[str, Any]) -> None:
    manifest["methods"]["forward"].update(fields)


def test_json_document(cli: Callable[..., Any], package: Path, library: bytes) -> None:
    done = cli("inspect", package, "--json")
    assert done.code == 0, done.err
    document = done.document()
    (method,) = document.pop("methods")
    parts = document.pop("parts_bytes")
    assert document == {
        "file": str(package),
        "file_bytes": package.stat().st_size,
        "format": "untorch",
        "format_version": 2,
        "untorch_version": "0.1.0",
        "torch_version": "2.13.0",
        "checksums": None,
        "weights": {"count": 1, "bytes": 4, "shared": 0, "saved_bytes": 0},
        "external_files": [],
        "language_model": None,
        "graph": None,
        "pipeline": None,
        "calls": {
            "python": f'untorch.load("{package}").forward(x)',
            "command": f"untorch run {package} --input x=random",
        },
    }
    assert set(parts) == {"libraries", "weights", "sources", "descriptions", "zip"}
    assert (parts["libraries"], parts["weights"], parts["sources"]) == (len(library), 4, 0)
    assert sum(parts.values()) == package.stat().st_size
    operators = method.pop("operators")
    assert "libuntorch.so" in method["library"].pop("needed")
    assert method == {
        "name": "forward",
        "device": "cpu",
        "gpu_architectures": [],
        "tf32": None,
        "cpu": {
            "target": "native",
            "targets": ["native"],
            "architecture": method["cpu"]["architecture"],
            "features": [],
            "missing": [],
        },
        "library": {"file": "data/aotinductor/forward/m.wrapper.so", "bytes": len(library)},
        "inputs": [{"name": "x", "dtype": "float32", "shape": SHAPE, "contiguous": True, "strides": [4, 1]}],
        "outputs": [{"name": "output", "dtype": "float32", "shape": SHAPE}],
        "constants": {"count": 1, "bytes": 4, "mutated": 0},
        "gpu_codes": [],
        "quantization": None,
        "runs_here": True,
        "problems": [],
    }
    assert operators == [
        {"name": f"aoti_torch_{name}", "kind": "function", "served": True}
        for name in ("delete_tensor_object", "empty_strided", "get_data_ptr", "get_sizes")
    ]


def test_text(cli: Callable[..., Any], package: Path) -> None:
    out = cli("inspect", package, "--checksums", "--operators").out
    assert "runs here     yes" in out
    assert "[s0: 2..64, 4]" in out
    assert "checksums   all right" in out
    assert "aoti_torch_get_sizes" in out
    assert "not served: 0" in out


def test_quantised_weights(cli: Callable[..., Any], library: bytes, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        entry = {"name": "up", "dtype": "int4", "group_size": 128, "packed_shape": [64, 128], "nbytes": 4608}
        manifest["methods"]["forward"]["quantization"] = [
            {**entry, "shape": [64, 128], "method": "hqq", "prefill": "fp8"},
            {**entry, "shape": [60, 128], "method": "rtn", "group_size": 32},
            entry,  # of an exported program
        ]

    path = write_package(tmp_path / "quantised.pt2", library, "forward", change=change)
    (method,) = cli("inspect", path, "--json").document()["methods"]
    assert method["quantization"] == {
        "dtypes": ["int4"], "weights": 3, "bytes": 3 * 4608, "values": 128 * (64 + 60 + 64), "group_sizes": [32, 128],
        "methods": ["hqq", "rtn"], "prefills": ["fp8"], "int8_activations": False, "scale_blocks": False,
    }  # fmt: skip
    out = cli("inspect", path).out
    assert (
        "quantised: 3 weights in int4, 13.5 KiB (4.60 bits a weight), groups of 32, 128, hqq, rtn, prefill in fp8"
        in out
    )


@pytest.mark.parametrize("group", [128, 256])
def test_weights_in_eight_bits_for_gpus(group: int, cli: Callable[..., Any], library: bytes, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["methods"]["forward"]["quantization"] = [{
            "name": "up", "dtype": "fp8", "group_size": group, "packed_shape": [64, 256], "shape": [64, 256],
            "operator": "w8a8_linear", "method": "rtn", "nbytes": 64 * 256 + 256,
        }]  # fmt: skip

    path = write_package(tmp_path / "quantised.pt2", library, "forward", change=change)
    scales = "a scale an output" if group == 256 else "a scale for 128 × 128 weights"
    line = f"quantised: 1 weights in fp8, 16.2 KiB (8.12 bits a weight), {scales}, rtn"
    assert line in cli("inspect", path).out


def test_shared_weights(cli: Callable[..., Any], two_methods: Path) -> None:
    document = cli("inspect", two_methods, "--json").document()
    assert document["weights"] == {"count": 1, "bytes": 4, "shared": 1, "saved_bytes": 4}
    assert [method["name"] for method in document["methods"]] == ["encode", "decode"]
    assert "1 used by several methods (saves 4 B)" in cli("inspect", two_methods).out


def test_language_model(cli: Callable[..., Any], library: bytes, tmp_path: Path) -> None:
    from tests.unit.llm.test_settings import SECTION

    section = {**SECTION, "dtype": "int8", "state_elements": 256}
    path = write_package(tmp_path / "m.pt2", library, "step", change=lambda manifest: manifest.update(llm=section))
    assert cli("inspect", path, "--json").document()["language_model"] == {
        "architecture": "LlamaForCausalLM", "task": "generate", "vocabulary": 10, "max_positions": 64,
        "kv_dtype": "int8", "kv_bytes_a_token": 32, "kv_bytes_a_token_behind_windows": 32, "state_bytes_a_sequence": 1024, "inputs_embeds": False,
        "tokenizer": False, "chat_template": False,
    }  # fmt: skip
    out = " ".join(cli("inspect", path).out.split())
    assert "LlamaForCausalLM, generates, 64 positions, vocabulary of 10" in out
    assert "32 B a token in int8, states 1.0 KiB a sequence" in out
    groups = [{"block_size": 32, "window": 0, "chunk": 0}, {"block_size": 16, "window": 8, "chunk": 0}]
    grouped = {**section, "format_version": 2, "groups": groups}
    path = write_package(tmp_path / "g.pt2", library, "step", change=lambda manifest: manifest.update(llm=grouped))
    out = " ".join(cli("inspect", path).out.split())
    assert "48 B a token in int8 (16 B behind windows), states 1.0 KiB a sequence" in out
    section["vocabulary"] = 0
    path = write_package(tmp_path / "n.pt2", library, "step", change=lambda manifest: manifest.update(llm=section))
    document = cli("inspect", path, "--json").document()["language_model"]
    assert document == {"error": f"{path}: the manifest's language model is damaged: a size or dtype is wrong"}
    assert "is damaged" in cli("inspect", path).out


PIPELINE = {
    "format_version": 1, "task": "text-classification", "architecture": "BertForSequenceClassification",
    "labels": ["bad", "good"], "activation": "softmax", "text_inputs": ["input_ids"], "max_length": 64, "pad_id": 0,
    "padding_side": "right", "clean_up_spaces": False,
}  # fmt: skip
IMAGES = {
    "format_version": 1, "task": "image-classification", "architecture": "ViTForImageClassification",
    "labels": [f"L{i}" for i in range(20)], "image_steps": [["resize", 32, 48, 2], ["normalize", [0.5], [0.5]]],
}  # fmt: skip


def test_pipeline(cli: Callable[..., Any], library: bytes, tmp_path: Path) -> None:
    path = write_package(tmp_path / "m.pt2", library, "forward", change=lambda made: made.update(pipeline=PIPELINE))
    document = cli("inspect", path, "--json").document()
    assert document["pipeline"] == {
        "task": "text-classification", "architecture": "BertForSequenceClassification", "labels": ["bad", "good"],
        "front_end": "tokenizer, at most 64 tokens",
    }  # fmt: skip
    assert document["calls"] == {
        "python": f'untorch.pipeline("{path}")("…")', "command": f'untorch run {path} "some text"',
    }  # fmt: skip
    out = cli("inspect", path).out
    for line in (
        "task        text-classification, BertForSequenceClassification",
        "labels      2: bad, good",
        "front end   tokenizer, at most 64 tokens",
        f'call        untorch.pipeline("{path}")("…")',
        f'            untorch run {path} "some text"',
    ):
        assert line in out.splitlines()


def test_labels_of_a_pipeline_are_cut(cli: Callable[..., Any], library: bytes, tmp_path: Path) -> None:
    path = write_package(tmp_path / "m.pt2", library, "forward", change=lambda made: made.update(pipeline=IMAGES))
    out = cli("inspect", path).out
    assert "20: L0, L1, L2, L3, L4, L5, L6, L7, L8, L9, L10, L11 … and 8 more; --json has all" in out
    assert "front end   image: resize to 32 × 48, normalize" in out
    assert f'call        untorch.pipeline("{path}")("cat.jpg")' in out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"labels": [1]}, "the manifest's pipeline is damaged: labels: expected a list of strings, got [1]"),
        ({"task": None}, "the manifest's pipeline is damaged: task: expected str, got None"),
        ({"format_version": 9}, "its pipeline has format 9, this untorch reads 1"),
    ],
)
def test_damaged_pipeline(
    cli: Callable[..., Any], library: bytes, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    section = {**PIPELINE, **change}
    path = write_package(tmp_path / "m.pt2", library, "forward", change=lambda made: made.update(pipeline=section))
    document = cli("inspect", path, "--json").document()
    assert problem in document["pipeline"]["error"]
    assert document["calls"] is None
    assert problem in " ".join(cli("inspect", path).out.split())


def test_stock_package(cli: Callable[..., Any], stock: Path) -> None:
    document = cli("inspect", stock, "--json").document()
    assert document["format"] == "stock"
    assert document["pipeline"] is document["calls"] is None
    assert document["weights"] is document["untorch_version"] is document["torch_version"] is None
    assert document["parts_bytes"]["sources"] == len(b"// generated")
    (method,) = document["methods"]
    assert method["inputs"] is method["outputs"] is method["constants"] is None
    assert method["cpu"]["features"] == ["avx2", "fma"]
    assert "a stock package does not tell" in cli("inspect", stock).out


def test_functions_that_are_missing(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = write_package(tmp_path / "m.pt2", build_library(tmp_path, "-DUNKNOWN"), "forward")
    done = cli("inspect", path, "--json")
    assert done.code == 0
    (method,) = done.document()["methods"]
    assert not method["runs_here"]
    assert method["problems"] == ["not served: aoti_torch_cpu_no_such_operator"]
    out = cli("inspect", path).out
    assert "runs here     no: not served: aoti_torch_cpu_no_such_operator" in out
    assert "not served: 1" in out


def test_cpu_that_lacks_features(cli: Callable[..., Any], library: bytes, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["methods"]["forward"]["cpu"]["features"] = ["sse4_2", "warp_drive"]

    path = write_package(tmp_path / "m.pt2", library, "forward", change=change)
    (method,) = cli("inspect", path, "--json").document()["methods"]
    assert "warp_drive" in method["cpu"]["missing"]
    assert not method["runs_here"]


def test_damaged_manifest(cli: Callable[..., Any], library: bytes, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        del manifest["methods"]["forward"]["inputs"][0]["shape"]

    path = write_package(tmp_path / "m.pt2", library, "forward", change=change)
    done = cli("inspect", path)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"untorch: {path}: extra/untorch.json method 'forward' input 0 has no \"shape\"\n"


def test_verify_finds_changed_bytes(cli: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    data = bytearray(package.read_bytes())
    at = data.index(numpy.float32(0.5).tobytes(), data.index(b"data/weights/weight_0"))
    data[at] ^= 1
    path = tmp_path / package.name
    path.write_bytes(data)
    assert cli("inspect", path).code == 0
    done = cli("inspect", path, "--checksums")
    assert done.code == 1
    assert "is damaged: entry 'data/weights/weight_0' has the SHA-256 " in done.err
    assert cli("verify", path).err == done.err


@pytest.mark.parametrize("content", [b"", b"no zip at all"])
def test_no_package(cli: Callable[..., Any], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(content)
    done = cli("inspect", path, "--json")
    assert done.code == 1
    assert done.document()["error"]["type"] == "InvalidFileError"


def test_a_file_for_cuda(
    cli: Callable[..., Any], library: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from untorch.cli import machine, package

    def problems(*arguments: object) -> list[str]:
        found: list[str] = cli("inspect", path, "--json", *arguments).document()["methods"][0]["problems"]
        return found

    def for_cuda(manifest: dict[str, Any]) -> None:
        method = manifest["methods"]["forward"]
        code = {key: method[key] for key in ("library", "constants")}
        method.update(
            device="cuda",
            gpu_architecture="sm_86",
            variants=[
                {**code, "gpu_architecture": name, "ptxas": "13.0" if name == "sm_120" else "12.8"} for name in more
            ],
        )

    more: list[str] = []
    path = write_package(tmp_path / "model.pt2", library, "forward", change=for_cuda)
    status: dict[str, Any] = {"served": True, "note": None, "devices": []}
    monkeypatch.setattr(machine, "cuda_status", lambda: status)
    assert package.describe_package(path)["methods"][0]["gpu_architectures"] == ["sm_86"]
    assert problems() == ["there is no cuda:0: this machine has 0 GPUs"]
    for architecture, runs in (("sm_86", True), ("sm_89", True), ("sm_80", False), ("sm_90", False)):
        status["devices"] = [{"name": "GPU", "architecture": architecture}]
        expected = [] if runs else [f"it is compiled for sm_86, cuda:0 (GPU) is {architecture}"]
        assert problems() == expected == problems("--device", "cuda:0")
    assert "not for cpu" in problems("--device", "cpu")[-1]

    more = ["sm_80", "sm_120"]
    path = write_package(tmp_path / "several.pt2", library, "forward", change=for_cuda)
    text = cli("inspect", path).out
    assert "cuda, sm_86, sm_80, sm_120" in text
    assert re.search(r"code for sm_80 +ptxas 12.8, no PTX; driver 550 or newer", text)
    assert re.search(r"code for sm_120 +ptxas 13.0, no PTX; driver 580 or newer", text)
    assert [code["driver"] for code in package.describe_package(path)["methods"][0]["gpu_codes"]] == [550, 550, 580]
    path = write_package(tmp_path / "old.pt2", library, "forward", change=lambda manifest: [
        manifest["methods"]["forward"].update(device="cuda", gpu_architecture=name) for name in ("sm_100",)
    ])  # fmt: skip
    text = cli("inspect", path).out
    assert re.search(r"code for sm_100 +ptxas unknown, no PTX; driver 570 or newer", text)
    assert re.search(r"TF32 +nowhere", text)  # files from before it was recorded
    for kinds, words in (
        (["convolution"], "in convolutions"),
        (["convolution", "matmul"], "in convolutions and GEMMs"),
    ):
        tf32 = {kind: kind in kinds for kind in ("convolution", "matmul")}
        fields = {"device": "cuda", "gpu_architecture": "sm_90", "tf32": tf32}
        path = write_package(tmp_path / "tf32.pt2", library, "forward", change=partial(update_method, fields=fields))
        assert re.search(f"TF32 +{words}", cli("inspect", path).out)
    path = tmp_path / "several.pt2"
    for architecture, runs in (("sm_80", True), ("sm_89", True), ("sm_120", True), ("sm_90", False)):
        status["devices"] = [{"name": "GPU", "architecture": architecture}]
        expected = [] if runs else [f"it is compiled for sm_86, sm_80, sm_120, cuda:0 (GPU) is {architecture}"]
        assert problems() == expected
    status.update(served=False, note="no driver")
    assert problems() == ["it is compiled for CUDA, which does not work here: no driver"]
    done = cli("inspect", path, "--device", "gpu")
    assert (done.code, done.err) == (1, "untorch: --device gpu: expected cpu, cuda or cuda:<index>\n")
