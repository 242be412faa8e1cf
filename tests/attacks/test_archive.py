"""Files whose zip structure is damaged or lies: each is refused with an error, none ends the process."""

from __future__ import annotations

import pathlib
import random
import struct
import zipfile
import zlib
from collections.abc import Callable

import pytest
from craft import LIBRARY, Directory, Lie, Package, zip_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probe import Prober

import untorch
from untorch.archive import ArchiveReader


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
    "no zip": (lambda _: b"x" * 4096, "it does not end with a zip directory without a comment"),
    "too short": (lambda _: b"PK", "is no .pt2 file: 2 bytes are too few for a zip archive"),
    "empty": (lambda _: b"", "is empty"),
    "directory past the end": (directory(offset=1 << 30), "does not end at its end record at"),
    "directory too long": (directory(size=1 << 30), "does not end at its end record at"),
    "directory too short": (directory(size=200), "does not end at its end record at"),
    "too many entries": (directory(entries=60000), "its zip directory claims 60000 entries in"),
    "one entry more": (directory(entries=5), "its zip directory has no header at offset"),
    "no entries": (directory(entries=0), "its 0 entries take 0"),
    "directory elsewhere": (directory(offset=8), "does not end at its end record at"),
    "comment": (directory(comment=b"a comment"), "it does not end with a zip directory without a comment"),
    "comment too long": (directory(comment_length=40), "it does not end with a zip directory without a comment"),
    "bytes after the end": (directory(tail=b"junk"), "it does not end with a zip directory without a comment"),
    "zip64 locator missing": (directory(offset=0xFFFFFFFF), "its zip64 locator is missing"),
    "zip64 record missing": (directory(zip64={"at": 4}), "its zip64 end record is not right before the zip64 locator"),
    "zip64 record past the end": (directory(zip64={"at": (1 << 64) - 8}), "is not right before the zip64 locator"),
    "zip64 offset": (directory(zip64={"offset": (1 << 64) - 1}), "its end record and its zip64 end record differ"),
    "zip64 size": (directory(zip64={"size": (1 << 64) - 1}), "its end record and its zip64 end record differ"),
    "zip64 count": (directory(zip64={"entries": 1 << 62}), "its end record and its zip64 end record differ"),
    "zip64 count alone": (
        directory(entries=0xFFFF, zip64={"entries": 1 << 62}),
        "claims 4611686018427387904 entries",
    ),
    "zip64 entry size": (
        set_field(
            2, size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=struct.pack("<HHQQ", 1, 16, (1 << 64) - 1, (1 << 64) - 1)
        ),
        "lacks its zip64 field",
    ),
    "zip64 field cut off": (
        set_field(2, size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=struct.pack("<HHH", 1, 60, 0)),
        "has an extra field that is cut off",
    ),
    "compressed": (set_field(2, method=8), "'model/data/weights/weight_0' is compressed"),
    "sizes differ": (set_field(2, packed=3), "'model/data/weights/weight_0' is compressed"),
    "encrypted": (set_field(2, flags=1), "'model/data/weights/weight_0' is encrypted"),
    "duplicate": (named("model/archive_format"), "two entries are named 'model/archive_format'"),
    "parent": (named("model/../../etc/passwd"), "'model/../../etc/passwd' leaves the archive"),
    "absolute": (named("/etc/passwd"), "'/etc/passwd' leaves the archive"),
    "backslash": (named("model\\..\\x"), "leaves the archive"),
    "zero byte": (named(b"model/a\0b"), r"'model/a\x00b' leaves the archive"),
    "no text": (named(b"model/\xff\xfe"), "is no plain UTF-8 text"),
    "empty part": (named("model//x"), "'model//x' leaves the archive"),
    "empty name": (named(""), "leaves the archive"),
    "two folders": (named("other/x"), "'other/x' is not in one top folder with the others"),
    "no folder": (named("x"), "'x' is not in one top folder with the others"),
    "other local name": (
        set_field(3, local_name="model/extra/untorch.jsoN"),
        "entry 'model/extra/untorch.json' has another name in its local header",
    ),
    "no local header": (
        set_field(3, local_magic=b"PK\x03\x05"),
        "entry 'model/extra/untorch.json' has no header at offset",
    ),
    "no central header": (set_field(2, central_magic=b"PK\x01\x03"), "its zip directory has no header at offset"),
    "header past the end": (set_field(2, offset=0x7FFFFFFF), "has its header at offset 2147483647"),
    "size past the end": (set_field(2, size=1 << 20, packed=1 << 20), "claims 1048576 bytes at offset"),
    "overlapping": (overlapping, "has its header at offset 0, expected it at"),
    "wrong checksum": (set_field(3, crc=1), "entry 'extra/untorch.json' has the checksum"),
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
    package.extra.append(Lie("model/empty", b""))
    assert prober.open(package.bytes()).startswith("ok:")


