"""The options with which model libraries load with glibc 2.28, and what is linked where they cannot be had."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch._inductor import cpp_builder

from untorch.export import export, patches, portable_link
from untorch.export.portable_link import is_library_link, portable_options
from untorch.runtime.elf import parse_elf, read_elf

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

from wheels import LIMITS  # noqa: E402

GXX = str(shutil.which("g++"))
pytestmark = pytest.mark.skipif(shutil.which("g++") is None or platform.libc_ver()[0] != "glibc", reason="needs g++")

SOURCE = r"""
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <sstream>

extern "C" int wait_and_parse() {
  std::shared_mutex shared;
  const std::shared_lock read(shared);
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  changed.wait(lock, [] { return true; });
  std::stringstream stream;
  stream << "4 2";
  int first = 0, second = 0;
  stream >> first >> second;
  return first * 10 + second;
}
extern "C" double exponential(double x) { return std::exp(x); }
"""


def newer_versions(versions: dict[str, tuple[str, ...]]) -> list[str]:
    """Those that manylinux_2_28 does not have."""
    pairs = [name.rsplit("_", 1) for name in itertools.chain(*versions.values())]
    known = [(kind, text) for kind, text in pairs if kind in LIMITS]
    return [f"{kind}_{text}" for kind, text in known if tuple(map(int, text.split("."))) > LIMITS[kind]]


def link(folder: Path, options: list[str], source: str = SOURCE) -> Path:
    (folder / "a.cpp").write_text(source)
    library = folder / "a.wrapper.so"
    command = [GXX, "-std=c++20", "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "a.cpp")]
    subprocess.run([*command, *options], check=True)
    return library


def test_the_library_asks_for_no_newer_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_CACHE", str(tmp_path / "cache"))
    with portable_options(GXX) as options:
        library = link(tmp_path, options)
    found = read_elf(library)
    assert newer_versions(found.version_needs) == []
    assert not {name for name in found.exported() if "wrap" in name or "untorch" in name}
    files = {symbol.name: symbol.version_file for symbol in found.undefined()}
    assert "exp" in files and not set(files) & {"log", "dlopen", "strtod_l", "__xstat"}  # wrappers that are not called
    # Before glibc 2.30, the dynamic linker fails where this file has no such name.
    assert files["pthread_rwlock_rdlock"] == files["pthread_rwlock_unlock"] == "libpthread.so.0"
    assert "libpthread.so.0" in found.needed
    loaded = ctypes.CDLL(str(library))
    loaded.exponential.restype, loaded.exponential.argtypes = ctypes.c_double, [ctypes.c_double]
    assert loaded.wait_and_parse() == 42
    assert loaded.exponential(1.0) == pytest.approx(2.718281828459045, abs=1e-15)


def test_the_object_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_CACHE", str(tmp_path / "cache"))
    inodes = []
    for _ in range(2):
        with portable_options(GXX) as options:
            assert Path(options[0]).parent == tmp_path / "cache"
            inodes.append(Path(options[0]).stat().st_ino)
    assert inodes[0] == inodes[1]


def test_without_a_cache_the_object_is_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for cache in ("", str(tmp_path / "file" / "cache")):
        monkeypatch.setenv("UNTORCH_CACHE", cache)
        with portable_options(GXX) as options:
            assert Path(options[0]).is_file()
        assert not Path(options[0]).exists()


def test_there_are_none_where_names_cannot_be_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_CACHE", "")
    for compiler in (str(tmp_path / "no compiler"), "false"):
        with portable_options(compiler) as options:
            assert options == []
    monkeypatch.setattr(portable_link.platform, "libc_ver", lambda: ("", ""))
    with portable_options(GXX) as options:
        assert options == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a.o -shared -o a.wrapper.so", True),
        ("a.cpp -shared -c -o a.wrapper.so", False),
        ("a.o -o a.wrapper.so", False),
        ("a.cpp -shared -o probe.so", False),
    ],
)
def test_which_commands_link_a_library(line: str, expected: bool) -> None:
    assert is_library_link(line.split()) is expected


def test_a_linker_without_the_options_links_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_CACHE", "")
    (tmp_path / "a.cpp").write_text("int one() { return 1; }\n")
    (build := tmp_path / "build").mkdir()
    refused = contextlib.nullcontext(["-Wl,--no-such-option"])
    monkeypatch.setattr("untorch.export.patches.compiler.portable_options", lambda _: refused)
    with patches.objects_at_a_time():
        cpp_builder._run_compile_cmd(f"{GXX} -shared -fPIC {tmp_path}/a.cpp -o {tmp_path}/a.wrapper.so", str(build))
    assert read_elf(tmp_path / "a.wrapper.so").exported()


@pytest.mark.filterwarnings("ignore")
def test_an_exported_library_asks_for_no_newer_version(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
    export(model.double(), (torch.randn(2, 4, dtype=torch.float64),), tmp_path / "model.pt2")
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        libraries = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    assert libraries
    for name, data in libraries.items():
        library = parse_elf(data, name)
        assert newer_versions(library.version_needs) == []
        asked = {symbol.version_file for symbol in library.undefined() if symbol.name.startswith("pthread_rwlock_")}
        assert asked == {"libpthread.so.0"}
