"""Packages for the command line's tests, made without torch: a model library in C in an archive of our own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.testing import CliRunner

from untorch import _core
from untorch.archive import FORMAT_VERSION, ArchiveWriter
from untorch.cli.app import app
from untorch.cli.process import library_path

SHAPE = [{"symbol": "s0", "min": 2, "max": 64}, 4]


@dataclass(frozen=True)
class Done:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cli() -> Callable[..., Done]:
    try:
        runner = CliRunner(mix_stderr=False)  # click before 8.2 mixes the two
    except TypeError:
        runner = CliRunner()

    def call(*arguments: object) -> Done:
        result = runner.invoke(app, [str(argument) for argument in arguments], prog_name="untorch")
        return Done(result.exit_code, result.stdout, result.stderr)

    return call


def build_library(folder: Path, *flags: str) -> bytes:
    out = folder / "model.so"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", *flags]
    source = Path(__file__).with_name("model.c")
    subprocess.run([*command, str(source), "-o", str(out), str(library_path())], check=True)
    return out.read_bytes()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build_library(tmp_path_factory.mktemp("library"))


def method_entry(name: str) -> dict[str, Any]:
    return {
        "library": f"data/aotinductor/{name}/m.wrapper.so",
        "extern_nodes": None,
        "device": "cpu",
        "cpu": {"target": "native", "architecture": _core.cpu_architecture(), "features": []},
        "inputs": [{"name": "x", "dtype": "float32", "shape": SHAPE, "contiguous": True, "strides": [4, 1]}],
        "outputs": [{"name": "output", "dtype": "float32", "shape": SHAPE}],
        "constants": [
            {
                "name": "bias", "fqn": "layer.bias", "dtype": "float32", "shape": [1], "strides": [1],
                "storage_offset": 0, "weight": 0, "mutated": False,
            }
        ],
    }  # fmt: skip


class UncheckedWriter(ArchiveWriter):
    """Writes what the loader refuses, too."""

    def _check(self) -> None:
        pass


def write_package(
    path: Path,
    library: bytes | dict[str, bytes],
    *names: str,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """A package of methods that have one library, or one each."""
    manifest: dict[str, Any] = {
        "format": "untorch", "format_version": FORMAT_VERSION, "untorch_version": "0.1.0", "torch_version": "2.13.0",
        "weights": [{"file": "data/weights/weight_0", "nbytes": 4}],
        "methods": {name: method_entry(name) for name in names},
    }  # fmt: skip
    if change is not None:
        change(manifest)
    with UncheckedWriter(path) as writer:
        for name in names:
            own = library if isinstance(library, bytes) else library[name]
            writer.write(f"data/aotinductor/{name}/m.wrapper.so", own)
        writer.write("data/weights/weight_0", numpy.float32(0.5).tobytes())
        writer.write_manifest(manifest)
    return path


@pytest.fixture(scope="session")
def package(library: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One method "forward": y = 2·x + 0.5 for x of shape [s0, 4]."""
    return write_package(tmp_path_factory.mktemp("package") / "affine.pt2", library, "forward")


@pytest.fixture(scope="session")
def two_methods(library: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("package") / "two.pt2", library, "encode", "decode")


@pytest.fixture(scope="session")
def stock(library: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Laid out as PyTorch's packager does it."""
    metadata = {"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": "x86_64", "AOTI_CPU_ISA": "AVX2"}
    path = tmp_path_factory.mktemp("package") / "stock.pt2"
    with ArchiveWriter(path) as writer:
        writer.write("data/aotinductor/model/m.wrapper.so", library)
        writer.write("data/aotinductor/model/m.wrapper_metadata.json", json.dumps(metadata).encode())
        writer.write("data/aotinductor/model/m.wrapper.cpp", b"// generated")
    return path
