"""Precompiled headers: the same object files, a header from the second file on, and none without a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import KEPT
from untorch.export import precompiled_headers
from untorch.export.precompiled_headers import CONTAINER, headers_folder, precompiled_header, with_precompiled_header

GXX = shutil.which("g++")
needs_gxx = pytest.mark.skipif(GXX is None, reason="needs g++")


def compile_file(folder: Path, name: str, headers: Path, flags: tuple[str, ...] = ()) -> tuple[bytes, bool]:
    """The object file of folder/name, and whether a precompiled header was included."""
    arguments = [
        str(folder / name), "-O0", "-fPIC", f"-ffile-prefix-map={folder}/=", *flags, "-c", "-o", str(folder / "out.o"),
    ]  # fmt: skip
    header = precompiled_header(str(GXX), arguments, str(folder / name), headers)
    included = ["-include", str(header)] if header is not None else []
    subprocess.run([str(GXX), "-Winvalid-pch", "-Werror", *included, *arguments], check=True)
    return (folder / "out.o").read_bytes(), header is not None


@needs_gxx
def test_the_second_file_has_its_headers_precompiled(tmp_path: Path) -> None:
    headers, objects = tmp_path / "headers", []
    for index in range(3):
        folder = tmp_path / str(index)
        folder.mkdir()
        text = "\n// comment\n#include <vector>\n\n#include <cassert>\nint f() { assert(std::vector<int>(3).size()); return 1; }\n"
        (folder / "a.wrapper.cpp").write_text(text)
        code, is_precompiled = compile_file(folder, "a.wrapper.cpp", headers)
        objects.append(code)
        assert is_precompiled == (index > 0) == (len(list(headers.glob("*.gch"))) == 1)
    assert objects[0] == objects[1] == objects[2]
    (header,) = headers.glob("*.h")
    assert header.read_text() == "#include <vector>\n#include <cassert>\n"


@needs_gxx
def test_other_flags_have_other_headers(tmp_path: Path) -> None:
    (tmp_path / "a.kernel.cpp").write_text("#include <cstddef>\nint size = VALUE;\n")
    first, _ = compile_file(tmp_path, "a.kernel.cpp", tmp_path / "headers", ("-DVALUE=1",))
    second, _ = compile_file(tmp_path, "a.kernel.cpp", tmp_path / "headers", ("-DVALUE=2",))
    assert second != first
    assert len(list((tmp_path / "headers").glob("*.h"))) == 2
    assert not list((tmp_path / "headers").glob("*.gch"))


@needs_gxx
def test_changed_folders_have_other_headers(tmp_path: Path) -> None:
    (include := tmp_path / "include").mkdir()
    (include / "size.h").write_text("#pragma once\nconstexpr int size = 1;\n")
    (tmp_path / "a.kernel.cpp").write_text("#include <size.h>\nint f() { return size; }\n")
    flags = (f"-I{include}",)
    for _ in range(2):
        first, _ = compile_file(tmp_path, "a.kernel.cpp", tmp_path / "headers", flags)
    (include / "size.h").unlink()
    (include / "size.h").write_text("#pragma once\nconstexpr int size = 2;\n")
    os.utime(include, ns=(0, include.stat().st_mtime_ns + 1))
    second, is_precompiled = compile_file(tmp_path, "a.kernel.cpp", tmp_path / "headers", flags)
    assert not is_precompiled and second != first


@needs_gxx
def test_headers_name_themselves_as_without(tmp_path: Path) -> None:
    """__FILE__ in a header, with and without precompiling."""
    (include := tmp_path / "include").mkdir()
    (include / "name.h").write_text("#pragma once\ninline const char* name() { return __FILE__; }\n")
    flags, objects = (f"-I{include}", f"-ffile-prefix-map={include}/=headers/"), []
    for index in range(3):
        (folder := tmp_path / str(index)).mkdir()
        (folder / "a.kernel.cpp").write_text("#include <name.h>\nconst char* f() { return name(); }\n")
        objects.append(compile_file(folder, "a.kernel.cpp", tmp_path / "precompiled", flags))
    assert [is_precompiled for _, is_precompiled in objects] == [False, True, True]
    assert all(b"headers/name.h" in code and bytes(tmp_path) not in code for code, _ in objects)


@needs_gxx
def test_headers_that_do_not_compile_are_left_to_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "a.kernel.cpp").write_text("#include <no_such_header>\nint size;\n")
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            compile_file(tmp_path, "a.kernel.cpp", tmp_path / "headers")
    assert [path.suffix for path in sorted((tmp_path / "headers").iterdir())] == [".h", ".lock"]


@needs_gxx
def test_what_was_used_last_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompiled_headers, "_LIMIT", 2)
    (tmp_path / "a.kernel.cpp").write_text("#include <cstddef>\nint size = VALUE;\n")
    headers = tmp_path / "headers"
    for value in (1, 1, 2, 2, 1, 3, 3):
        code, _ = compile_file(tmp_path, "a.kernel.cpp", headers, (f"-DVALUE={value}",))
    assert len(list(headers.glob("*.gch"))) == 2
    assert [compile_file(tmp_path, "a.kernel.cpp", headers, (f"-DVALUE={v}",))[1] for v in (1, 3)] == [True, True]
    assert code == compile_file(tmp_path, "a.kernel.cpp", tmp_path / "other", ("-DVALUE=3",))[0]


def test_a_source_without_includes_has_none(tmp_path: Path) -> None:
    (tmp_path / "a.kernel.cpp").write_text("int size;\n")
    assert precompiled_header("g++", [], str(tmp_path / "a.kernel.cpp"), tmp_path / "headers") is None
    assert not (tmp_path / "headers").exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "a.kernel.cpp").write_text("#include <cstddef>\n")
    assert precompiled_header("g++", [], str(tmp_path / "a.kernel.cpp"), tmp_path / "file" / "headers") is None


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_HEADERS", str(tmp_path))
    assert headers_folder() == tmp_path
    monkeypatch.setenv("UNTORCH_HEADERS", "")
    assert headers_folder() is None
    monkeypatch.delenv("UNTORCH_HEADERS")
    assert headers_folder() is None


@needs_gxx
def test_the_tests_compiler_includes_them(tmp_path: Path) -> None:
    """tests/kept_compiles/g++.py; errors are the compiler's, and other files are compiled as they are."""
    compiler = Path(__file__).resolve().parents[2] / "kept_compiles" / "g++.py"
    environment = os.environ | {"UNTORCH_TEST_CXX": str(GXX), "UNTORCH_HEADERS": str(tmp_path / "headers")}
    for name, text, status, kept in (
        ("a.cpp", "int size;", 0, []), ("a.kernel.cpp", "int size;", 0, [".h"]),
        ("a.kernel.cpp", "int size;", 0, [".gch", ".h", ".lock"]),
        ("a.kernel.cpp", "int size = nothing;", 1, [".gch", ".h", ".lock"]),
    ):  # fmt: skip
        (tmp_path / name).write_text(f"#include <cstddef>\n{text}\n")
        command = [sys.executable, str(compiler), str(tmp_path / name), "-c", "-o", str(tmp_path / "out.o")]
        assert subprocess.run(command, env=environment, capture_output=True).returncode == status
        assert sorted(path.suffix for path in tmp_path.glob("headers/*")) == kept


