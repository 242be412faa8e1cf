"""untorch inspect and the loader read alike: what one refuses the other does, and no file costs much."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
from craft import LIBRARY, Lie, Package, digests, elf_image, zip_bytes

import untorch
from untorch.archive import ArchiveReader
from untorch.cli.package import describe_package

SIZE = 9_800_000
F = ("methods", "forward")
NAMES = "abcdefghijklmnopqrstuvwxyz"


def answer(call: Callable[[], Any]) -> str:
    """The text of the error that a call gives; "" for none. Anything but untorch's errors is the test's failure."""
    try:
        call()
    except untorch.UntorchError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load(path: pathlib.Path) -> None:
    untorch.load(path).close()


def read(path: pathlib.Path) -> None:
    with ArchiveReader(path) as archive:
        archive.methods()


def agree(path: pathlib.Path) -> str:
    """Both answers, which are to be the same: for another machine's code only the loader's says so."""
    loaded, seen = answer(lambda: load(path)), answer(lambda: read(path))
    if loaded != seen and not (seen == "" and loaded.startswith("UnsupportedError") and "was compiled for" in loaded):
        return f"load: {loaded or 'ok'}; inspect: {seen or 'ok'}"
    described = answer(lambda: describe_package(path))
    if seen and described != seen:
        return f"inspect: {described or 'ok'}; its reader: {seen}"
    return ""


@pytest.mark.slow
def test_changed_manifests_are_read_alike(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    package.manifest["digests"] = digests(package.entries()[:3])
    text = json.dumps(package.manifest).encode()
    rng = random.Random(25)
    tokens = [b"1e400", b"-1", b"9" * 30, b"null", b"{}", b"[]", b'"\\u001b[31m"', b'"\xe2\x80\xae"', b"NaN", b"1.5"]
    wrong = []
    for i in range(1500):
        changed = bytearray(text)
        at = rng.randrange(len(text))
        if i % 3 == 0:
            changed[at] ^= rng.randrange(1, 256)
        elif i % 3 == 1:
            end = min(len(text), at + rng.randrange(1, 40))
            changed[at:end] = rng.choice(tokens)
        else:
            start = rng.randrange(len(text))
            changed[at:at] = text[start : start + rng.randrange(1, 60)]
        package.manifest = bytes(changed)
        path.write_bytes(package.bytes())
        if difference := agree(path):
            wrong.append(f"{bytes(changed)[max(0, at - 20) : at + 40]!r}: {difference}")
    assert wrong == []


def listed(path: pathlib.Path) -> dict[str, tuple[int, int, bytes]] | None:
    """What Python's reader finds; None if it finds nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {i.filename: (i.file_size, i.CRC, archive.read(i)) for i in archive.infolist()}
    except Exception:
        return None


def test_changed_directories_are_read_as_others_read_them(package: Package, tmp_path: pathlib.Path) -> None:
    """Two readers that see two models in one file: ours refuses it, or both see the same."""
    path = tmp_path / "model.pt2"
    package.library = b"library"
    data = package.bytes()
    start = data.index(b"PK\x01\x02")
    rng = random.Random(26)
    accepted = 0
    for i in range(2500):
        changed = bytearray(data)
        where = rng.randrange(start, len(data)) if i % 2 else rng.randrange(start)
        kind = rng.randrange(4)
        if kind < 2:
            changed[where] ^= rng.choice((1, 2, 4, 8, 16, 32, 64, 128))
        elif kind == 2:
            at = rng.randrange(start, len(data) - 60)
            changed[where:where] = data[at : at + rng.randrange(1, 60)]
        else:
            del changed[where : where + rng.randrange(1, 30)]
        path.write_bytes(changed)
        try:
            with ArchiveReader(path) as archive:
                ours = {f"{archive.root}/{e.name}": (e.size, e.crc, archive.read(e.name)) for e in archive}
        except untorch.InvalidFileError:
            continue
        theirs = listed(path)
        accepted += 1
        assert theirs is None or theirs == ours, (i, where)  # None: a checksum is wrong
    assert accepted > 10


