"""Which folder of native/ may include which: the arrows that keep kernels, tensors, shims and models apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
SUFFIXES = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc", ".inl"}
# Where the public C headers lie.
PUBLIC = [NATIVE / "include", ROOT / "include"]

# Folder → the folders that its files may include, beside itself. "untorch" are the public headers; "base" are headers
# that know no tensor: dtypes, errors, small containers.
ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "stream": {"untorch"},
    "threads": {"base"},
    "tensor": {"base", "threads"},
    "kernels": {"base", "threads"},
    "cuda": {"base", "kernels", "tensor", "threads", "untorch"},
    "shims": {"base", "cuda", "kernels", "tensor", "threads", "untorch"},
    "model": {"base", "cuda", "kernels", "shims", "tensor", "threads", "untorch"},
    "python": {"untorch"},
}
# The one header of another folder that a folder may include.
DOORS = {("python", "model/capi.h")}

# What breaks a rule today. An entry that is no longer needed fails the test.
KNOWN: set[tuple[str, str]] = set()


def target(file: Path, text: str) -> str:
    """The included file as a path below native/, or below the folder of the public headers."""
    for folder in (file.parent, NATIVE, *PUBLIC):
        found = (folder / text).resolve()
        if not found.is_file():
            continue
        for root in (*PUBLIC, NATIVE):
            if found.is_relative_to(root):
                return found.relative_to(root).as_posix()
    return text  # of the compiler or another project


def includes() -> Iterator[tuple[str, str]]:
    """Every pair of a file and what it includes in quotes, below native/."""
    for file in sorted(NATIVE.rglob("*")):
        if file.suffix in SUFFIXES:
            for text in INCLUDE.findall(file.read_text()):
                yield file.relative_to(NATIVE).as_posix(), target(file, text)


def breaks(file: str, included: str) -> bool:
    folder, other = file.split("/")[0], included.split("/")[0]
    if folder == other or folder == "include" or "/" not in included:
        return False
    return other not in ALLOWED[folder] and (folder, included) not in DOORS


def test_every_folder_has_a_rule() -> None:
    folders = {path.name for path in NATIVE.iterdir() if path.is_dir()} - {"include"}
    assert folders == set(ALLOWED)


def test_includes_follow_the_arrows() -> None:
    pairs = set(includes())
    assert len(pairs) > 500
    broken = {pair for pair in pairs if breaks(*pair)}
    assert sorted(broken - KNOWN) == []
    assert sorted(KNOWN - broken) == [], "these are mended: take them out of KNOWN"


@pytest.mark.parametrize(
    ("file", "included", "wrong"),
    [
        ("python/call.h", "model/capi.h", False),
        ("python/call.h", "untorch/untorch.h", False),
        ("python/call.h", "tensor.h", False),
        ("python/call.h", "model/program.h", True),
        ("python/call.h", "tensor/tensor.h", True),
        ("kernels/cuda/gemm.cu", "tensor/dtype.h", True),
        ("kernels/cuda/gemm.cu", "cuda/driver.h", True),
        ("cuda/stream.cpp", "model/program.h", True),
        ("shims/nn.cpp", "model/program.h", True),
        ("tensor/tensor.cpp", "cuda/device.h", True),
        ("model/container.cpp", "shims/shim.h", False),
    ],
)
def test_the_rules_themselves(file: str, included: str, wrong: bool) -> None:
    assert breaks(file, included) is wrong


def test_the_binding_declares_no_functions_of_the_library() -> None:
    """A declaration of its own would go around the headers."""
    for file in sorted((NATIVE / "python").glob("*")):
        if file.suffix in SUFFIXES:
            assert 'extern "C"' not in file.read_text(), file.name


def test_kernels_with_pdl_load_plainly() -> None:
    """They are there before their inputs are written, and loads for read-only memory may take an old line of L1."""
    kernels = [file for file in (NATIVE / "kernels" / "cuda").rglob("*.cu*") if file.suffix in SUFFIXES]
    texts = {file.name: re.sub(r"//.*", "", file.read_text()) for file in kernels}
    waits = {name for name, text in texts.items() if "griddepcontrol_wait()" in text}
    assert "small_m_half.cu" in waits
    # Headers that only such kernels include.
    found = {name for name in (waits | {"small_m.cuh"}) if re.search(r"\b__ldg\b|\.nc\b", texts[name])}
    assert not found
