"""Programs on the GPU: loading and refusing, calls with numpy arrays, exporting, imports in every order."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from tests.gpu.models import Gemm, Mlp, N, close, exported, reference, rewritten
from untorch.export import export


def run_python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints for the code, which has to succeed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_numpy_in_and_out(mlp: tuple[Path, nn.Module]) -> None:
    path, module = mlp
    with untorch.load(path) as program:
        assert program.device == program.forward.device == "cuda:0"
        for batch in (1, 7, 512):
            x = np.random.default_rng(batch).standard_normal((batch, 64)).astype(np.float32)
            y = program(x)
            assert isinstance(y, np.ndarray)
            torch.testing.assert_close(torch.from_numpy(y), reference(module, x), rtol=1e-4, atol=1e-4)
        memory = program.memory()
        assert memory["device"] == "cuda:0" and memory["total"] > memory["free"] > 0 and memory["reserved"] > 0
    with untorch.load(path, device="cuda:0") as program:
        assert program.device == "cuda:0"
    with pytest.raises(untorch.InvalidArgumentError, match="was compiled for cuda and cannot run on cpu"):
        untorch.load(path, device="cpu")
    with pytest.raises(untorch.InvalidArgumentError):
        untorch.load(path, device="cuda:99")


def test_the_manifest(mlp: tuple[Path, nn.Module]) -> None:
    major, minor = torch.cuda.get_device_capability()
    with untorch.load(mlp[0]) as program:
        method = program.manifest["methods"]["forward"]
    assert method["device"] == "cuda"
    assert method["gpu_architecture"] == f"sm_{major}{minor}"
    assert all("device" not in constant for constant in method["constants"])


def test_verification(tmp_path: Path) -> None:
    report = export(Mlp().eval(), (torch.randn(4, 64),), tmp_path / "v.pt2", device="cuda", verify=True, progress=False)
    assert report.methods["forward"].differences[0].max_rel < 1e-3


def test_buffers_that_calls_change(counter: Path) -> None:
    with untorch.load(counter) as program:
        for i in range(1, 4):
            assert (program(np.ones(4, np.float32)) == i).all()


LOADER = "torch's loader"
ORDERS = [("torch", "untorch"), ("untorch", "torch"), ("untorch", "cupy"), ("untorch",)]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_orders_of_importing(either_mlp: tuple[Path, nn.Module], order: tuple[str, ...]) -> None:
    """A process that starts cold runs packages of both packagers, whatever else is imported, before or after."""
    if "cupy" in order:
        pytest.importorskip("cupy")
    path, module = either_mlp
    code = f"""
import json, sys
{"; ".join(f"import {name}" for name in order)}
import numpy
program = untorch.load({str(path)!r})
x = numpy.ones((2, 64), numpy.float32)
first = program(x)
second = first
if "torch" in sys.modules:
    second = torch.from_dlpack(program(torch.ones(2, 64, device="cuda"))).cpu().numpy()
else:
    assert not any(name == "torch" or name.startswith("torch.") for name in sys.modules)
if "cupy" in sys.modules:
    second = cupy.asnumpy(cupy.from_dlpack(program(cupy.ones((2, 64), numpy.float32))))
print(json.dumps([first.tolist(), second.tolist()]))
"""
    expected = reference(module, np.ones((2, 64), np.float32))
    for result in json.loads(run_python(code).splitlines()[-1]):
        close(result, expected)


@pytest.mark.parametrize("first", ["untorch", LOADER])
def test_beside_torchs_own_loader(stock_mlp: tuple[Path, nn.Module], first: str) -> None:
    """One stock package in one process by both loaders, in either order; neither disturbs the other's later calls."""
    path, module = stock_mlp
    ours = f"import untorch\nprogram = untorch.load({str(path)!r})\nours = program(x)\n"
    theirs = f"import torch\nmodel = torch._inductor.aoti_load_package({str(path)!r})\ntheirs = model(torch.from_numpy(x).cuda())\n"
    code = "import json, numpy\nx = numpy.ones((2, 64), numpy.float32)\n"
    code += ours + theirs if first == "untorch" else theirs + ours
    code += "again = [program(x), model(torch.from_numpy(x).cuda()).cpu().numpy()]\n"
    code += "print(json.dumps([r.tolist() for r in (ours, theirs.cpu(), *again)]))\n"
    expected = reference(module, np.ones((2, 64), np.float32))
    for result in json.loads(run_python(code).splitlines()[-1]):
        close(result, expected)


def test_the_users_model_stays_where_it_is(tmp_path: Path) -> None:
    module = Mlp().eval()
    export(module, (torch.randn(4, 64),), tmp_path / "stays.pt2", device="cuda", progress=False)
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    on_gpu = Mlp().eval().cuda()
    export(on_gpu, (torch.randn(4, 64, device="cuda"),), tmp_path / "there.pt2", device="cuda", progress=False)
    program = torch.export.export(module, (torch.randn(4, 64),))
    export(program, path=tmp_path / "program.pt2", device="cuda", progress=False)
    with untorch.load(tmp_path / "program.pt2") as loaded:
        x = np.ones((4, 64), np.float32)
        torch.testing.assert_close(torch.from_numpy(loaded(x)), reference(module, x), rtol=1e-4, atol=1e-4)


