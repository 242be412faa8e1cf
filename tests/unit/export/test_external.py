"""The option weights: what is found in .safetensors files is not stored again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

import untorch
from untorch import _core
from untorch.archive import BLOCK_BYTES, ArchiveReader
from untorch.export import export
from untorch.export.external import open_weights
from untorch.validation import OptionError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own

IDS = torch.tensor([[1, 2, 299]])


class Table(torch.nn.Module):
    """A table, a layer whose weight is packed, and a buffer that calls change."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(300, 16)
        self.layer = torch.nn.Linear(16, 16)
        self.register_buffer("count", torch.arange(16.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.layer(self.table(ids)) + self.count


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], Any]:
    """The folder of the package and of two shards, the model's tensors, and the report of two methods."""
    folder = tmp_path_factory.mktemp("external")
    torch.manual_seed(0)
    model = Table().eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({"table.weight": state["table.weight"]}, folder / "m-1.safetensors")
    save_file({name: value for name, value in state.items() if name != "table.weight"}, folder / "m-2.safetensors")
    names = dict.fromkeys(state, "m-2.safetensors") | {"table.weight": "m-1.safetensors"}
    (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "sub").mkdir()
    report = export(
        methods={"one": (model, (IDS,)), "two": (model.table, (IDS,))},
        path=folder / "sub" / "model.pt2", weights=folder / "m.safetensors.index.json", verify=True, progress=False,
    )  # fmt: skip
    return folder, state, report


@pytest.mark.slow
def test_export(exported: Any) -> None:
    folder, state, report = exported
    assert report.external_files == ("m-1.safetensors", "m-2.safetensors")
    assert report.external_nbytes == 4 * (300 * 16 + 16 + 16)  # the packed weight is stored
    assert report.methods["one"].differences and report.methods["two"].differences
    with ArchiveReader(report.path) as archive:
        document = archive.manifest()
        assert not any(len(archive.view(name)) == 300 * 16 * 4 for name in archive.entries)
        with pytest.raises(untorch.FileMissingError):
            archive.verify_external()
        archive.verify_external(folder)
    assert document["format_version"] == 3 and document["external_files"] == ["m-1.safetensors", "m-2.safetensors"]
    assert str(folder) not in json.dumps(document)
    entry = next(weight for weight in document["weights"] if weight.get("tensor") == "table.weight")
    raw = state["table.weight"].numpy().tobytes()
    assert entry == {
        "external": 0, "tensor": "table.weight", "dtype": "F32", "shape": [300, 16], "nbytes": len(raw),
        "sample": _core.sample_digest(raw), "sha256": _core.sha256(raw, BLOCK_BYTES),
    }  # fmt: skip


def test_load(exported: Any) -> None:
    folder, state, report = exported
    table, weight, bias = state["table.weight"], state["layer.weight"], state["layer.bias"]
    expected = (table[IDS] @ weight.T + bias + state["count"]).numpy()
    with untorch.load(report.path, weights=folder, verify=True) as program:
        assert numpy.allclose(program.one(IDS.numpy()), expected + 1, atol=1e-5)
        assert numpy.allclose(program.one(IDS.numpy()), expected + 2, atol=1e-5)
        assert numpy.allclose(program.session().one(IDS.numpy()), expected + 1, atol=1e-5)
        program.reset()  # to what the file beside has
        assert numpy.allclose(program.one(IDS.numpy()), expected + 1, atol=1e-5)
        assert numpy.array_equal(program.two(IDS.numpy()), table[IDS].numpy())
        assert untorch.Predictor(report.path, "two", weights=folder)(IDS.numpy()).shape == (1, 3, 16)


