"""The public C headers: they compile alone in every language that they are for, and their codes are PyTorch's."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import untorch
from tests.unit.test_embedding import include_directory, linked, packages, stream_library
from untorch.cli.process import library_path

HEADERS = ("untorch/untorch.h", "untorch/caller_stream.h")
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]
# Uses what a header declares, in the common subset of C and C++.
BODIES = {
    "untorch/untorch.h": """
static int is_float(const untorch_view* view) {
  return view->dtype == UNTORCH_FLOAT32 && view->device_type == UNTORCH_CPU;
}
int main(void) {
  const int64_t one = 1;
  float value = 0;
  untorch_view view = {&value, UNTORCH_FLOAT32, UNTORCH_CPU, -1, 1, &one, &one, 0};
  untorch_load_options options = {sizeof options, NULL, 1, 0, 0, 0, 0, UNTORCH_TF32_NEVER, -1, NULL, 0};
  return is_float(&view) && options.struct_size == sizeof(untorch_load_options) ? 0 : 1;
}
""",
    "untorch/caller_stream.h": """
int main(void) {
  untorch_caller_stream setting = {NULL, 1};
  const untorch_caller_stream before = untorch_caller_stream_exchange(setting);
  const untorch_caller_stream now = untorch_caller_stream_peek();
  untorch_caller_stream_exchange(before);
  return before.is_set == 0 && now.is_set == 1 && now.stream == NULL && untorch_caller_stream_peek().is_set == 0 ? 0 : 1;
}
""",
}


def compilers() -> list[Any]:
    """GCC and clang where they are installed, in each language and version."""
    found = []
    for names, extension, versions in (
        (("gcc", "clang"), "c", ("c99", "c11", "c17")),
        (("g++", "clang++"), "cpp", ("c++17", "c++20")),
    ):
        for name in names:
            skip = [] if shutil.which(name) else [pytest.mark.skip(reason=f"{name} is not installed")]
            found += [pytest.param(name, extension, v, marks=skip, id=f"{name}-{v}") for v in versions]
    return found


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize(("compiler", "extension", "version"), compilers())
def test_each_header_compiles_alone(header: str, compiler: str, extension: str, version: str, tmp_path: Path) -> None:
    source, program = tmp_path / f"alone.{extension}", tmp_path / "alone"
    library = stream_library() if header == "untorch/caller_stream.h" else library_path()
    source.write_text(f"#include <{header}>\n#include <{header}>\n{BODIES[header]}")
    command = [compiler, f"-std={version}", *STRICT, f"-I{include_directory()}", str(source), "-o", str(program)]
    done = subprocess.run(
        [*command, str(library), f"-Wl,-rpath,{library.parent}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert subprocess.run([program], check=False).returncode == 0


@pytest.mark.parametrize(("compiler", "extension", "version"), [p for p in compilers() if p.values[1] == "cpp"])
def test_the_guard_restores_the_stream(compiler: str, extension: str, version: str, tmp_path: Path) -> None:
    source, program = tmp_path / "guard.cpp", tmp_path / "guard"
    source.write_text("""
