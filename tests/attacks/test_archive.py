"""Files whose zip structure is damaged or lies: each is refused with an error, none ends the process."""

from __future__ import annotations

import pathlib
import random
import struct
from collections.abc import Callable

import pytest
from craft import LIBRARY, Directory, Lie, Package, zip_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probe import Prober

import untorch


def load_error(path: pathlib.Path, data: bytes) -> str:
    """The text of the InvalidFileError that these bytes give."""
    path.write_bytes(data)
    with pytest.raises(untorch.InvalidFileError) as caught:
        untorch.load(path)
    return str(caught.value).removeprefix(str(path))


def with_entry(change: Callable[[list[Lie]], None]) -> Callable[[Package], bytes]:
    """The package after a change of its entries."""

    def build(package: Package) -> bytes:
        entries = package.entries()
        change(entries)
        return zip_bytes(entries)

    return build


def set_field(index: int, **fields: object) -> Callable[[Package], bytes]:
    """The package with fields of one entry set."""

    def change(entries: list[Lie]) -> None:
        for name, value in fields.items():
            setattr(entries[index], name, value)

    return with_entry(change)


def directory(**fields: object) -> Callable[[Package], bytes]:
    """The package with fields of the end record set."""
    return lambda package: package.bytes(Directory(**fields))  # type: ignore[arg-type]


def named(name: str | bytes) -> Callable[[Package], bytes]:
    """The package with one more entry."""
    return with_entry(lambda entries: entries.append(Lie(name, b"x")))


def overlapping(package: Package) -> bytes:
    entries = package.entries()
    entries.append(Lie("model/again", entries[1].data, offset=0, local_name="model/archive_format"))
    return zip_bytes(entries)


