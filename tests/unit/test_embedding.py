"""The example in C compiles against the installed header and library, runs a package and reports errors."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import untorch
from untorch import _core
from untorch.cli.process import library_path

ROOT = Path(__file__).resolve().parents[2]


def packages() -> ModuleType:
    """The helpers of the command line's tests, which make packages without torch."""
    path = Path(__file__).with_name("cli") / "conftest.py"
    spec = importlib.util.spec_from_file_location("untorch_test_packages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def include_directory() -> Path:
    """Where the header was installed; in a source tree, where it is."""
    for folder in [Path(untorch.__path__[0]) / "include", ROOT / "native" / "include"]:
        if (folder / "untorch" / "untorch.h").is_file():
            return folder
    raise AssertionError("untorch.h was not found")


def stream_library() -> Path:
    """libuntorch_stream.so, which lies beside libuntorch.so; in a build tree, beside the file that a link names."""
    for folder in (library_path().parent, library_path().resolve().parent):
        if (folder / "libuntorch_stream.so").is_file():
            return folder / "libuntorch_stream.so"
    raise AssertionError("libuntorch_stream.so was not found")


def linked() -> list[str]:
    """What a compiler is told to link both libraries."""
    library, stream = library_path(), stream_library()
    return [str(library), str(stream), f"-Wl,-rpath,{library.parent}", f"-Wl,-rpath,{stream.parent}"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("c") / "run_model"
    command = [os.environ.get("CC", "cc"), "-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command += [f"-I{include_directory()}", str(ROOT / "examples" / "c" / "run_model.c"), "-o", str(out)]
    subprocess.run([*command, str(library_path()), f"-Wl,-rpath,{library_path().parent}"], check=True)
    return out


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = 2·x + 0.5 for x float32[s0, 4], s0 from 2 to 64."""
    helpers = packages()
    folder = tmp_path_factory.mktemp("package")
    return Path(helpers.write_package(folder / "affine.pt2", helpers.build_library(folder), "forward"))


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60, check=False)


def test_it_runs_a_method(program: Path, package: Path) -> None:
    done = run(program, package, "forward", "2,4")
    assert done.stderr == ""
    assert done.stdout == "output 0: dtype 6, shape [2, 4]" + " 2.5" * 8 + "\n"
    assert done.returncode == 0


def test_a_wrong_shape_is_an_error_and_no_crash(program: Path, package: Path) -> None:
    done = run(program, package, "forward", "2,5")
    assert done.stderr == (
        "run: method 'forward', input 'x': expected float32[s0, 4], got float32[2, 5]: dimension 1 must be 4\n"
    )
    assert done.returncode == 1


def test_a_wrong_count_a_wrong_method_and_a_wrong_file(program: Path, package: Path, tmp_path: Path) -> None:
    assert run(program, package, "forward").stderr == "run: method 'forward': expected 1 tensors, got 0\n"
    assert run(program, package, "decode", "2,4").stderr == "there is no method decode; the first one is forward\n"
    missing = tmp_path / "missing.pt2"
    assert run(program, missing, "forward").stderr == f"open: cannot open {missing}: No such file or directory\n"
    assert run(program, package, "forward", "2,x").returncode == 2


@pytest.mark.slow
def test_the_cmake_project_builds_it(tmp_path: Path, package: Path) -> None:
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert cmake is not None, "cmake is in requirements-test.txt"
    # What the project is told is where this Python finds untorch; in a source tree, header and library lie elsewhere.
    installed = tmp_path / "site" / "untorch"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    (installed / "include").symlink_to(include_directory())
    for path in (library_path(), stream_library()):
        (installed / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": str(installed.parent)}
    build = tmp_path / "build"
    for command in (
        [cmake, "-S", str(ROOT / "examples" / "c"), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"],
        [cmake, "--build", str(build)],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert run(build / "run_model", package, "forward", "3,4").stdout.startswith("output 0: dtype 6, shape [3, 4] 2.5")


def test_the_version_is_the_package_version() -> None:
    assert _core.version() == untorch.__version__


def test_the_example_in_cpp(package: Path, tmp_path: Path) -> None:
    out = tmp_path / "run_on_stream"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command += [f"-I{include_directory()}", str(ROOT / "examples" / "cpp" / "run_on_stream.cpp"), "-o", str(out)]
    subprocess.run([*command, *linked()], check=True)
    done = run(out, package, 2, 4)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "dtype 6, shape [2, 4] on the CPU\n 2.5 2.5 2.5 2.5\n" * 2
    done = run(out, package, 65, 4)
    assert done.returncode == 1
    assert "expected float32[s0, 4], got float32[65, 4]" in done.stderr
    assert run(out).returncode == 2
