"""Which code of a file for several GPU architectures is taken, with a driver that is made up: it answers questions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from untorch.archive import FORMAT_VERSION, ArchiveWriter

_DECLARATIONS = Path(__file__).parents[2] / "native" / "cuda" / "driver.h"
_ANSWERS = """
#include <stdlib.h>
#include <string.h>
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int length, int device) { strncpy(name, "Made Up", length); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)1 << 34; return 0; }
int cuCtxGetCurrent(void** context) { *context = 0; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)1; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const int architecture = atoi(getenv("MADE_UP_ARCHITECTURE"));
  *value = attribute == 75 ? architecture / 10 : attribute == 76 ? architecture % 10 : 1024;
  return 0;
}
"""
_CHILD = """
import sys, untorch
try:
    with untorch.load(sys.argv[1]) as program:
        print(*(method.gpu_architecture for method in program._program.methods()))
except untorch.UntorchError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the driver is made with a C compiler, and there is none")
    folder = tmp_path_factory.mktemp("driver")
    answered = set(re.findall(r"int (cu\w+)", _ANSWERS))
    names = dict.fromkeys(re.findall(r"X\(\w+, (cu\w+),", _DECLARATIONS.read_text()))
    rest = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names if name not in answered)
    source = folder / "driver.c"
    source.write_text(_ANSWERS + rest)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


def taken(driver: Path, path: Path, architecture: int) -> str:
    """What the loader takes on a GPU of that architecture, or its error."""
    environment = {
        **os.environ, "LD_LIBRARY_PATH": str(driver), "MADE_UP_ARCHITECTURE": str(architecture),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if "was built without CUDA" in done.stdout:
        pytest.skip("this build has no CUDA kernels")
    return done.stdout.strip()


def write(path: Path, *architectures: str) -> Path:
    """A file whose methods "one" and "two" have code for these; the libraries are empty, nothing is opened."""

    def code(architecture: str) -> dict[str, object]:
        constant = {
            "name": "calls", "fqn": "calls", "dtype": "float32", "shape": [], "strides": [], "storage_offset": 0,
            "weight": 0, "mutated": True, "state": 0,
        }  # fmt: skip
        library = f"data/aotinductor/{architecture}/m.wrapper.so"
        return {"library": library, "gpu_architecture": architecture, "constants": [constant]}

    first, *others = [code(name) for name in architectures]
    method = {**first, "device": "cuda", "inputs": [], "outputs": [], "variants": others}
    manifest = {
        "format": "untorch", "format_version": FORMAT_VERSION, "methods": {"one": method, "two": method},
        "weights": [{"file": "data/weights/weight_0", "nbytes": 4}],
        "states": [{"fqn": "calls", "weight": 0}],
    }  # fmt: skip
    with ArchiveWriter(path) as writer:
        for name in architectures:
            writer.write(f"data/aotinductor/{name}/m.wrapper.so", name.encode())
        writer.write("data/weights/weight_0", numpy.float32(0).tobytes())
        writer.write_manifest(manifest)
    return path


@pytest.mark.parametrize(
    ("architecture", "expected"), [(80, "sm_80"), (86, "sm_86"), (89, "sm_86"), (90, "sm_90"), (121, "sm_120")]
)
def test_the_newest_code_that_runs(driver: Path, tmp_path: Path, architecture: int, expected: str) -> None:
    path = write(tmp_path / "model.pt2", "sm_80", "sm_90", "sm_86", "sm_120")
    assert taken(driver, path, architecture) == f"{expected} {expected}"


@pytest.mark.parametrize("architecture", [75, 100, 103])
def test_none_that_runs(driver: Path, tmp_path: Path, architecture: int) -> None:
    path = write(tmp_path / "model.pt2", "sm_90", "sm_80")
    assert taken(driver, path, architecture) == (
        f"UnsupportedError {path}: method 'one' was compiled for sm_90, sm_80, cuda:0 (Made Up) is sm_{architecture}: "
        f"export it for that architecture"
    )


def test_a_single_one(driver: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model.pt2", "sm_90")
    assert taken(driver, path, 90) == "sm_90 sm_90"
    assert "was compiled for sm_90, cuda:0 (Made Up) is sm_89" in taken(driver, path, 89)
