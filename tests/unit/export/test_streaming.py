"""The option stream_weights: large tensors lie in files, the package is the same, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import untorch
from untorch.archive import ArchiveReader
from untorch.export import ExportOptions, export, export_folder, streaming
from untorch.export.streaming import load_weights, on_disk, stream_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and transformers' own

LARGE = (1024, 512)  # 2 MiB in float32


def is_in_file(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().filename is not None


def test_large_tensors_lie_in_files(tmp_path: Path) -> None:
    tensor = torch.randn(LARGE)
    assert on_disk(tensor) is tensor  # without the option
    with stream_weights(False, tmp_path / "model.pt2"):
        assert on_disk(tensor) is tensor
    with stream_weights(True, tmp_path / "model.pt2"):
        for given in (tensor, tensor.t(), nn.Parameter(tensor.half(), requires_grad=False), tensor.to(torch.complex64)):
            made = on_disk(given)
            assert is_in_file(made) and torch.equal(made, given), given.dtype
            assert (made.stride(), type(made), made.requires_grad) == (given.stride(), type(given), given.requires_grad)
            assert on_disk(made) is made
            made.zero_()  # it can be written, and is another memory
            assert given.any()
        with stream_weights(True, tmp_path / "elsewhere" / "model.pt2"):  # the outer one's
            assert is_in_file(on_disk(tensor))
        assert [list(folder.iterdir()) for folder in tmp_path.iterdir()] == [[]]
    assert not list(tmp_path.iterdir())
    assert made.sum() == 0  # the mapping outlives the folder


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(10), torch.zeros(LARGE)[:512], torch.zeros(LARGE)[1:], torch.zeros(LARGE, device="meta"),
        torch.zeros(LARGE).to_sparse(), torch.zeros(1, 512).expand(LARGE),
    ],
    ids=["small", "a part", "a part at the end", "meta", "sparse", "overlapping"],
)  # fmt: skip
def test_other_tensors_stay(tensor: torch.Tensor, tmp_path: Path) -> None:
    with stream_weights(True, tmp_path / "model.pt2"):
        assert on_disk(tensor) is tensor


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a signal at the first page that cannot be written."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        stream_weights(True, tmp_path / "model.pt2"),
        pytest.raises(untorch.FileOpenError, match="stream_weights: .* has no room for 2097152 bytes: No space left"),
    ):
        on_disk(torch.zeros(LARGE))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "model.pt2"
    text = r"cannot write .*model.pt2: No such file or directory"
    with pytest.raises(untorch.FileMissingError, match=text), stream_weights(True, path):
        pass
    with pytest.raises(untorch.FileMissingError, match=r"cannot write .*model.pt2"):
        export_folder(tmp_path, path, stream_weights=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(*LARGE)
        self.second = nn.Linear(512, 1024, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.randn(LARGE))
        self.register_buffer("nothing", None)


def test_loading(tmp_path: Path) -> None:
    """Tensors that are shared stay shared; what is made while weights are loaded goes to files as it is made."""
    seen = []

    def load() -> Tied:
        model = Tied()
        seen.append(torch.ones(LARGE).to(torch.bfloat16))
        seen.append(torch.cat([seen[0], seen[0]]))
        seen.append(seen[0][:10])
        seen.append(seen[0].add_(1))
        return model

    assert not is_in_file(load_weights(load).table)
    seen.clear()
    with stream_weights(True, tmp_path / "model.pt2"):
        model = load_weights(load)
    assert model.first.weight is model.second.weight and isinstance(model.first.weight, nn.Parameter)
    assert is_in_file(model.first.weight) and is_in_file(model.table)
    assert all(map(is_in_file, seen)) and seen[0].untyped_storage().data_ptr() == seen[2].untyped_storage().data_ptr()
    assert torch.equal(seen[3], torch.full(LARGE, 2).to(torch.bfloat16)) and seen[1].sum() == 2 * 1024 * 512
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


def contents(path: Path) -> tuple[list[Any], dict[str, bytes]]:
    """The manifest's weights and methods, and the archive's entries but for the manifest and its digests."""
    with ArchiveReader(path) as archive:
        manifest = archive.manifest()
        entries = {name: bytes(archive.view(name)) for name in archive.entries if not name.startswith("extra/untorch")}
    assert "stream_weights" not in json.dumps(manifest)
    return [manifest["weights"], manifest["methods"]], entries


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8", {"dtype": "int4", "method": "rtn"}], ids=["plain", "int8", "int4"])
def test_packages_are_the_same(quantize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every tensor in a file."""
    monkeypatch.setattr(streaming, "_MIN_BYTES", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.BatchNorm1d(64)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made, copy = [], streaming._WeightFiles.copy

    def counted(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor)
        return copy(self, tensor)

    monkeypatch.setattr(streaming._WeightFiles, "copy", counted)
    for name in ("memory", "files"):
        assert not made
        export(model, (torch.randn(2, 64),), tmp_path / f"{name}.pt2", quantize=quantize, verify=True,
               stream_weights=name == "files", verify_tolerance=0.1, progress=False)  # fmt: skip
    assert made
    assert contents(tmp_path / "memory.pt2") == contents(tmp_path / "files.pt2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files.pt2", "memory.pt2"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(is_in_file(value) for value in model.state_dict().values())  # the caller's module stays as it is


@pytest.mark.slow
def test_packages_of_folders_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(streaming, "_MIN_BYTES", 1)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).eval().save_pretrained(tmp_path / "folder")
    options = ExportOptions(stream_weights=True, progress=False)
    for name, given in (("memory", ExportOptions(progress=False)), ("files", options)):
        export_folder(tmp_path / "folder", tmp_path / f"{name}.pt2", dtype=torch.bfloat16, options=given)
    assert contents(tmp_path / "memory.pt2") == contents(tmp_path / "files.pt2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files.pt2", "folder", "memory.pt2"]


MEASURED = """
import re, sys, threading, time
import torch
from torch import nn
from untorch.export import export

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        layers = []
        for i in range(12):
            weight = torch.UntypedStorage.from_file(f"{sys.argv[1]}/{i}", shared=True, nbytes=4 * 2048 * 2048)
            layer = nn.Linear(2048, 2048, bias=False, device="meta")
            layer.weight = nn.Parameter(torch.empty(0).set_(weight, 0, (2048, 2048)).normal_())
            layers += [layer, nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10

def watch():
    global most
    while True:
        most = max(most, anonymous())
        time.sleep(0.005)

model, start = Wide().eval(), anonymous()
most = start
threading.Thread(target=watch, daemon=True).start()
streams = sys.argv[2] == "files"
export(model, (torch.zeros(1, 2048),), f"{sys.argv[1]}/{sys.argv[2]}.pt2", stream_weights=streams, progress=False)
print(most - start)
"""


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    """192 MiB of packed weights: in memory without the option, and not with it."""
    used = {}
    for kind in ("memory", "files"):
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(MEASURED), str(tmp_path), kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        used[kind] = int(done.stdout)
    assert used["memory"] - used["files"] > 150, used
