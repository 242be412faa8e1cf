"""Lists the C functions that PyTorch's shim headers declare, and which of them a libuntorch.so lacks.

Usage: python scripts/list_shims.py [--cuda] <torch include directory> [libuntorch.so]

The headers are aoti_torch/c/*.h (not those of xpu and mps), generated/c_shim_cpu.h, generated/c_shim_aten.h and
stable/c/shim.h. Declarations under ``#ifdef USE_CUDA`` belong to the CUDA build and are left out; with --cuda they, and
those of generated/c_shim_cuda.h, are what is listed.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
import sys

DECLARATION = re.compile(r"AOTI_TORCH_EXPORT\s+[\w\s*]*?\b(\w+)\s*\(")


def without_cuda(text: str) -> str:
    """The text without its ``#ifdef USE_CUDA`` blocks."""
    lines: list[str] = []
    depth = 0
    for line in text.splitlines():
        directive = line.strip()
        if depth:
            depth += directive.startswith("#if") - directive.startswith("#endif")
        elif directive == "#ifdef USE_CUDA":
            depth = 1
        else:
            lines.append(line)
    return "\n".join(lines)


def only_cuda(text: str) -> str:
    """The ``#ifdef USE_CUDA`` blocks of the text."""
    lines: list[str] = []
    depth = 0
    for line in text.splitlines():
        directive = line.strip()
        if depth:
            depth += directive.startswith("#if") - directive.startswith("#endif")
            lines.append(line)
        elif directive == "#ifdef USE_CUDA":
            depth = 1
    return "\n".join(lines)


def headers(include: pathlib.Path) -> list[pathlib.Path]:
    """The shim headers of a torch include directory; raises FileNotFoundError if there are none."""
    csrc = include / "torch" / "csrc"
    base = csrc / "inductor" / "aoti_torch"
    found = [path for path in sorted((base / "c").glob("*.h")) if path.stem not in ("shim_xpu", "shim_mps", "macros")]
    found += [
        base / "generated" / "c_shim_cpu.h",
        base / "generated" / "c_shim_aten.h",
        csrc / "stable" / "c" / "shim.h",
    ]
    missing = [str(path) for path in found if not path.exists()]
    if missing or len(found) < 4:
        raise FileNotFoundError(f"no shim headers under {include}; missing: {missing}")
    return found


def declared(include: pathlib.Path) -> list[str]:
    """Names of all functions declared for the CPU, sorted."""
    names: set[str] = set()
    for path in headers(include):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        names.update(DECLARATION.findall(without_cuda(text)))
    return sorted(names)


def declared_cuda(include: pathlib.Path) -> list[str]:
    """Names of all functions declared for CUDA alone, sorted."""
    generated = include / "torch" / "csrc" / "inductor" / "aoti_torch" / "generated" / "c_shim_cuda.h"
    names: set[str] = set()
    for text in [generated.read_text(), *(only_cuda(path.read_text()) for path in headers(include))]:
        names.update(DECLARATION.findall(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)))
    return sorted(names)


def missing(names: list[str], library: pathlib.Path) -> list[str]:
    """Those of ``names`` that the library does not export."""
    handle = ctypes.CDLL(str(library))
    return [name for name in names if not hasattr(handle, name)]


def main(arguments: list[str]) -> int:
    listed = declared_cuda if "--cuda" in arguments else declared
    arguments = [argument for argument in arguments if argument != "--cuda"]
    if len(arguments) not in (1, 2):
        print(__doc__)
        return 2
    names = listed(pathlib.Path(arguments[0]))
    if len(arguments) == 1:
        print("\n".join(names))
        return 0
    lacking = missing(names, pathlib.Path(arguments[1]))
    print("\n".join(lacking))
    print(f"{len(names)} declared, {len(lacking)} missing", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
