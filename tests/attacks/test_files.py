"""What load takes: contents in memory, files that are none, limits of the system, files that change while in use."""

from __future__ import annotations

import array
import gc
import json
import mmap
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from craft import Lie, Package, digests

import untorch
from untorch import _core
from untorch.archive import ArchiveReader

X = np.arange(4, dtype=np.float32)
Y = [1, 4, 7, 10]


@pytest.fixture
def path(package: Package, tmp_path: pathlib.Path) -> pathlib.Path:
    """A true package with a large entry that nothing needs."""
    target = tmp_path / "model.pt2"
    package.extra.append(Lie("model/data/weights/more", bytes(range(256)) * 4096))
    target.write_bytes(package.bytes())
    return target


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which may die."""
    begin = "import os, sys, numpy as np\nimport untorch\nX = np.arange(4, dtype=np.float32)\npath = sys.argv[1]\n"
    command = [sys.executable, "-c", begin + script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


# In memory.


def test_contents_of_every_kind(path: pathlib.Path) -> None:
    data = path.read_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for source in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8), mapped):
            with untorch.load(source, verify=True) as program:
                np.testing.assert_array_equal(program.forward(X), Y)
                assert program.path == "<memory>"


def test_contents_are_copied(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    program = untorch.load(data)
    data[:] = bytes(len(data))
    np.testing.assert_array_equal(program.forward(X), Y)


def aligned_bytes(data: bytes) -> bytes:
    """Equal bytes at a 64-byte aligned address; allocators give one of four."""
    kept = []
    for _ in range(1000):
        made = bytes(bytearray(data))
        if _core.address_of(made) % 64 == 0:
            return made
        kept.append((made, bytearray(16 * (1 + len(kept) % 7))))
    pytest.skip("no aligned bytes were found")


@pytest.mark.slow
@pytest.mark.unsanitized  # AddressSanitizer's allocator gives none
def test_aligned_bytes_are_used_in_place_and_kept(weight_library: bytes, package: Package) -> None:
    data = aligned_bytes(Package(weight_library, package.manifest).bytes())
    before, address = sys.getrefcount(data), _core.address_of(data)
    program = untorch.load(data)
    weight = program.forward(X)
    place = weight.__array_interface__["data"][0]
    assert address <= place < address + len(data)
    during = sys.getrefcount(data)
    program.close()
    del program
    gc.collect()
    np.testing.assert_array_equal(weight, [1, 2, 3, 4])
    del weight
    gc.collect()
    after = sys.getrefcount(data)
    assert (during, after) == (before + 1, before)
    with untorch.load(data, copy=True) as other:
        copied = other.forward(X)
        assert not address <= copied.ctypes.data < address + len(data)


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (b"model.pt2", untorch.InvalidArgumentError, "expected the contents of a .pt2 file, got bytes of 9 bytes"),
        (b"", untorch.InvalidArgumentError, "got bytes of 0 bytes that do not begin as one"),
        (b"secret" * 100_000, untorch.InvalidArgumentError, "a path has to be str or os.PathLike: os.fsdecode(path)"),
        (array.array("d", [1.0]), untorch.InvalidArgumentError, "got array of 8 bytes"),
        (np.zeros((4, 4))[:, ::2], untorch.InvalidArgumentError, "expected contiguous memory"),
        (None, untorch.ArgumentTypeError, "(bytes, or another object with the buffer protocol), got NoneType"),
        (b"PK\x03\x04", untorch.InvalidFileError, "<memory> is no .pt2 file: 4 bytes are too few for a zip archive"),
    ],
    ids=lambda v: repr(v)[:20],
)
def test_what_are_no_contents(source: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        untorch.load(source)
    assert text in str(caught.value)
    assert "secret" not in str(caught.value) and len(str(caught.value)) < 250


# Files that are none, and limits.


def test_only_regular_files_are_opened(tmp_path: pathlib.Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "socket"
    os.mkfifo(fifo)  # without a writer: opening it would wait
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(link))
        for path in (fifo, link, "/dev/zero", "/dev/null"):
            for open_it in (untorch.load, ArchiveReader):
                with pytest.raises(untorch.InvalidFileError, match="is no regular file"):
                    open_it(path)


@pytest.mark.unsanitized
def test_no_memory_and_no_descriptors(path: pathlib.Path) -> None:
    script = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    untorch.load(path)
except OSError as error:
    print(type(error).__name__, error.errno, error.filename == path)
program = None
resource.setrlimit(resource.RLIMIT_NOFILE, (4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
program = untorch.load(path)
fd = os.open("/dev/null", os.O_RDONLY)
try:
    program.forward(X)
except OSError as error:
    print(type(error).__name__, error.errno, "memory file" in str(error))
os.close(fd)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 19), resource.getrlimit(resource.RLIMIT_AS)[1]))
for options in ({}, {"copy": True}):
    try:
        untorch.load(path, **options)
    except MemoryError as error:
        print(type(error).__name__, "1066" in str(error) or "bytes" in str(error))
"""
    done = run(script, path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "FileOpenError 24 True",
        "SystemResourceError 24 True",
        "OutOfMemoryError True",
        "OutOfMemoryError True",
    ]


