"""The interface's object: compiled once, again where what it was made of has changed, and never in the way of an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from untorch.export import runtime_interface
from untorch.export.precompiled_headers import CONTAINER
from untorch.export.runtime_interface import cache_folder, compile_in_parts

GXX = str(shutil.which("g++"))
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

INTERFACE = """// What makes the model.
#include <model.h>

#define TWICE(x) \\
  ((x) + \\
   (x))

extern "C" int interface_value() { return SCALE * Model().run(); }
"""
MODEL = "int Model::run() { return TWICE(3); }\n"


@pytest.fixture
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like torch's, with its headers in include; objects are kept in tmp_path/cache."""
    folder = tmp_path / "torch"
    (source := folder / "_inductor/codegen/aoti_runtime").mkdir(parents=True)
    (source / "interface.cpp").write_text(INTERFACE)
    (folder / "include").mkdir()
    (folder / "include/model.h").write_text("#pragma once\nstruct Model { int run(); };\nconstexpr int SCALE = 10;\n")
    monkeypatch.setenv("UNTORCH_CACHE", str(tmp_path / "cache"))
    return folder


def arguments_of(folder: Path, text: str, *flags: str, name: str = "a.wrapper.cpp") -> list[str]:
    source = folder.parent / name
    source.write_text(text)
    return [f"-I{folder}/include", str(source), "-fPIC", *flags, "-c", "-o", str(folder.parent / "out.o")]


