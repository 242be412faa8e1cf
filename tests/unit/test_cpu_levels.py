"""Code for several levels of CPUs in one file: what load and inspect take."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest

import untorch
from untorch.cli.package import describe_package

from .cli.conftest import build_library, write_package

HERE = ["sse4_2"]
NONE = ["warp_drive"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build_library(tmp_path_factory.mktemp("library"))


def write(path: Path, library: bytes, *levels: tuple[str, list[str]], works: str) -> Path:
    """A method with code for these levels, a target and its features each; only the library of ``works`` is one."""

    def change(manifest: dict[str, Any]) -> None:
        methods = manifest["methods"]
        method = methods.pop("level0")
        codes = []
        for i, (target, features) in enumerate(levels):
            code = {"library": f"data/aotinductor/level{i}/m.wrapper.so", "extern_nodes": None}
            code["constants"] = copy.deepcopy(method["constants"])
            codes.append({**code, "cpu": {**method["cpu"], "target": target, "features": features}})
            methods.pop(f"level{i}", None)
        first, *others = codes
        methods["forward"] = {**method, **first, "variants": others}

    names = [f"level{i}" for i in range(len(levels))]
    libraries = {
        name: library if target == works else b"no library" for name, (target, _) in zip(names, levels, strict=True)
    }
    return write_package(path, libraries, *names, change=change)


@pytest.mark.parametrize(
    ("levels", "taken"),
    [
        ((("a", []), ("b", HERE)), "b"),
        ((("b", HERE), ("a", [])), "b"),
        ((("a", HERE), ("b", NONE)), "a"),
        ((("a", NONE), ("b", HERE), ("c", [])), "b"),
        ((("a", NONE), ("b", []), ("c", HERE)), "c"),
        ((("a", HERE), ("b", HERE)), "a"),
    ],
)
def test_the_best_code_that_runs(tmp_path: Path, library: bytes, levels: Any, taken: str) -> None:
    path = write(tmp_path / "m.pt2", library, *levels, works=taken)
    got = untorch.load(path).forward(numpy.ones((3, 4), numpy.float32))
    numpy.testing.assert_array_equal(got, numpy.full((3, 4), 2.5, numpy.float32))
    cpu = describe_package(str(path))["methods"][0]["cpu"]
    assert cpu["target"] == taken
    assert cpu["targets"] == [target for target, _ in levels]
    assert cpu["missing"] == []


def test_none_that_runs(tmp_path: Path, library: bytes) -> None:
    path = write(tmp_path / "m.pt2", library, ("a", NONE), ("b", [*HERE, *NONE]), works="a")
    with pytest.raises(untorch.UnsupportedError, match=r"was compiled for a CPU with warp_drive, .*target \"a\""):
        untorch.load(path)
    method = describe_package(str(path))["methods"][0]
    assert not method["runs_here"]
    assert method["problems"] == ["this CPU lacks warp_drive"]


def test_code_for_two_architectures_is_refused(tmp_path: Path, library: bytes) -> None:
    def change(manifest: dict[str, Any]) -> None:
        variant = {**manifest["methods"]["forward"], "cpu": {"target": "b", "architecture": "riscv64", "features": []}}
        manifest["methods"]["forward"]["variants"] = [variant]

    path = write_package(tmp_path / "other.pt2", library, "forward", change=change)
    with pytest.raises(untorch.InvalidFileError, match="variant 0 is for another architecture than the method"):
        untorch.load(path)


def test_a_variant_without_a_cpu_is_refused(tmp_path: Path, library: bytes) -> None:
    def change(manifest: dict[str, Any]) -> None:
        method = manifest["methods"]["forward"]
        method["variants"] = [{key: method[key] for key in ("library", "extern_nodes", "constants")}]

    path = write_package(tmp_path / "m.pt2", library, "forward", change=change)
    with pytest.raises(untorch.InvalidFileError, match='variant 0 has no "cpu"'):
        untorch.load(path)
