"""Tests of the ELF reader against libuntorch.so and against damaged libraries."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.runtime.elf import parse_elf, read_elf
from untorch.runtime.errors import InvalidFileError

SOURCE = """
#include <string.h>
extern int outside(int);
extern int maybe(int) __attribute__((weak));
int inside(const char* s) { return outside((int)strlen(s)) + (maybe ? maybe(1) : 0); }
"""


@pytest.fixture(scope="module", params=["gnu", "sysv"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elf")
    (folder / "a.c").write_text(SOURCE)
    out = folder / "liba.so"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-fno-builtin", "-Wl,-soname,liba.so.1"]
    subprocess.run([*command, f"-Wl,--hash-style={request.param}", str(folder / "a.c"), "-o", str(out)], check=True)
    return out


def test_symbols_versions_and_names(library: Path) -> None:
    elf = read_elf(library)
    assert elf.soname == "liba.so.1"
    assert "libc.so.6" in elf.needed
    assert "inside" in elf.exported()
    undefined = {s.name: s for s in elf.undefined()}
    assert undefined["outside"].version is None
    assert not undefined["outside"].weak
    assert undefined["maybe"].weak
    assert undefined["strlen"].version_file == "libc.so.6"
    assert any(v.startswith("GLIBC_") for v in elf.version_needs["libc.so.6"])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "it has no ELF header"),
        (b"\x7fELF" + bytes(100), "it is not a 64-bit little-endian shared object"),
        (b"\x7fELF\x02\x01" + bytes(100), "it is not a 64-bit little-endian shared object"),
    ],
)
def test_not_a_library(data: bytes, text: str) -> None:
    with pytest.raises(InvalidFileError) as caught:
        parse_elf(data, "given.so")
    assert str(caught.value) == f"given.so is no usable shared library: {text}"


def test_no_dynamic_section(library: Path) -> None:
    data = bytearray(library.read_bytes())
    for i in range(struct.unpack_from("<H", data, 56)[0]):
        if struct.unpack_from("<I", data, 64 + 56 * i)[0] == 2:  # PT_DYNAMIC
            struct.pack_into("<I", data, 64 + 56 * i, 0)
    with pytest.raises(InvalidFileError, match="it has no dynamic section"):
        parse_elf(bytes(data))
    struct.pack_into("<H", data, 56, 0)
    with pytest.raises(InvalidFileError, match="its program headers are damaged"):
        parse_elf(memoryview(data))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match="cannot be read"):
        read_elf(tmp_path / "none.so")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damage_never_crashes(library: Path, data: st.DataObject) -> None:
    raw = bytearray(library.read_bytes())
    head = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, 1500 if head else len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(0, len(raw))) :]
    with contextlib.suppress(InvalidFileError):
        parse_elf(bytes(raw))