# Files that change while they are in use.

TRUNCATED = "was truncated while in use: replace files by renaming a new one into place, or load with copy=True"


def test_a_truncated_file_is_an_error(path: pathlib.Path) -> None:
    """The compiled code itself reads the weight: SIGBUS before."""
    script = """
program = untorch.load(path)
method = program.forward
print(method(X).tolist())
os.truncate(path, 0)
for call in (lambda: method(X), lambda: method(X), lambda: program.forward(X)):
    try:
        call()
    except untorch.InvalidFileError as error:
        print(error)
"""
    done = run(script, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["[1.0, 4.0, 7.0, 10.0]", *3 * [f"{path} {TRUNCATED}"]]


@pytest.mark.parametrize("use", ["program.forward.open()", "program.manifest", "program.session().forward.open()"])
def test_a_file_that_is_truncated_before_its_first_use(use: str, path: pathlib.Path) -> None:
    script = f"""
program = untorch.load(path)
os.truncate(path, 0)
try:
    print(type({use}).__name__)
except untorch.InvalidFileError as error:
    print(str(error).rpartition("truncated while in use")[1])
"""
    done = run(script, path)
    assert (done.returncode, done.stderr) == (0, "")
    # The manifest was copied when it was read.
    assert done.stdout == ("dict\n" if use == "program.manifest" else "truncated while in use\n")


@pytest.mark.parametrize(
    "read", ["reader.read('data/weights/more')", "reader.verify()", "reader.digests()", "reader.core.text('more')"]
)
def test_reads_of_a_truncated_archive(read: str, path: pathlib.Path) -> None:
    script = f"""
from untorch.archive import ArchiveReader
reader = ArchiveReader(path)
os.truncate(path, 4096)
try:
    {read.replace("'more'", "'data/weights/more'")}
except untorch.InvalidFileError as error:
    print(error)
"""
    done = run(script, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{path} {TRUNCATED}\n"


def test_a_copy_is_out_of_reach(path: pathlib.Path) -> None:
    script = """
program = untorch.load(path, copy=True, verify=True)
os.truncate(path, 0)
print(program.forward(X).tolist())
"""
    done = run(script, path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1.0, 4.0, 7.0, 10.0]\n", "")


@pytest.mark.parametrize("handler", ["", "import faulthandler; faulthandler.enable()"])
def test_other_bus_errors_still_end_the_process(handler: str, path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(8192))
    script = f"""
import mmap, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{handler}
program = untorch.load(path)
file = open(sys.argv[2], "r+b")
mapped = mmap.mmap(file.fileno(), 0)
os.truncate(sys.argv[2], 0)
mapped[5000]
"""
    done = run(script, path, other)
    assert done.returncode == -7  # SIGBUS
    assert ("Fatal Python error: Bus error" in done.stderr) is bool(handler)


def test_an_ignored_signal_that_somebody_sends_stays_ignored(path: pathlib.Path) -> None:
    script = """
import signal
signal.signal(signal.SIGBUS, signal.SIG_IGN)
program = untorch.load(path)
os.kill(os.getpid(), signal.SIGBUS)
print(program.forward(X).tolist())
"""
    assert run(script, path).stdout == "[1.0, 4.0, 7.0, 10.0]\n"
    done = run(script.replace("SIG_IGN", "SIG_DFL"), path)
    assert (done.returncode, done.stdout) == (-7, "")


def test_weights_are_compared_on_demand(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwritten in place: seen by verify alone, and by what is read then."""
    data = bytearray(path.read_bytes())
    at = data.index(np.float32([1, 2, 3, 4]).tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    text = "is damaged: entry 'data/weights/weight_0' has the SHA-256 [0-9a-f]{64}, the manifest says [0-9a-f]{64}"
    with untorch.load(path) as program:
        assert program.forward(X).tolist() != Y
    with pytest.raises(untorch.InvalidFileError, match=text):
        untorch.load(path, verify=True)
    with pytest.raises(untorch.InvalidFileError, match=text):
        untorch.load(bytes(data), verify=True)
    for value, verifies in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("UNTORCH_VERIFY", value)
        if verifies:
            with pytest.raises(untorch.InvalidFileError, match=text):
                untorch.load(path)
        else:
            untorch.load(path).close()
    monkeypatch.setenv("UNTORCH_VERIFY", "yes")
    with pytest.raises(untorch.InvalidArgumentError, match="UNTORCH_VERIFY: expected 0 or 1, got yes"):
        untorch.load(path)


def test_a_library_is_compared_as_it_is_opened(path: pathlib.Path) -> None:
    """Between loading and opening somebody writes to the file."""
    with untorch.load(path) as program:
        data = bytearray(path.read_bytes())
        data[data.index(b"\x7fELF") + 1000] ^= 1
        with path.open("r+b") as file:
            file.write(data)
        with pytest.raises(untorch.InvalidFileError, match=r"model\.wrapper\.so' has the SHA-256"):
            program.forward.open()


def test_what_the_caller_expects(package: Package, path: pathlib.Path) -> None:
    archive = _core.open_archive(os.fsencode(path))
    found = archive.digests()
    name = package.manifest["methods"]["forward"]["library"]
    archive.expect(name, found[name])
    program = untorch.Program(_core.Program(archive, None, 1, 0, False, True, None, None), str(path), None)
    np.testing.assert_array_equal(program.forward(X), Y)
    archive.expect(name, found["archive_format"])
    program = untorch.Program(_core.Program(archive, None, 1, 0, False, False, None, None), str(path), None)
    with pytest.raises(untorch.UntrustedError, match=f"the bytes of entry '{name}' are not those that a trust policy"):
        program.forward.open()
    with pytest.raises(untorch.InvalidFileError, match="has no entry 'none'"):
        archive.expect("none", found[name])
    with pytest.raises(untorch.InvalidArgumentError, match="expected 64 lower-case hexadecimal digits, got X"):
        archive.expect(name, "X")


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        ((), [], "digests is not an object"),
        (("algorithm",), "md5", 'digests are not of the algorithm "sha256"'),
        (("block_bytes",), 1, "digests have blocks of 1 bytes"),
        (("block_bytes",), 1 << 40, "digests have blocks of 1099511627776 bytes"),
        (("entries",), {}, "digests lack entry 'archive_format', which is in the archive"),
        (("entries", "none"), "0" * 64, "digests entries entry 'none' is not in the archive"),
        (("entries", "extra/untorch.json"), "0" * 64, "entry 'extra/untorch.json' is there twice"),
        (("blocks", "archive_format"), "0" * 64, "entry 'archive_format' is there twice"),
        (("entries", "archive_format"), "0" * 63, "is no SHA-256 in lower-case hexadecimal digits"),
        (("entries", "archive_format"), "A" * 64, "is no SHA-256 in lower-case hexadecimal digits"),
        (("entries", "archive_format"), "0" * 128, "the manifest has 2 digests for the 1 blocks"),
        (("entries", "archive_format"), "", "the manifest has 0 digests for the 1 blocks"),
    ],
)
def test_digests_are_complete(
    where: tuple[str, ...], value: Any, text: str, package: Package, tmp_path: pathlib.Path
) -> None:
    package.manifest["digests"] = digests(package.entries()[:3])
    path = tmp_path / "m.pt2"
    path.write_bytes(package.with_manifest(("digests", *where), value).bytes())
    with pytest.raises(untorch.InvalidFileError) as caught:
        untorch.load(path)
    assert text in str(caught.value)


def test_a_manifest_without_digests(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.pt2"
    package.manifest = json.dumps(package.manifest).encode()
    path.write_bytes(package.bytes())
    with pytest.raises(untorch.InvalidFileError, match=r'untorch\.json has no "digests"'):
        untorch.load(path)


def test_signatures_are_made_after_the_manifest(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.pt2"
    package.manifest["digests"] = digests(package.entries()[:3])
    package.extra = [Lie("model/extra/signatures/a.json", b"{}")]
    path.write_bytes(package.bytes())
    untorch.load(path, verify=True).close()
    package.extra = [Lie("model/extra/other.json", b"{}")]
    path.write_bytes(package.bytes())
    with pytest.raises(untorch.InvalidFileError, match=r"digests lack entry 'extra/other\.json'"):
        untorch.load(path)


def test_blocks_of_a_weight(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.pt2"
    more = np.arange(20_000, dtype=np.uint8).tobytes()
    package.extra = [Lie("model/data/weights/more", more)]
    described = digests([*package.entries()[:3], *package.extra])
    del described["entries"]["data/weights/more"]
    described["block_bytes"] = 8192
    described["blocks"]["data/weights/more"] = _core.sha256(more, 8192)
    package.manifest["digests"] = described
    path.write_bytes(package.bytes())
    untorch.load(path, verify=True).close()
    data = bytearray(path.read_bytes())
    data[data.index(more) + 16_500] ^= 1
    path.write_bytes(data)
    untorch.load(path).close()
    with pytest.raises(
        untorch.InvalidFileError, match="entry 'data/weights/more' in block 2 has the SHA-256 .*, the manifest says"
    ):
        untorch.load(path, verify=True)
    described["blocks"]["data/weights/more"] = _core.sha256(more, 4096)
    path.write_bytes(package.bytes())
    with pytest.raises(untorch.InvalidFileError, match="has 5 digests for the 3 blocks of entry 'data/weights/more'"):
        untorch.load(path)