def value(folder: Path) -> int:
    """What the function of the object returns."""
    library = folder.parent / "out.so"
    subprocess.run([GXX, "-shared", str(folder.parent / "out.o"), "-o", str(library)], check=True)
    script = f"import ctypes; print(ctypes.CDLL({str(library)!r}).interface_value())"
    return int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the interface was compiled since this was asked the last time."""
    original, seen = runtime_interface._run, [0]

    def run(command: list[str], text: str, cwd: str | None) -> None:
        seen[0] += "-MD" in command
        original(command, text, cwd)

    def count() -> int:
        number, seen[0] = seen[0], 0
        return number

    monkeypatch.setattr(runtime_interface, "_run", run)
    return count


@needs_gxx
def test_the_interface_is_compiled_once(torch_folder: Path, compiles: Callable[[], int]) -> None:
    for text, result, number in ((MODEL, 60, 1), ("int Model::run() { return 7; }\n", 70, 0)):
        arguments = arguments_of(torch_folder, "// generated\n#include <cstddef>\n" + INTERFACE + text)
        assert compile_in_parts(GXX, arguments)
        assert value(torch_folder) == result
        assert compiles() == number
    assert sorted(path.suffix for path in (torch_folder.parent / "cache").iterdir()) == [".json", ".lock", ".o"]
    assert not list(torch_folder.parent.glob("*.rest"))


@needs_gxx
def test_the_object_is_the_same_with_and_without_a_kept_one(torch_folder: Path) -> None:
    objects = []
    for _ in range(2):
        assert compile_in_parts(GXX, arguments_of(torch_folder, INTERFACE + MODEL))
        objects.append((torch_folder.parent / "out.o").read_bytes())
    shutil.rmtree(torch_folder.parent / "cache")
    assert compile_in_parts(GXX, arguments_of(torch_folder, INTERFACE + MODEL, name="b.wrapper.cpp"))
    assert objects[0] == objects[1] == (torch_folder.parent / "out.o").read_bytes()
    assert bytes(torch_folder.parent) not in objects[0]


@needs_gxx
def test_a_changed_header_is_seen(torch_folder: Path, compiles: Callable[[], int]) -> None:
    header = torch_folder / "include/model.h"
    for scale, number in ((10, 1), (10, 0), (11, 1), (11, 0)):
        if f"SCALE = {scale};" not in header.read_text():
            header.write_text(header.read_text().replace("SCALE = 10;", f"SCALE = {scale};"))
        assert compile_in_parts(GXX, arguments_of(torch_folder, INTERFACE + MODEL))
        assert (value(torch_folder), compiles()) == (scale * 6, number)


@needs_gxx
@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"sha256": "0", "headers": []}', None])
def test_a_damaged_record_is_none(torch_folder: Path, compiles: Callable[[], int], damage: str | None) -> None:
    assert compile_in_parts(GXX, arguments_of(torch_folder, INTERFACE + MODEL))
    (record,) = (torch_folder.parent / "cache").glob("*.json")
    record.unlink() if damage is None else record.write_text(damage)
    assert compile_in_parts(GXX, arguments_of(torch_folder, INTERFACE + MODEL))
    assert (value(torch_folder), compiles()) == (60, 2)


@needs_gxx
def test_a_damaged_object_is_made_again(torch_folder: Path, compiles: Callable[[], int]) -> None:
    assert compile_in_parts(GXX, arguments_of(torch_folder, INTERFACE + MODEL))
    (kept,) = (torch_folder.parent / "cache").glob("*.o")
    kept.write_bytes(kept.read_bytes()[:-100] + bytes(100))
    assert compile_in_parts(GXX, arguments_of(torch_folder, INTERFACE + MODEL))
    assert (value(torch_folder), compiles()) == (60, 2)


@needs_gxx
def test_other_flags_and_precompiled_headers(torch_folder: Path, compiles: Callable[[], int]) -> None:
    """Flags are part of the key; a precompiled header is not."""
    (header := torch_folder.parent / "first.h").write_text("#include <model.h>\n#define FIRST 5\n")
    for before, flags, text, number in (
        ([], [], MODEL, 1),
        (["-include", str(header)], [], "int Model::run() { return FIRST; }\n", 0),
        ([], ["-O2"], MODEL, 1),
    ):
        assert compile_in_parts(GXX, [*before, *arguments_of(torch_folder, INTERFACE + text, *flags)])
        assert compiles() == number


@needs_gxx
def test_headers_with_spaces_in_their_names(torch_folder: Path, compiles: Callable[[], int]) -> None:
    moved = torch_folder.rename(torch_folder.parent / "a torch #1")
    for number in (1, 0):
        assert compile_in_parts(GXX, arguments_of(moved, INTERFACE + MODEL))
        assert compiles() == number


@needs_gxx
@pytest.mark.parametrize(
    "text",
    [
        INTERFACE + "int Model::run() { return nothing; }\n",  # does not compile
        "int before;\n" + INTERFACE + MODEL,  # code before the interface
        INTERFACE + MODEL + INTERFACE,
        INTERFACE.replace("10", "11").replace("value", "number") + MODEL,  # another interface
        MODEL,
    ],
)
def test_what_is_left_to_be_compiled_whole(torch_folder: Path, text: str) -> None:
    assert not compile_in_parts(GXX, arguments_of(torch_folder, text))
    assert not (torch_folder.parent / "out.o").exists() and not list(torch_folder.parent.glob("*.rest"))


def test_other_commands_are_left(torch_folder: Path) -> None:
    text = INTERFACE + MODEL
    arguments = arguments_of(torch_folder, text)
    assert not compile_in_parts(GXX, arguments_of(torch_folder, text, name="a.kernel.cpp"))
    assert not compile_in_parts(GXX, arguments_of(torch_folder, text, name="a.cpp"))
    assert not compile_in_parts(GXX, arguments[:-2])  # no -o
    assert not compile_in_parts(GXX, arguments[1:])  # no torch
    assert not compile_in_parts(GXX, [])
    assert not (torch_folder.parent / "cache").exists()


@needs_gxx
def test_an_interface_that_does_not_compile(torch_folder: Path) -> None:
    broken = INTERFACE + "int broken = nothing;\n"
    (torch_folder / "_inductor/codegen/aoti_runtime/interface.cpp").write_text(broken)
    assert not compile_in_parts(GXX, arguments_of(torch_folder, broken + MODEL))
    assert [path.suffix for path in (torch_folder.parent / "cache").iterdir()] == [".lock"]


@needs_gxx
def test_no_cache(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(torch_folder, INTERFACE + MODEL)
    monkeypatch.setenv("UNTORCH_CACHE", "")
    assert not compile_in_parts(GXX, arguments)
    (file := torch_folder.parent / "file").write_text("")
    monkeypatch.setenv("UNTORCH_CACHE", str(file / "cache"))
    assert not compile_in_parts(GXX, arguments)


@needs_gxx
def test_what_was_used_last_is_kept(
    torch_folder: Path, compiles: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_interface, "_LIMIT", 2)
    numbers = []
    for level in ("-O0", "-O1", "-O0", "-O2", "-O0", "-O1"):
        assert compile_in_parts(GXX, arguments_of(torch_folder, INTERFACE + MODEL, level))
        numbers.append(compiles())
    assert numbers == [1, 1, 0, 1, 0, 1]
    assert len(list((torch_folder.parent / "cache").glob("*.o"))) == 2


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for given, expected in (("", None), ("/kept", Path("/kept")), (None, tmp_path / ".cache/untorch")):
        monkeypatch.delenv("UNTORCH_CACHE", raising=False)
        if given is not None:
            monkeypatch.setenv("UNTORCH_CACHE", given)
        assert cache_folder() == expected
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/untorch")


def test_this_torchs_interface_opens_the_hosts_code() -> None:
    """What all of the above is for: generated code has the text, and the rest of it compiles without."""
    import torch

    include = Path(torch.__file__).parent / "include"
    interface = runtime_interface._interface([f"-I{include}"])
    assert interface is not None and "AOTInductorModelContainerCreate" in interface
    generated = "\n#include <torch/csrc/inductor/aoti_include/cpu.h>\n" + interface + "int rest;\n"
    parts = runtime_interface._split(generated, interface)
    assert parts is not None
    assert parts[0] + "int rest;\n" == generated
    assert "AOTInductorModelContainerCreate" not in parts[1] and "#define CONVERT_EXCEPTION_TO_ERROR_CODE" in parts[1]
    assert CONTAINER in parts[0] and CONTAINER not in parts[1]
    parts = runtime_interface._split(generated + "AOTInductorModelContainer* kept;\n", interface)
    assert parts is not None and CONTAINER in parts[1]


@pytest.mark.slow
@needs_gxx
@pytest.mark.filterwarnings("ignore")
def test_exports_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second export compiles no interface; the files are equal."""
    import torch

    import untorch.export

    monkeypatch.setenv("UNTORCH_CACHE", str(tmp_path / "cache"))
    files, kept = [], []
    for name in ("a", "b"):
        untorch.export.export(torch.nn.ReLU(), (torch.zeros(2),), tmp_path / f"{name}.pt2", progress=False)
        files.append((tmp_path / f"{name}.pt2").read_bytes())
        kept.append({path.stat().st_ino for path in (tmp_path / "cache").glob("*.o")})
    assert files[0] == files[1]
    assert len(kept[0]) == 2 and kept[0] == kept[1]  # the interface, and the wrappers of portable_link.py