#include <untorch/caller_stream.h>
int main() {
  if (untorch::getCallerStream()) return 1;
  {
    const untorch::CallerStreamGuard guard(nullptr);
    if (!untorch::getCallerStream() || *untorch::getCallerStream() != nullptr) return 2;
  }
  return untorch::getCallerStream() ? 3 : 0;
}
""")
    command = [compiler, f"-std={version}", *STRICT, f"-I{include_directory()}", str(source), "-o", str(program)]
    subprocess.run([*command, *linked()], check=True)
    assert subprocess.run([program], check=False).returncode == 0


def test_all_public_headers_are_tested() -> None:
    folder = include_directory()
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.h")) == sorted(HEADERS)


def test_the_codes_are_pytorchs() -> None:
    """torch.dtype has no number in Python; PyTorch's header has them all."""
    torch = pytest.importorskip("torch")
    text = (include_directory() / "untorch" / "untorch.h").read_text()
    ours = {name: int(code) for name, code in re.findall(r"UNTORCH_(\w+) = (\d+)", text)}
    headers = Path(torch.__path__[0]) / "include"
    scalar_types = next(
        path
        for path in (headers / "torch/headeronly/core/ScalarType.h", headers / "c10/core/ScalarType.h")
        if path.is_file()
    ).read_text()
    listed = re.findall(r"_\([\w:<>]+, (\w+)\) /\* (\d+) \*/", scalar_types)
    names = {
        "Byte": "UINT8", "Char": "INT8", "Short": "INT16", "Int": "INT32", "Long": "INT64", "Half": "FLOAT16",
        "Float": "FLOAT32", "Double": "FLOAT64", "ComplexHalf": "COMPLEX32", "ComplexFloat": "COMPLEX64",
        "ComplexDouble": "COMPLEX128", "Bool": "BOOL", "BFloat16": "BFLOAT16", "Float8_e5m2": "FLOAT8_E5M2",
        "Float8_e4m3fn": "FLOAT8_E4M3FN", "Float8_e5m2fnuz": "FLOAT8_E5M2FNUZ", "Float8_e4m3fnuz": "FLOAT8_E4M3FNUZ",
        "UInt16": "UINT16", "UInt32": "UINT32", "UInt64": "UINT64", "Float8_e8m0fnu": "FLOAT8_E8M0FNU",
        "Float4_e2m1fn_x2": "FLOAT4_E2M1FN_X2",
    }  # fmt: skip
    theirs = {names[name]: int(code) for name, code in listed if name in names}
    assert len(theirs) == len(names)
    assert {name: ours[name] for name in theirs} == theirs
    # The values of c10::DeviceType.
    assert (ours["CPU"], ours["CUDA"]) == (0, 1)


