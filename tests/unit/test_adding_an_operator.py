"""The worked example of docs/adding-an-operator.md: it applies, is short, compiles for both devices, and computes."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding-an-operator.md"
CXX = shutil.which("c++") or "c++"
FLAGS = ["-std=gnu++20", "-fopenmp", "-Inative", "-Inative/include", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
# What the front and the CPU's kernel of the example link with.
SOURCES = [
    "base/*.cpp", "tensor/*.cpp", "shims/elementwise.cpp", "shims/broadcast.cpp", "shims/error.cpp",
    "shims/layout.cpp", "shims/promotion.cpp", "threads/*.cpp", "kernels/cpu/elementwise/elementwise.cpp",
]  # fmt: skip
MAIN = """
#include <cstdio>
#include "shims/shim.h"
extern "C" AOTITorchError aoti_torch_cpu_softcap(AtenTensorHandle self, double cap, AtenTensorHandle* ret0);
int main() {
  using namespace untorch;
  TensorPtr x = Tensor::empty(Dims{3}, DType::kFloat32);
  for (int i = 0; i < 3; ++i) x->data<float>()[i] = 40.0f * static_cast<float>(i - 1);
  AtenTensorHandle out = nullptr;
  if (aoti_torch_cpu_softcap(shims::wrap(x.get()), 30.0, &out) != 0) return 1;
  const TensorPtr result(shims::unwrap(out));
  for (int i = 0; i < 3; ++i) std::printf("%.5f\\n", static_cast<double>(result->data<float>()[i]));
  const int code = aoti_torch_cpu_softcap(shims::wrap(x.get()), 0.0, &out);
  std::printf("%d %s\\n", code, last_error().c_str());
}
"""


def example() -> str:
    return re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.S)[0]


def test_it_is_short() -> None:
    changed = [line for line in example().splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    assert 40 < len(changed) < 60


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with the example applied."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "native", tree / "native")
    (tree / "tests" / "native").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "native" / "test_elementwise.py", tree / "tests" / "native")
    subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=tree, input=example(), text=True, check=True)
    return tree


@pytest.mark.slow
def test_the_front_compiles_for_both_devices(tree: Path) -> None:
    for define in ((), ("-DUNTORCH_CUDA_KERNELS",)):
        done = subprocess.run(
            [CXX, *FLAGS, *define, "-fsyntax-only", "native/shims/elementwise.cpp"],
            cwd=tree, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_cpu_computes_it(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(MAIN)
    sources = [str(path) for pattern in SOURCES for path in sorted((tree / "native").glob(pattern))]
    command = [sys.executable, str(ROOT / "cmake" / "unity.py"), str(tmp_path / "unity"), "14", *sources]
    grouped = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    program = tmp_path / "program"
    subprocess.run([CXX, *FLAGS, "-O0", str(tmp_path / "main.cpp"), *grouped, "-o", str(program)], cwd=tree, check=True)
    lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    expected = [30 * math.tanh(x / 30) for x in (-40, 0, 40)]
    assert [float(line) for line in lines[:3]] == pytest.approx(expected, abs=1e-4)
    assert lines[3] == "1 softcap: argument 'cap' must be above 0, got 0"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_gpu_kernel_compiles(tree: Path, tmp_path: Path) -> None:
    subprocess.run(
        ["nvcc", "-c", "native/kernels/cuda/elementwise/softcap.cu", "-o", str(tmp_path / "softcap.o"), "-std=c++20",
         "-Inative", "--expt-relaxed-constexpr", "--extended-lambda", "-gencode=arch=compute_90,code=sm_90",
         "-Werror=all-warnings"],
        cwd=tree, check=True,
    )  # fmt: skip
