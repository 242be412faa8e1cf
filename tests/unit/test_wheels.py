"""scripts/wheels.py: which symbol versions are too new for manylinux_2_28; and the version, which is in one place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import untorch
from untorch import _core

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from wheels import misplaced, too_new  # noqa: E402

# As objdump -T prints them.
SYMBOLS = """
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.34) pthread_create
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.28) statx
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.2.5) memcpy
0000000000000000      DF *UND*  0000000000000000 (GLIBCXX_3.4.30) _ZSt21__glibcxx_assert_failPKciS0_S0_
0000000000000000      DF *UND*  0000000000000000 (GLIBCXX_3.4.21) _ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE
0000000000000000  w   DO *UND*  0000000000000000 (CXXABI_1.3.13) _ZTVSt19_Sp_counted
0000000000000000      DF *UND*  0000000000000000 (GCC_3.0)   _Unwind_Resume
0000000000012340 g    DF .text  0000000000000010  GLIBC_2.40  own_symbol
"""


def test_versions_that_are_too_new() -> None:
    assert too_new(SYMBOLS) == {
        "GLIBC_2.34": ["pthread_create"],
        "GLIBCXX_3.4.30": ["_ZSt21__glibcxx_assert_failPKciS0_S0_"],
        "CXXABI_1.3.13": ["_ZTVSt19_Sp_counted"],
    }


# As readelf -W prints them: --dyn-syms and -V.
ASKED = """
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND dlsym@GLIBC_2.2.5 (5)
     2: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND pthread_create@GLIBC_2.2.5 (7)
     3: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND memcpy@GLIBC_2.14 (6)
     4: 0000000000012340    16 FUNC    GLOBAL DEFAULT   12 dlopen
"""
VERSIONS = """
Version needs section '.gnu.version_r' contains 2 entries:
 Addr: 0x0000000000001000  Offset: 0x001000  Link: 4 (.dynstr)
  000000: Version: 1  File: libpthread.so.0  Cnt: 1
  0x0010:   Name: GLIBC_2.2.5  Flags: none  Version: 7
  0x0020: Version: 1  File: libc.so.6  Cnt: 2
  0x0030:   Name: GLIBC_2.14  Flags: none  Version: 6
  0x0040:   Name: GLIBC_2.2.5  Flags: none  Version: 5
"""


def test_names_that_are_looked_for_in_the_wrong_file() -> None:
    assert misplaced(ASKED, VERSIONS) == ["dlsym"]


def test_the_version_is_in_one_place() -> None:
    assert _core.version() == untorch.__version__
    pattern = re.compile(rf"(?<![\d.]){re.escape(untorch.__version__)}(?![\d.])")
    for name in ("pyproject.toml", "CMakeLists.txt", "Makefile", "native/CMakeLists.txt", "scripts/sanitize.sh"):
        assert not pattern.search((ROOT / name).read_text()), name