def test_two_directories_in_one_file(package: Package, tmp_path: pathlib.Path) -> None:
    """The end record points to one, and another one lies right before it, where Python's reader looks."""
    import struct

    path = tmp_path / "model.pt2"
    honest = package.bytes()
    at = honest.index(b"PK\x01\x02")
    entries, directory = honest[:at], honest[at:-22]
    evil = directory.replace(b"model/", b"other/")
    count = len(package.entries())
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, len(directory), at, 0)
    path.write_bytes(entries + directory + evil + end)
    for call in (load, read, describe_package):
        with pytest.raises(untorch.InvalidFileError, match="does not end at its end record at"):
            call(path)


def padded(package: Package, more: bytes) -> bytes:
    """The manifest with another member."""
    document = {**package.manifest, "digests": digests(package.entries()[:3])}
    package.manifest = json.dumps(document).encode()[:-1] + b',"x":' + more + b"}"
    return package.bytes()


def with_method(package: Package, **fields: Any) -> bytes:
    package.manifest["methods"]["forward"].update(fields)
    return package.bytes()


def many_methods(package: Package) -> bytes:
    method = package.manifest["methods"]["forward"]
    package.manifest["methods"] = {f"m{i}": method for i in range(1024)}
    return package.bytes()


def extern_nodes(package: Package) -> bytes:
    nodes = [{"node": {"target": f"a::b{i}", "padding": " " * 60}} for i in range(90_000)]
    package.extra.append(Lie("model/n.json", json.dumps({"nodes": nodes}).encode()))
    return with_method(package, extern_nodes="n.json")


def library_of(*counts: int) -> Callable[[Package], bytes]:
    def build(package: Package) -> bytes:
        package.library = elf_image(*counts)
        return package.bytes()

    return build


