"""Convolutions and GEMMs that come again, with a fake driver and fake libraries: fake_library.h, fake_driver.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.native.cuda.fake_gpu import ROOT, build_driver, found

CALLS = 6
LIBRARIES = {"dnn": "libcudnn.so.9", "blas": "libcublasLt.so.13"}
KERNELS = {
    "dnn": ("convolve", 3),
    "blas": ("multiply", 5),
}  # and how many of its parameters are the operands' addresses

# Each call is on memory of its own; all results are held.
SCRIPT = """
import os
lib, library = ctypes.CDLL(path), ctypes.CDLL(os.environ["FAKE_SONAME"])
fake.fake_calls.restype = ctypes.c_char_p
i64, i32, p = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
lib.torch_exception_get_what.restype = ctypes.c_char_p
def numbers(*values):
    return (i64 * len(values))(*values), i64(len(values))
held = []
def tensor(*shape):
    memory, out = untorch.empty(shape, "float32", "cuda"), p()
    held.append(memory)
    address = memory.__cuda_array_interface__["data"][0]
    strides = [int(np.prod(shape[i + 1:])) for i in range(len(shape))]
    assert lib.aoti_torch_create_tensor_from_blob(
        p(address), i64(len(shape)), numbers(*shape)[0], numbers(*strides)[0], i64(0), i32(6), i32(1), i32(0),
        ctypes.byref(out)) == 0
    return out, address
# 2 x 8 x 8 x 8 with 8 filters of 3 x 3.
def dnn(_):
    x, w, out = tensor(2, 8, 8, 8), tensor(8, 8, 3, 3), p()
    code = lib.aoti_torch_cuda_convolution(
        x[0], w[0], None, *numbers(1, 1), *numbers(1, 1), *numbers(1, 1), i32(0), *numbers(0, 0), i64(1),
        ctypes.byref(out))
    assert code == 0, lib.torch_exception_get_what()
    data = p()
    assert lib.aoti_torch_get_data_ptr(out, ctypes.byref(data)) == 0
    return [x[1], w[1], data.value]
# cuBLAS computes the transposed product; what is added is a vector, C is D.
def blas(alpha):
    out, bias, a, b = tensor(256, 512), tensor(512), tensor(256, 1024), tensor(1024, 512)
    code = lib.aoti_torch_cuda_addmm_out(
        out[0], bias[0], a[0], b[0], ctypes.c_double(1), ctypes.c_double(alpha))
    assert code == 0, lib.torch_exception_get_what()
    return [b[1], a[1], out[1], out[1], bias[1]]
kind = os.environ["FAKE_KIND"]
found["operands"] = [globals()[kind](1) for _ in range(CALLS)]
found["calls"] = [line.split() for line in fake.fake_calls().decode().splitlines()]
found["fills"] = fake.fake_events().decode().split().count("fill")
executions = getattr(library, f"fake_{kind}_executions")
found["executions"] = executions()
if kind == "blas":
    found["other factor"] = [blas(2), executions(), fake.fake_calls().decode().splitlines()[-1].split()]
""".replace("CALLS", str(CALLS))


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake driver and of the fake libraries."""
    folder = build_driver(tmp_path_factory.mktemp("fakes"))
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    flags = ["-std=c++20", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'native'}"]
    for kind, name in LIBRARIES.items():
        source = Path(__file__).with_name(f"fake_{kind}.cpp")
        command = [compiler, *flags, f"-Wl,-soname,{name}", str(source), "-o", str(folder / name), "-ldl"]
        subprocess.run(command, check=True)
    return folder


def called(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str) -> dict[str, Any]:
    from tests.native.shim import library_path

    monkeypatch.setenv("FAKE_KIND", kind)
    monkeypatch.setenv("FAKE_SONAME", LIBRARIES[kind])
    monkeypatch.setenv("FAKE_LIBRARY", mode)
    result = found(folder, Path(os.path.abspath(library_path())), SCRIPT, GRAPHS=1, NODES=1)
    # Each launch has the operands of its call, by the library or without it.
    assert len(result["calls"]) == CALLS
    for operands, (name, _, grid, _, *words) in zip(result["operands"], result["calls"], strict=True):
        assert (name, grid) == (KERNELS[kind][0], "9")
        assert list(map(int, words[: KERNELS[kind][1]])) == operands
    return result


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("mode", ["plain", "cluster", "shared", "zeros"])
def test_later_calls_do_without_the_library(mode: str, kind: str, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = called(fakes, monkeypatch, kind, mode)
    # The second call is captured three times.
    assert result["executions"] == 2 + 3
    clusters = {call[3] for call in result["calls"]}
    assert clusters == {"2" if mode == "cluster" else "1"}
    assert result["fills"] == (CALLS if mode == "zeros" else 0)
    streams = {call[1] for call in result["calls"]}
    assert len(streams) == 1
    # A constant stays one, and addresses within operands move with them.
    sizes = {"dnn": 8, "blas": 11}[kind]
    assert {call[sizes] for call in result["calls"]} == {str(7 << 32 | 7)}


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("mode", ["ones", "distance", "halves", "low", "own", "half"])
def test_calls_stay_the_librarys(mode: str, kind: str, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = called(fakes, monkeypatch, kind, mode)
    assert CALLS < result["executions"] <= CALLS + 3
    assert len({call[1] for call in result["calls"]}) == 1


@pytest.mark.parametrize("kind", LIBRARIES)
def test_kernels_beside_each_other_stay_the_librarys(kind: str, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they would take longer."""
    monkeypatch.setenv("FAKE_GPU_BRANCHES", "1")
    assert called(fakes, monkeypatch, kind, "plain")["executions"] == CALLS + 1


def test_another_factor_is_another_call(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = called(fakes, monkeypatch, "blas", "plain")
    operands, executions, (_, _, _, _, *words) = result["other factor"]
    assert executions == result["executions"] + 1
    assert list(map(int, words[:6])) == [*operands, int.from_bytes(b"\0\0\0\x40", "little")]