def pytorchs_large(name: str = "m/large", data: bytes = b"abc", **lies: int) -> bytes:
    """An archive as PyTorch writes it beyond 4 GiB: the sizes in a zip64 field, zeros in the local header."""
    t = {"size": len(data), "packed": 0, "offset": 0, "described": len(data), "crc": zlib.crc32(data), **lies}
    raw = name.encode()
    zip64 = struct.pack("<HHQQQ", 1, 24, t["size"], t["packed"], t["offset"])
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(raw), len(zip64)) + raw + zip64
    descriptor = struct.pack("<4sIQQ", b"PK\7\x08", t["crc"], t["described"], t["described"])
    extra = struct.pack("<HHQQ", 1, 16, len(data), len(data))
    central = struct.pack(
        "<4sHHHHHHIIIHHHHHII", b"PK\1\2", 0, 0, 0x808, 0, 0, 0, zlib.crc32(data), 0xFFFFFFFF, 0xFFFFFFFF, len(raw),
        len(extra), 0, 0, 0, 0, 0,
    )  # fmt: skip
    central += raw + extra
    at = len(local) + len(data) + len(descriptor)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(central), at, 0)
    return local + data + descriptor + central + end


def test_pytorchs_zip64_fields(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.pt2"
    for lies in ({}, {"packed": 3}):
        path.write_bytes(pytorchs_large(**lies))
        with ArchiveReader(path) as archive:
            assert archive.read("large") == b"abc"
    for lies, text in (
        ({"size": 4}, "another checksum or size"),
        ({"packed": 4}, "another checksum or size"),
        ({"offset": 8}, "a zip64 field that does not fit"),
        ({"described": 4}, "a data descriptor that says something else"),
        ({"crc": 4}, "a data descriptor that says something else"),
    ):
        path.write_bytes(pytorchs_large(**lies))
        with pytest.raises(untorch.InvalidFileError, match=text):
            ArchiveReader(path)


def local_field(at: int, width: int, index: int = 2) -> Callable[[Package], bytes]:
    """The package with a field of one local header changed, the directory's left as it is."""

    def build(package: Package) -> bytes:
        data = bytearray(package.bytes())
        start = -1
        for _ in range(index + 1):
            start = data.index(b"PK\3\4", start + 1)
        data[start + at : start + at + width] = bytes(b ^ 1 for b in data[start + at : start + at + width])
        return bytes(data)

    return build


@pytest.mark.parametrize(
    ("at", "width", "text"),
    [
        (4, 2, "another version, flag, method or time in its local header"),
        (6, 2, "another version, flag, method or time in its local header"),
        (8, 2, "another version, flag, method or time in its local header"),
        (10, 2, "another version, flag, method or time in its local header"),
        (12, 2, "another version, flag, method or time in its local header"),
        (14, 4, "another checksum or size in its local header"),
        (18, 4, "another checksum or size in its local header"),
        (22, 4, "another checksum or size in its local header"),
        (30, 1, "another name in its local header"),
    ],
)
def test_a_local_header_says_what_the_directory_says(
    at: int, width: int, text: str, package: Package, tmp_path: pathlib.Path
) -> None:
    assert text in load_error(tmp_path / "model.pt2", local_field(at, width)(package))


def test_no_byte_is_left_out(package: Package, tmp_path: pathlib.Path) -> None:
    """Gaps: before the first entry, between entries, between the last one and the directory."""
    data = package.bytes()
    directory = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x03\x04", 4)
    for at in (0, second, directory):
        moved = bytearray(data[:at] + b"gap!" + data[at:])
        struct.pack_into("<I", moved, len(moved) - 6, directory + 4)
        where = directory + 4
        while moved[where : where + 4] == b"PK\x01\x02":
            name, extra = struct.unpack_from("<HH", moved, where + 28)
            (offset,) = struct.unpack_from("<I", moved, where + 42)
            struct.pack_into("<I", moved, where + 42, offset + (4 if offset >= at else 0))
            where += 46 + name + extra
        text = load_error(tmp_path / "model.pt2", bytes(moved))
        assert ("gap or overlap" in text) or "its entries end at offset" in text
        with zipfile.ZipFile(tmp_path / "model.pt2") as archive:  # others take it
            assert archive.testzip() is None


def test_a_library_with_another_checksum_is_refused(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    entries = package.entries()
    changed = bytearray(package.library)
    changed[-1] ^= 1
    entries[1].data = bytes(changed)
    path.write_bytes(zip_bytes(entries))
    with untorch.load(path) as program, pytest.raises(untorch.InvalidFileError, match=f"'{LIBRARY}' has the SHA-256"):
        program.forward.open()


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
    with pytest.raises(
        untorch.InvalidArgumentError, match=r"load: source: expected no zero bytes in a path, got .*a\\x00b"
    ):
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


@pytest.mark.slow
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
