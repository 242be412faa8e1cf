"""Tests of the .pt2 writer and reader: alignment, equal bytes, whole or nothing, and hostile files."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.archive import ALIGNMENT, MANIFEST, ArchiveReader, ArchiveWriter
from untorch.runtime.errors import InvalidFileError


def write(path: Path, **entries: bytes) -> Path:
    with ArchiveWriter(path) as writer:
        for name, data in entries.items():
            writer.write(name, data)
    return path


@given(st.lists(st.binary(max_size=300), max_size=6))
@settings(max_examples=25, deadline=None)
def test_round_trip_and_alignment(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("archive") / "model.pt2"
    with ArchiveWriter(path) as writer:
        for i, data in enumerate(contents):
            writer.write(f"data/weights/weight_{i}", data)
    with ArchiveReader(path) as reader:
        assert reader.root == "model"
        for i, data in enumerate(contents):
            assert reader.read(f"data/weights/weight_{i}") == data
        assert all(entry.offset % ALIGNMENT == 0 for entry in reader)
        assert reader.read("archive_format") == b"pt2"
        assert len(reader.read(".data/serialization_id")) == 40
        reader.verify()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = write(tmp_path / "a/m.pt2", x=b"1" * 1000, y=b"2")
    second = write(tmp_path / "b/m.pt2", x=b"1" * 1000, y=b"2")
    other = write(tmp_path / "b/m2.pt2", x=b"1" * 1000, y=b"3")
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


def test_a_failure_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt2", x=b"old")
    old = path.read_bytes()

    def fail() -> None:
        with ArchiveWriter(path) as writer:
            writer.write("x", b"new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt2"]


def test_zip64_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("untorch.archive._ZIP64_FROM", 10)
    path = write(tmp_path / "m.pt2", large=b"x" * 100)
    with ArchiveReader(path) as reader:
        assert reader.entries["large"].offset % ALIGNMENT == 0
        assert reader.read("large") == b"x" * 100


def test_the_writer_refuses_bad_names(tmp_path: Path) -> None:
    def add(*names: str) -> None:
        with ArchiveWriter(tmp_path / "m.pt2") as writer:
            for name in names:
                writer.write(name, b"")

    with pytest.raises(ValueError, match="already has an entry 'x'"):
        add("x", "x")
    with pytest.raises(ValueError, match="a part of it is empty"):
        add("../x")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ArchiveWriter(tmp_path / "nowhere" / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_torch_reads_the_archive(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = write(tmp_path / "m.pt2", x=b"abc")
    reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record("x") == b"abc"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["m/x", "m/x"], "occurs twice"),
        (["m/../x"], "is refused"),
        (["/m/x"], "is refused"),
        (["m/x", "n/y"], "is not in the top folder 'm'"),
        (["m"], "is not in the top folder"),
        (["m/a\\b"], "is refused"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_names(tmp_path: Path, names: list[str], text: str) -> None:
    path = tmp_path / "m.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"data")
    with pytest.raises(InvalidFileError, match=text):
        ArchiveReader(path)


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/x", b"data" * 100)
    with pytest.raises(InvalidFileError, match="compressed or encrypted"):
        ArchiveReader(path)


def test_not_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"")
    with pytest.raises(InvalidFileError, match="it is empty"):
        ArchiveReader(path)
    path.write_bytes(b"hello" * 100)
    with pytest.raises(InvalidFileError, match="zip directory cannot be read"):
        ArchiveReader(path)
    with pytest.raises(InvalidFileError, match=r"cannot open .*missing\.pt2: No such file or directory"):
        ArchiveReader(tmp_path / "missing.pt2")


def test_damage_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt2", x=b"a" * 1000)
    with ArchiveReader(path) as reader:
        at = reader.entries["x"].offset
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with ArchiveReader(path) as reader, pytest.raises(InvalidFileError, match="'x' is damaged"):
        reader.verify()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_damage_never_crashes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write(tmp_path_factory.mktemp("damage") / "m.pt2", x=b"a" * 50, y=b"b")
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(len(raw) // 2, len(raw))) :]
    path.write_bytes(raw)
    try:
        with ArchiveReader(path) as reader:
            for entry in reader:
                assert len(reader.read(entry.name)) == entry.size
    except InvalidFileError:
        pass


def test_overlapping_entries_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt2", aa=b"1" * 20, ab=b"2" * 20)
    raw = path.read_bytes()
    first = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"m/aa"))
    second = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"m/ab"))
    changed = bytearray(raw)
    changed[second + 42 : second + 46] = changed[first + 42 : first + 46]
    path.write_bytes(changed)
    with pytest.raises(InvalidFileError, match=r"another name in its header|overlaps"):
        ArchiveReader(path)


def manifest(**changes: object) -> bytes:
    base: dict[str, object] = {"format": "untorch", "format_version": 1, "weights": [], "methods": {}}
    return json.dumps(base | changes).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100000, "not valid JSON"),
        (b"[]", 'does not say "format": "untorch"'),
        (manifest(format_version=9), "its format version is 9 and this untorch reads 1: export it again"),
        (manifest(weights={}), "'weights' is missing or not a list"),
        (manifest(methods=[]), "'methods' is missing or not a dict"),
        (manifest(weights=[{"file": "nope", "nbytes": 1}]), "names the file 'nope'"),
        (manifest(weights=[{"file": "w", "nbytes": 1}]), "should have 1 bytes, w has 3"),
        (manifest(weights=[3]), "names the file None"),
        (manifest(methods={"f": {"library": "nope"}}), "names the library 'nope'"),
    ],
)
def test_manifest_errors(tmp_path: Path, text: bytes, message: str) -> None:
    path = write(tmp_path / "m.pt2", **{MANIFEST: text, "w": b"123"})
    with ArchiveReader(path) as reader, pytest.raises(InvalidFileError, match=message):
        reader.manifest()


def test_a_stock_package_has_no_manifest(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt2", x=b"")
    with ArchiveReader(path) as reader:
        assert not reader.has_manifest()
        with pytest.raises(InvalidFileError, match="untorch did not write it"):
            reader.manifest()


def test_truncated_data(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt2", x=b"a" * 10)
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"m/x"))
    raw[at + 20 : at + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    path.write_bytes(raw)
    with pytest.raises(InvalidFileError, match="ends past the end of the file"):
        ArchiveReader(path)