@pytest.mark.skipif(os.environ.get("CXX") != str(KEPT / "g++"), reason="another compiler was chosen")
@pytest.mark.parametrize(
    ("arguments", "starts_python"),
    [
        (["--version"], False),
        (["-c", "-x", "c++", "-", "-o", "a.wrapper.o.rest"], False),
        (["a.wrapper.o", "a.kernel.o", "-shared", "-o", "a.wrapper.so"], False),
        (["-include", "b.h", "a.kernel.cpp", "-c"], False),
        (["a.kernel.cpp", "-c"], True),
        (["-include", "b.h", "a.wrapper.cpp", "-c"], True),
    ],
)
def test_commands_that_the_tests_compiler_runs_in_python(
    tmp_path: Path, arguments: list[str], starts_python: bool
) -> None:
    """g++.py ends with a KeyError where it is not told the real compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "UNTORCH_TEST_CXX"}
    command = [KEPT / "g++", *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True)
    assert (b"KeyError: 'UNTORCH_TEST_CXX'" in done.stderr) == starts_python


def test_other_commands_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_HEADERS", str(tmp_path / "headers"))
    (tmp_path / "a.kernel.cpp").write_text("#include <cstddef>\n")
    source = str(tmp_path / "a.kernel.cpp")
    for arguments in ([source], ["a.cpp", "-c"], [source, source, "-c"], ["-include", "b.h", source, "-c"]):
        assert with_precompiled_header("g++", arguments) == arguments
    assert not (tmp_path / "headers").exists()


def test_the_containers_header_is_the_interfaces_alone(tmp_path: Path) -> None:
    (tmp_path / "a.wrapper.cpp").write_text(f"#include <vector>\n{CONTAINER}#include <string>\nint f();\n")
    assert precompiled_headers._includes(str(tmp_path / "a.wrapper.cpp")) == [
        "#include <vector>\n", "#include <string>\n",
    ]  # fmt: skip