class Options(ctypes.Structure):
    """untorch_load_options, and what a later version might add."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("device", ctypes.c_char_p),
        ("num_runners", ctypes.c_size_t),
        ("num_threads", ctypes.c_int32),
        ("dequantize_weights", ctypes.c_int32),
        ("verify", ctypes.c_int32),
        ("copy", ctypes.c_int32),
        ("tf32", ctypes.c_int32),
        ("spin_us", ctypes.c_int32),
        ("weights", ctypes.c_char_p),
        ("cuda_graphs", ctypes.c_size_t),
        ("later", ctypes.c_int64),
    )


KNOWN = Options.later.offset
FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH = (
    getattr(Options, name).offset
    for name in ("dequantize_weights", "verify", "tf32", "spin_us", "weights", "cuda_graphs")
)
Open = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def open_with(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a file for the CPU with options; gives the status and the text of the error."""
    library = ctypes.CDLL(str(library_path()), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    library.untorch_last_error.restype = ctypes.c_char_p
    library.untorch_program_free.argtypes = [ctypes.c_void_p]
    helpers = packages()
    folder = tmp_path_factory.mktemp("options")
    path = helpers.write_package(folder / "affine.pt2", helpers.build_library(folder), "forward")

    def call(size: int, **fields: Any) -> tuple[int, str]:
        options = Options(**{"struct_size": size, "num_runners": 1, **fields})
        program = ctypes.c_void_p()
        status = library.untorch_program_open(str(path).encode(), ctypes.byref(options), ctypes.byref(program))
        text = library.untorch_last_error().decode() if status != 0 else ""
        library.untorch_program_free(program)
        return status, text

    return call


def test_options_of_the_library_s_own_size_are_read(open_with: Open) -> None:
    assert open_with(KNOWN) == (0, "")
    assert open_with(KNOWN, verify=1, copy=1) == (0, "")
    for name in ("dequantize_weights", "verify", "copy"):
        status, text = open_with(KNOWN, **{name: 2})
        assert status == 2 and text == f"untorch_load_options: {name} must be 0 or 1, got 2"
    assert open_with(KNOWN, tf32=2) == (0, "")
    assert open_with(KNOWN, tf32=3) == (2, "untorch_load_options: tf32 must be an untorch_tf32, got 3")
    for spin_us in (-1, 1, 1_000_000):
        assert open_with(KNOWN, spin_us=spin_us) == (0, "")
    for spin_us in (-2, 1_000_001):
        text = f"untorch_load_options: spin_us must be from -1 to 1000000, got {spin_us}"
        assert open_with(KNOWN, spin_us=spin_us) == (2, text)
    assert open_with(KNOWN, cuda_graphs=1024) == (0, "")
    assert open_with(KNOWN, cuda_graphs=1025) == (2, "cuda_graphs must be from 0 to 1024, got 1025")
    status, text = open_with(KNOWN, weights=b"/tmp")
    assert status == 2 and text.endswith("affine.pt2 has all of its own: leave weights out")


def test_a_smaller_struct_is_an_older_header(open_with: Open) -> None:
    """Nothing is read past struct_size."""
    assert open_with(FIRST, dequantize_weights=2, later=1) == (0, "")
    assert open_with(FIRST + 2, dequantize_weights=2) == (0, "")  # no part of a field, either
    assert open_with(SECOND, verify=2, copy=2) == open_with(SECOND + 4, verify=2, copy=2) == (0, "")
    assert open_with(SECOND, dequantize_weights=2)[0] == 2
    assert open_with(THIRD, tf32=3) == (0, "") and open_with(THIRD, copy=2)[0] == 2
    assert open_with(FOURTH, spin_us=-2) == (0, "") and open_with(FOURTH, tf32=3)[0] == 2
    assert open_with(FIFTH, weights=b"/tmp") == (0, "") and open_with(FIFTH, spin_us=-2)[0] == 2
    assert open_with(SIXTH, cuda_graphs=1025) == (0, "") and open_with(SIXTH, weights=b"/tmp")[0] == 2
    assert open_with(FIRST, num_threads=-1)[0] == 2  # the first version's fields are read
    for size in (0, 8, FIRST - 1):
        status, text = open_with(size)
        assert status == 2
        assert text == (
            f"untorch_load_options: struct_size is {size}, expected from {FIRST} to 4096: "
            "set it to sizeof(untorch_load_options)"
        )


def test_a_larger_struct_is_a_newer_header(open_with: Open) -> None:
    """Options that this library does not know must be 0: they are not ignored silently."""
    assert open_with(KNOWN + 8) == (0, "")
    status, text = open_with(KNOWN + 8, later=1)
    assert status == 4
    assert text == (
        f"untorch_load_options: byte {KNOWN} of {KNOWN + 8} is set, and this library ({untorch.__version__}) knows the "
        f"first {KNOWN}: leave newer options at 0, or link with the library of the header's version"
    )
    status, text = open_with(1 << 40)
    assert status == 2 and "expected from 28 to 4096" in text


def test_a_program_from_memory(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(library_path()), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    library.untorch_last_error.restype = ctypes.c_char_p
    library.untorch_program_free.argtypes = [ctypes.c_void_p]
    library.untorch_program_num_methods.argtypes = [ctypes.c_void_p]
    helpers = packages()
    data = helpers.write_package(tmp_path / "affine.pt2", helpers.build_library(tmp_path), "forward").read_bytes()
    for copy in (0, 1):
        options = Options(struct_size=KNOWN, num_runners=1, copy=copy)
        program = ctypes.c_void_p()
        memory = ctypes.create_string_buffer(data, len(data))
        status = library.untorch_program_open_memory(memory, len(data), ctypes.byref(options), ctypes.byref(program))
        assert (status, library.untorch_program_num_methods(program)) == (0, 1)
        library.untorch_program_free(program)
    assert library.untorch_program_open_memory(None, 0, None, ctypes.byref(program)) == 2
    assert library.untorch_last_error() == b"untorch_program_open_memory: data and out must not be null"
    assert library.untorch_program_open_memory(memory, 0, None, ctypes.byref(program)) == 3
    assert library.untorch_last_error() == b"<memory> is empty"
