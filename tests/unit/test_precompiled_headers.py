"""tests/precompiled_headers/g++.py: the same object files, and a header from the second file on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = Path(__file__).resolve().parents[1] / "precompiled_headers" / "g++.py"
GXX = shutil.which("g++")

pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")


def compile_file(folder: Path, name: str, headers: Path, flags: tuple[str, ...] = ()) -> bytes:
    """The object file that the wrapper makes of folder/name."""
    command = [
        sys.executable, str(COMPILER), str(folder / name), "-O0", "-fPIC", f"-ffile-prefix-map={folder}/=", *flags,
        "-c", "-o", str(folder / "out.o"),
    ]  # fmt: skip
    environment = os.environ | {"UNTORCH_TEST_CXX": str(GXX), "UNTORCH_TEST_HEADERS": str(headers)}
    subprocess.run(command, check=True, env=environment)
    return (folder / "out.o").read_bytes()


def test_the_second_file_has_its_headers_precompiled(tmp_path: Path) -> None:
    headers, objects = tmp_path / "headers", []
    for index in range(3):
        folder = tmp_path / str(index)
        folder.mkdir()
        text = "\n// comment\n#include <vector>\n\n#include <cassert>\nint f() { assert(std::vector<int>(3).size()); return 1; }\n"
        (folder / "a.wrapper.cpp").write_text(text)
        objects.append(compile_file(folder, "a.wrapper.cpp", headers))
        assert len(list(headers.glob("*.gch"))) == (index > 0)
    assert objects[0] == objects[1] == objects[2]
    (header,) = headers.glob("*.h")
    assert header.read_text() == "#include <vector>\n#include <cassert>\n"


def test_other_flags_have_other_headers(tmp_path: Path) -> None:
    (tmp_path / "a.kernel.cpp").write_text("#include <cstddef>\nint size = VALUE;\n")
    first = compile_file(tmp_path, "a.kernel.cpp", tmp_path / "headers", ("-DVALUE=1",))
    assert compile_file(tmp_path, "a.kernel.cpp", tmp_path / "headers", ("-DVALUE=2",)) != first
    assert len(list((tmp_path / "headers").glob("*.h"))) == 2
    assert not list((tmp_path / "headers").glob("*.gch"))


def test_other_files_are_compiled_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("#include <cstddef>\nint size;\n")
    for _ in range(2):
        compile_file(tmp_path, "a.cpp", tmp_path / "headers")
    assert not (tmp_path / "headers").exists()


def test_errors_are_the_compilers(tmp_path: Path) -> None:
    (tmp_path / "a.kernel.cpp").write_text("#include <cstddef>\nint size = nothing;\n")
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError) as caught:
            compile_file(tmp_path, "a.kernel.cpp", tmp_path / "headers")
        assert caught.value.returncode == 1