def test_commands(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from untorch.cli.app import app

    folder, _, report = exported

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="untorch")

    document = json.loads(run("inspect", report.path, "--json").stdout)
    assert document["external_files"] == [
        {"file": "m-1.safetensors", "weights": 1, "bytes": 19200},
        {"file": "m-2.safetensors", "weights": 2, "bytes": 128},
    ]
    assert "not in the file" in (text := run("inspect", report.path).stdout)
    assert "1 weights, 18.8 KiB, in m-1.safetensors" in text
    assert run("verify", report.path).exit_code == 1
    assert "with 3 weights (18.9 KiB) in .safetensors files" in run("verify", report.path, "--weights", folder).stdout
    call = ("run", report.path, "--method", "two", "-i", "zeros:int64[1,3]")
    assert run(*call).exit_code == 1 and run(*call, "--weights", folder).exit_code == 0
    monkeypatch.setenv("UNTORCH_WEIGHTS", str(folder))
    assert run(*call).exit_code == 0 and run("inspect", report.path, "--checksums").exit_code == 0


@pytest.mark.slow
def test_nothing_found(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    with pytest.warns(UserWarning, match=r"option weights: none of the 1 weights is in .*x\.safetensors byte for byte"):
        report = export(
            torch.nn.Embedding(4, 3), (IDS[:, :1],), tmp_path / "m.pt2", weights=tmp_path / "x.safetensors",
            progress=False,
        )  # fmt: skip
    assert report.external_files == () and report.external_nbytes == 0
    with ArchiveReader(report.path) as archive:
        assert archive.manifest()["format_version"] == 2


def test_find(tmp_path: Path) -> None:
    values = torch.arange(6000, dtype=torch.int32)
    other = values.clone()
    other[3000] = 0  # the same first and last bytes
    save_file({"a": other, "b": values, "empty": torch.zeros(0)}, tmp_path / "x.safetensors")
    weights = open_weights(tmp_path / "x.safetensors")
    data = memoryview(values.numpy()).cast("B")
    found = weights.find(data, _core.sha256(data, BLOCK_BYTES))
    assert found is not None and (found["tensor"], found["dtype"], found["shape"]) == ("b", "I32", [6000])
    assert weights.find(data[4:], _core.sha256(data[4:], BLOCK_BYTES)) is None
    assert weights.find(memoryview(b""), _core.sha256(b"", BLOCK_BYTES)) is None
    assert (weights.files, weights.nbytes, weights.where) == (["x.safetensors"], 24000, str(tmp_path / "x.safetensors"))


def test_what_weights_may_be(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    for folder in (first, second):
        folder.mkdir()
        save_file({"x": torch.ones(3)}, folder / "x.safetensors")
    save_file({"y": torch.ones(4)}, first / "y.safetensors")
    assert [path.name for path in open_weights(first).paths] == ["x.safetensors", "y.safetensors"]
    assert open_weights([str(first / "x.safetensors"), first / "y.safetensors"]).where == str(first)
    index = first / "model.safetensors.index.json"
    for value, text in [
        ([], "expected .safetensors files, got an empty list"),
        ([first, second], f"expected files of one folder, got {first}/x.safetensors and {second}/x.safetensors"),
        (tmp_path, f"expected a folder with .safetensors files, {tmp_path} has none"),
        ("model.bin", "expected a .safetensors file, an index of such files (.safetensors.index.json) or their folder"),
        (first / "none.safetensors", f"cannot open {first}/none.safetensors: No such file or directory"),
        (index, f"{index}: No such file or directory"),
    ]:
        with pytest.raises(OptionError, match=re.escape(f"option weights: {text}")):
            open_weights(value)
    for document, text in [
        ("{", "expected JSON with weight_map"),
        ('{"weight_map": []}', "expected JSON with weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "expected plain names of .safetensors files, got '../x.safe"),
        ('{"weight_map": {"a": 3}}', "expected plain names of .safetensors files, got 3"),
    ]:
        index.write_text(document)
        with pytest.raises(OptionError, match=re.escape(text)):
            open_weights(index)
    (first / "x.safetensors").write_bytes(b"no")
    with pytest.raises(untorch.InvalidFileError, match=r"is no \.safetensors file: it has 2 bytes"):
        open_weights(first)