DAMAGE: dict[str, tuple[Callable[[Package], bytes], str]] = {
    "no zip": (lambda _: b"x" * 4096, "is no .pt2 file, or is cut off: it has no zip directory at its end"),
    "too short": (lambda _: b"PK", "is no .pt2 file: 2 bytes are too few for a zip archive"),
    "empty": (lambda _: b"", "is empty"),
    "directory past the end": (directory(offset=1 << 30), "its zip directory points outside of the file"),
    "directory too long": (directory(size=1 << 30), "its zip directory points outside of the file"),
    "directory too short": (directory(size=200), "its zip directory is longer than its end record says"),
    "too many entries": (directory(entries=60000), "its zip directory claims 60000 entries in"),
    "one entry more": (directory(entries=5), "entry 4 of its zip directory has no header"),
    "no entries": (directory(entries=0), "holds no compiled model"),
    "directory elsewhere": (directory(offset=8), "entry 0 of its zip directory has no header"),
    "comment too long": (directory(comment_length=40), "it has no zip directory at its end"),
    "bytes after the end": (directory(tail=b"junk"), "it has no zip directory at its end"),
    "zip64 locator missing": (directory(offset=0xFFFFFFFF), "its zip64 locator is missing"),
    "zip64 record missing": (directory(zip64={"at": 4}), "its zip64 end record is missing"),
    "zip64 record past the end": (directory(zip64={"at": (1 << 64) - 8}), "points outside of the file"),
    "zip64 offset": (directory(zip64={"offset": (1 << 64) - 1}), "points outside of the file"),
    "zip64 size": (directory(zip64={"size": (1 << 64) - 1}), "points outside of the file"),
    "zip64 count": (directory(zip64={"entries": 1 << 62}), "claims 4611686018427387904 entries"),
    "zip64 entry size": (
        set_field(
            2, size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=struct.pack("<HHQQ", 1, 16, (1 << 64) - 1, (1 << 64) - 1)
        ),
        "claims 18446744073709551615 bytes",
    ),
    "zip64 field cut off": (
        set_field(2, size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=struct.pack("<HHH", 1, 60, 0)),
        "claims 4294967295 bytes",
    ),
    "compressed": (set_field(2, method=8), "'model/data/weights/weight_0' is compressed"),
    "sizes differ": (set_field(2, packed=3), "'model/data/weights/weight_0' is compressed"),
    "encrypted": (set_field(2, flags=1), "'model/data/weights/weight_0' is encrypted"),
    "duplicate": (named("model/archive_format"), "two entries are named 'model/archive_format'"),
    "parent": (named("model/../../etc/passwd"), "'model/../../etc/passwd' leaves the archive"),
    "absolute": (named("/etc/passwd"), "'/etc/passwd' leaves the archive"),
    "backslash": (named("model\\..\\x"), "leaves the archive"),
    "zero byte": (named(b"model/a\0b"), "'model/a?b' leaves the archive"),
    "no text": (named(b"model/\xff\xfe"), "is no plain UTF-8 text"),
    "empty part": (named("model//x"), "'model//x' leaves the archive"),
    "empty name": (named(""), "leaves the archive"),
    "two folders": (named("other/x"), "'other/x' is not in one top folder with the others"),
    "no folder": (named("x"), "'x' is not in one top folder with the others"),
    "other local name": (
        set_field(3, local_name="model/extra/untorch.jsoN"),
        "is not that of entry 'extra/untorch.json'",
    ),
    "no local header": (set_field(3, local_magic=b"PK\x03\x05"), "entry 'extra/untorch.json' has no header at offset"),
    "no central header": (set_field(2, central_magic=b"PK\x01\x03"), "entry 2 of its zip directory has no header"),
    "header past the end": (set_field(2, offset=0x7FFFFFFF), "points outside of the file"),
    "size past the end": (set_field(2, size=1 << 20, packed=1 << 20), "claims 1048576 bytes at offset"),
    "overlapping": (overlapping, "but the next entry starts at 0"),
    "wrong checksum": (set_field(3, crc=1), "the bytes of entry 'extra/untorch.json' have another checksum"),
    "long name": (set_field(3, name_length=60000), "points outside of the file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_archive_is_refused(kind: str, package: Package, tmp_path: pathlib.Path) -> None:
    build, text = DAMAGE[kind]
    assert text in load_error(tmp_path / "model.pt2", build(package))


def test_the_undamaged_package_runs(package: Package, prober: Prober) -> None:
    assert prober.open(package.bytes()) == "ok: [1.0, 4.0, 7.0, 10.0]"


def test_truth_in_other_forms_is_accepted(package: Package, prober: Prober) -> None:
    assert prober.open(package.bytes(Directory(zip64={}))).startswith("ok:")
    assert prober.open(package.bytes(Directory(comment=b"a comment"))).startswith("ok:")
    assert prober.open(zip_bytes([*package.entries(), Lie("model/empty", b"")])).startswith("ok:")


def test_a_library_with_another_checksum_is_refused(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(set_field(1, crc=1)(package))
    with untorch.load(path) as program, pytest.raises(untorch.InvalidFileError, match=f"bytes of entry '{LIBRARY}'"):
        _ = program.forward


def test_missing_files_and_folders_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(untorch.InvalidFileError, match=r"cannot open .*none\.pt2: No such file or directory"):
        untorch.load(tmp_path / "none.pt2")
    with pytest.raises(untorch.InvalidFileError, match=rf"cannot open {tmp_path}: Is a directory"):
        untorch.load(tmp_path)
    with pytest.raises(untorch.InvalidFileError, match="is no regular file"):
        untorch.load("/dev/null")


def test_a_path_that_is_no_utf8_works(package: Package, tmp_path: pathlib.Path) -> None:
    name = bytes(tmp_path) + b"/\xff.pt2"
    with pytest.raises(untorch.InvalidFileError, match="cannot open .*\udcff.pt2: No such file"):
        untorch.load(name.decode(errors="surrogateescape"))
    pathlib.Path(name.decode(errors="surrogateescape")).write_bytes(package.bytes())
    with untorch.load(name.decode(errors="surrogateescape")) as program:
        assert program.methods == ["forward"]


def test_a_path_with_a_zero_byte_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(untorch.InvalidArgumentError, match=r"load: path: expected no zero bytes, got .*a\\x00b"):
        untorch.load(f"{tmp_path}/a\0b")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fraction=st.floats(0, 1))
def test_every_prefix_is_refused(package: Package, prober: Prober, fraction: float) -> None:
    data = package.bytes()
    length = min(int(len(data) * fraction), len(data) - 1)
    assert prober.refused([(f"first {length} bytes", data[:length])]) == []


def test_prefixes_at_the_ends_are_refused(package: Package, prober: Prober) -> None:
    data = package.bytes()
    lengths = [*range(1, 64), *range(len(data) - 400, len(data))]
    assert prober.refused((f"first {n} bytes", data[:n]) for n in lengths) == []


def test_flipped_bytes_are_refused_or_harmless(package: Package, prober: Prober) -> None:
    data = package.bytes()
    rng = random.Random(20)
    cases = []
    for _ in range(1500):
        at = rng.choice((rng.randrange(2048), len(data) - 1 - rng.randrange(2048), rng.randrange(len(data))))
        value = rng.randrange(1, 256)
        flipped = bytearray(data)
        flipped[at] ^= value
        cases.append((f"byte {at} ^ {value}", bytes(flipped)))
    # Timestamps, padding and weights are not looked at.
    assert prober.refused(cases, allow_ok=True) == []