QUANTIZED = {"dtype": "int4", "nbytes": (1 << 62), "group_size": 1, "packed_shape": [(1 << 62)] * 64}
INPUTS = [{"name": f"x{i}", "dtype": "float32", "shape": [4], "": " " * 40} for i in range(80_000)]
# What made inspect take minutes or gigabytes, and what might. "": it is shown.
BOMBS: dict[str, tuple[Callable[[Package], bytes], str]] = {
    "many numbers": (lambda p: padded(p, b"[" + b"0," * (SIZE // 2) + b"0]"), "too many values for its size"),
    "many members": (
        lambda p: padded(p, b"{" + b",".join(b'"%d":{}       ' % i for i in range(SIZE // 20)) + b"}"),
        "",
    ),
    "deep lists": (lambda p: padded(p, b"[" * SIZE), "nested too deeply"),
    "large numbers": (lambda p: padded(p, b"9" * SIZE), "integer out of range"),
    "many inputs": (lambda p: with_method(p, inputs=INPUTS[:30_000]), ""),
    "too many inputs": (lambda p: with_method(p, inputs=INPUTS), "is one more than 32768 inputs and outputs"),
    "many dimensions": (
        lambda p: with_method(p, inputs=[{"name": "x", "dtype": "int8", "shape": [1 << 62] * 200_000}]),
        "shape has 200000 dimensions",
    ),
    "large products": (lambda p: with_method(p, quantization=[QUANTIZED] * 6000), ""),
    "long names": (lambda p: p.with_manifest(("methods", "n" * SIZE), {}).bytes(), "with a name of 9800000 bytes"),
    "many methods": (many_methods, ""),
    "too many methods": (
        lambda p: zip_bytes([Lie(f"m/data/aotinductor/m{i}/a.so", b"x", align=1) for i in range(60_000)]),
        "has 60000 methods, expected at most 1024",
    ),
    "many entries": (
        lambda p: zip_bytes([Lie(f"m/{i}", align=1) for i in range(0xFFFE)]),
        "holds no compiled model",
    ),
    "many nodes": (extern_nodes, "it has 90000 nodes, expected at most 10000"),
    "symbols with one name": (library_of(99_000, 0, 0, 5_000_000), "its symbols' names overlap"),
    "versions with one name": (library_of(0, 60_000, 0, 5_000_000), "its names overlap"),
    "needs with one name": (library_of(0, 1, 100_000, 5_000_000), "its names overlap"),
    "many symbols": (library_of(300_000, 0, 0, 5), "it has more than 20000 symbols"),
    "many undefined symbols": (library_of(19_000, 0, 0, 20), ""),
}
PROBE = """
import atexit, sys
from untorch.cli import main
def show():
    status = open("/proc/self/status").read()
    print("VmHWM", status.split("VmHWM:")[1].split()[0], file=sys.stderr)
atexit.register(show)
main()
"""


@pytest.mark.slow
@pytest.mark.unsanitized
@pytest.mark.parametrize("kind", BOMBS)
def test_no_small_file_takes_much(kind: str, package: Package, tmp_path: pathlib.Path) -> None:
    build, text = BOMBS[kind]
    path = tmp_path / "model.pt2"
    data = build(package)
    assert len(data) < 11_000_000
    path.write_bytes(data)
    for options in ([], ["--json"]) if text == "" else ([],):
        command = [sys.executable, "-c", PROBE, "inspect", str(path), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # about 0.5 s
        message, _, peak = done.stderr.rpartition("VmHWM ")
        assert int(peak) < 256 * 1024, (options, peak)
        assert len(done.stdout) < 20_000_000
        if text:
            assert (done.returncode, done.stdout) == (1, "")
            assert text in message and len(message) < 600
        else:
            assert (done.returncode, message) == (0, "")


ESCAPES = "\x1b[31m\x07\x9b2J\u202ered\u2066\ufeff\r"


@pytest.mark.slow
def test_control_characters_reach_no_terminal(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    method = package.manifest["methods"].pop("forward")
    package.manifest["methods"][f"forward{ESCAPES}\n"] = method
    package.manifest["torch_version"] = ESCAPES
    method["cpu"]["features"] = [ESCAPES]
    method["cpu"]["target"] = ESCAPES
    method["inputs"][0]["name"] = ESCAPES + "\n"
    method["inputs"][0]["shape"] = [{"symbol": ESCAPES, "max": 4}]
    path.write_bytes(package.bytes())
    texts = []
    for options in ([], ["--json"], ["--operators"]):
        for encoding in ("utf-8", "ascii"):
            command = [sys.executable, "-m", "untorch", "inspect", str(path), *options]
            environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
            done = subprocess.run(command, capture_output=True, check=False, env=environment, timeout=60)
            assert (done.returncode, done.stderr) == (0, b"")
            texts.append(done.stdout.decode(encoding))
    package.manifest["methods"] = {ESCAPES: {**method, "device": 1}}
    path.write_bytes(package.bytes())
    texts += [answer(lambda: load(path)), answer(lambda: read(path)), answer(lambda: describe_package(path))]
    package.manifest["methods"] = {ESCAPES: {**method, "cpu": None, "library": LIBRARY}}
    method["inputs"] = []
    path.write_bytes(package.bytes())
    with untorch.load(path) as program:
        texts.append(answer(lambda: program["none"]))
    for text in texts:
        assert text
        assert not set(ESCAPES[:1] + "\x07\x9b\u202e\u2066\ufeff\r") & set(text), text
        assert "x1b[31m" in text or "u001b[31m" in text


def test_names_with_control_characters_are_refused(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    for name in ("\x1b[31m", "a\nb", "a\u202eb", "a\u200bb"):
        package.extra = [Lie(f"model/{name}", b"")]
        path.write_bytes(package.bytes())
        with pytest.raises(untorch.InvalidFileError, match="is no plain UTF-8 text") as caught:
            untorch.load(path)
        assert name not in str(caught.value)


def test_inspect_says_that_a_manifest_is_for_another_machine(package: Package, tmp_path: pathlib.Path) -> None:
    """What decides is the manifest's architecture, as in the loader, not the library's alone."""
    path = tmp_path / "model.pt2"
    path.write_bytes(package.with_manifest((*F, "cpu", "architecture"), "pdp11").bytes())
    assert "was compiled for pdp11, this machine is " in answer(lambda: load(path))
    method = describe_package(path)["methods"][0]
    assert not method["runs_here"]
    assert method["problems"][0].startswith("it is compiled for pdp11, this machine is ")