def test_a_constant_on_the_cpu(folder: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor([1.0, 2.0, 3.0]).to(x.device) + torch.tensor(5.0)

    path = exported(folder, "constant", Model(), (torch.ones(3),))
    with untorch.load(path) as program:
        assert program(np.ones(3, np.float32)).tolist() == [6, 7, 8]


def test_an_input_that_is_aligned_to_its_dtype_only(mlp: tuple[Path, nn.Module]) -> None:
    """Compiled kernels may load 16 bytes at a time; an input at an odd multiple of 4 gives the same results."""
    path, module = mlp
    offset = torch.randn(4 * 64 + 1, device="cuda")[1:].view(4, 64)
    assert offset.data_ptr() % 16 == 4
    with untorch.load(path) as program:
        close(torch.from_dlpack(program(offset)), reference(module, offset))


@pytest.mark.parametrize("wrong", ["75", "99", "100"])
def test_another_architecture_is_refused(either_mlp: tuple[Path, nn.Module], tmp_path: Path, wrong: str) -> None:
    """A package for another GPU is refused when it is loaded; both architectures are named."""
    major, minor = torch.cuda.get_device_capability()
    if (int(wrong) // 10, int(wrong) % 10) <= (major, minor) and int(wrong) // 10 == major:
        pytest.skip("this GPU runs it")
    changed = []

    def change(name: str, data: bytes) -> bytes:
        if name != "extra/untorch.json" and not name.endswith("metadata.json"):
            return data
        document = json.loads(data)
        for method in document["methods"].values() if "methods" in document else [document]:
            key = "gpu_architecture" if "gpu_architecture" in method else "AOTI_COMPUTE_CAPABILITY"
            if key in method:
                method[key] = f"sm_{wrong}" if key == "gpu_architecture" else wrong
                changed.append(key)
        return json.dumps(document).encode()

    path = rewritten(either_mlp[0], tmp_path / "other.pt2", change)
    assert changed
    with pytest.raises(untorch.UnsupportedError) as caught:
        untorch.load(path)
    message = str(caught.value)
    assert f"was compiled for sm_{wrong}," in message and f"is sm_{major}{minor}" in message and str(path) in message
    assert torch.cuda.get_device_name() in message


def test_a_rewritten_package_is_a_package(either_mlp: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """The test above changes nothing else: an unchanged copy runs."""
    path, module = either_mlp
    x = np.ones((2, 64), np.float32)
    with untorch.load(rewritten(path, tmp_path / "copy.pt2", lambda _, data: data)) as program:
        close(program(x), reference(module, x))


def test_no_gpu_is_an_error(either_mlp: tuple[Path, nn.Module]) -> None:
    """Without a visible GPU loading fails and says what is missing; nothing runs on the CPU instead."""
    path, _ = either_mlp
    code = f"""
import untorch
try:
    untorch.load({str(path)!r})
except untorch.UnsupportedError as error:
    print(error)
else:
    print("loaded")
"""
    message = run_python(code, CUDA_VISIBLE_DEVICES="")
    assert "was compiled for cuda" in message and "reports no GPU (CUDA_ERROR_NO_DEVICE)" in message


HIDE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

void *dlopen(const char *name, int flags) {
  void *(*next)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
  if (name && strstr(name, "libcublas")) return NULL;
  return next(name, flags);
}
int access(const char *name, int mode) {
  int (*next)(const char *, int) = (int (*)(const char *, int))dlsym(RTLD_NEXT, "access");
  if (name && strstr(name, "libcublas")) return -1;
  return next(name, mode);
}
"""


def test_without_cublas(folder: Path, mlp: tuple[Path, nn.Module], chain: Path, tmp_path: Path) -> None:
    """Without cuBLAS a large GEMM is an error that says how to get it; models without one run, before and after."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("hiding the library needs a C compiler")
    source, library = tmp_path / "hide.c", tmp_path / "hide.so"
    source.write_text(HIDE)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    path = exported(folder, "gemm", Gemm(), (torch.zeros(2048, 2048), torch.zeros(2048, 2048)))
    code = f"""
import numpy, sys, untorch
x = numpy.ones({N}, numpy.float32)
with untorch.load({str(chain)!r}) as program:
    assert (program(x, x)[0] == 21).all()
    square = numpy.ones((2048, 2048), numpy.float32)
    with untorch.load({str(path)!r}) as gemm:
        try:
            y = gemm(square, square)
            assert (y == 2048).all()
            print("right")
        except untorch.UnsupportedError as error:
            print(error)
    assert (program(x, x)[0] == 21).all()
"""
    if run_python(code).strip() != "right":
        pytest.skip("there is no cuBLAS for processes without torch, hidden or not")
    message = run_python(code, LD_PRELOAD=str(library))
    assert "needs cuBLAS" in message and "libcublasLt.so" in message and "pip install" in message
