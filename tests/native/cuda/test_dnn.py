"""Calls of one convolution, with a fake driver and a fake cuDNN: fake_driver.cpp, fake_dnn.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.native.cuda.fake_gpu import ROOT, build_driver, found

CALLS = 6

# Convolutions of 2 x 8 x 8 x 8 with 8 filters of 3 x 3, each on memory of its own; all results are held.
SCRIPT = """
from untorch import _core
lib, dnn = ctypes.CDLL(path), ctypes.CDLL("libcudnn.so.9")
fake.fake_calls.restype = ctypes.c_char_p
i64, p = ctypes.c_int64, ctypes.c_void_p
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
        p(address), i64(len(shape)), numbers(*shape)[0], numbers(*strides)[0], i64(0), ctypes.c_int32(6),
        ctypes.c_int32(1), ctypes.c_int32(0), ctypes.byref(out)) == 0
    return out, address
def convolve():
    x, w, out = tensor(2, 8, 8, 8), tensor(8, 8, 3, 3), p()
    code = lib.aoti_torch_cuda_convolution(
        x[0], w[0], None, *numbers(1, 1), *numbers(1, 1), *numbers(1, 1), ctypes.c_int32(0), *numbers(0, 0), i64(1),
        ctypes.byref(out))
    assert code == 0, lib.torch_exception_get_what()
    data = p()
    assert lib.aoti_torch_get_data_ptr(out, ctypes.byref(data)) == 0
    return [x[1], w[1], data.value]
def fills():
    return fake.fake_events().decode().split().count("fill")
found["operands"] = [convolve() for _ in range(CALLS)]
found["calls"] = [line.split() for line in fake.fake_calls().decode().splitlines()]
found["executions"], found["fills"] = dnn.fake_dnn_executions(), fills()
""".replace("CALLS", str(CALLS))


@pytest.fixture(scope="module")
def with_dnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake driver and of the fake cuDNN."""
    folder = build_driver(tmp_path_factory.mktemp("with_dnn"))
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    source, target = Path(__file__).with_name("fake_dnn.cpp"), folder / "libcudnn.so.9"
    flags = ["-std=c++20", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcudnn.so.9"]
    subprocess.run([compiler, *flags, f"-I{ROOT / 'native'}", str(source), "-o", str(target), "-ldl"], check=True)
    return folder


def called(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> dict[str, Any]:
    from tests.native.shim import library_path

    monkeypatch.setenv("FAKE_DNN", mode)
    result = found(folder, Path(os.path.abspath(library_path())), SCRIPT, GRAPHS=1, NODES=1)
    # Each launch has the operands of its call, by cuDNN or without it.
    assert len(result["calls"]) == CALLS
    for operands, (name, _, grid, _, *words) in zip(result["operands"], result["calls"], strict=True):
        assert (name, grid) == ("convolve", "9")
        assert list(map(int, words[:2])) == operands[:2]
        assert int(words[2]) == operands[2]
    return result


@pytest.mark.parametrize("mode", ["plain", "cluster", "shared", "zeros"])
def test_later_calls_do_without_the_library(mode: str, with_dnn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = called(with_dnn, monkeypatch, mode)
    # The second call is captured three times.
    assert result["executions"] == 2 + 3
    clusters = {call[3] for call in result["calls"]}
    assert clusters == {"2" if mode == "cluster" else "1"}
    assert result["fills"] == (CALLS if mode == "zeros" else 0)
    streams = {call[1] for call in result["calls"]}
    assert len(streams) == 1
    # A constant stays one, and addresses within operands move with them.
    assert {call[8] for call in result["calls"]} == {str(7 << 32 | 7)}


@pytest.mark.parametrize("mode", ["ones", "distance", "halves", "low", "own", "half"])
def test_calls_stay_the_librarys(mode: str, with_dnn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = called(with_dnn, monkeypatch, mode)
    assert CALLS < result["executions"] <= CALLS + 3
    assert len({call[1] for call in result["calls"]}) == 1
