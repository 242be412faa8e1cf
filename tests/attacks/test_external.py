"""Weights in .safetensors files: manifests that point elsewhere, files that lie, changed contents, trust."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import platform
import re
import struct
from typing import Any

import numpy
import pytest
from craft import WEIGHT, Package, manifest

import untorch
from untorch import TrustPolicy, _core

X = numpy.arange(4, dtype=numpy.float32)
HONEST = [1, 4, 7, 10]  # 2 * x + w
NAME = "model.safetensors"


def safetensors(tensors: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    """A file of this header; tensors: (dtype, shape, begin, end) by name, or what stands in its place."""
    header = {
        name: {"dtype": entry[0], "shape": entry[1], "data_offsets": [entry[2], entry[3]]}
        if isinstance(entry, tuple)
        else entry
        for name, entry in tensors.items()
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TRUE = safetensors(
    {"__metadata__": {"format": "pt"}, "a": ("U8", [8], 0, 8), "layer.w": ("F32", [4], 8, 24)}, bytes(8) + WEIGHT
)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def external(library: bytes) -> Package:
    """A package whose only weight is layer.w of model.safetensors; it carries an unused entry."""
    document = manifest(platform.machine())
    document["format_version"] = 3
    document["external_files"] = [NAME]
    document["weights"] = [
        {"external": 0, "tensor": "layer.w", "dtype": "F32", "shape": [4], "nbytes": 16, "sample": sha256(WEIGHT),
         "sha256": sha256(WEIGHT)}
    ]  # fmt: skip
    return Package(library, document)


@pytest.fixture
def folder(external: Package, tmp_path: pathlib.Path) -> pathlib.Path:
    """With the package and its file."""
    (tmp_path / "model.pt2").write_bytes(external.bytes())
    (tmp_path / NAME).write_bytes(TRUE)
    return tmp_path


def values(path: pathlib.Path, **options: Any) -> list[float]:
    with untorch.load(path, **options) as program:
        return [float(value) for value in program.forward(X)]


def error_of(path: pathlib.Path, **options: Any) -> str:
    with pytest.raises(untorch.InvalidFileError) as caught:
        untorch.load(path, **options)
    return str(caught.value)


def test_a_weight_is_taken_from_the_file_beside(folder: pathlib.Path) -> None:
    for options in ({}, {"verify": True}, {"copy": True}, {"weights": folder}, {"weights": str(folder / NAME)}):
        assert values(folder / "model.pt2", **options) == HONEST


def test_the_file_is_found_by_argument_and_by_environment(
    folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, other = folder / "model.pt2", tmp_path_factory.mktemp("other")
    (folder / NAME).rename(other / NAME)
    with pytest.raises(untorch.FileMissingError) as caught:
        untorch.load(package)
    assert str(caught.value) == (
        f"{package} takes 1 weights (16 bytes) from the file '{NAME}', which is not there: looked for {folder}/{NAME}. "
        "Put it beside the package, or give its path or folder: load(…, weights=…), or UNTORCH_WEIGHTS in the "
        "environment"
    )
    assert isinstance(caught.value, FileNotFoundError) and caught.value.filename == str(package)
    assert values(package, weights=other) == values(package, weights=other / NAME) == HONEST
    assert values(package.read_bytes(), weights=other) == HONEST  # type: ignore[arg-type]
    monkeypatch.setenv("UNTORCH_WEIGHTS", str(other))
    assert values(package) == values(package.read_bytes()) == HONEST  # type: ignore[arg-type]
    # A file that is named may have another name, as those of a cache of blobs; and be a link.
    (other / NAME).rename(other / "blob")
    (folder / "link").symlink_to(other / "blob")
    assert values(package, weights=folder / "link") == HONEST
    with pytest.raises(untorch.FileMissingError, match=re.escape(f"looked for {folder}/{NAME}, {other}/{NAME}. Put")):
        untorch.load(package)


def test_arguments(folder: pathlib.Path, package: Package, tmp_path: pathlib.Path) -> None:
    with pytest.raises(untorch.ArgumentTypeError, match=r"load: weights: expected the path of a \.safetensors file"):
        untorch.load(folder / "model.pt2", weights=3)  # type: ignore[arg-type]
    with pytest.raises(untorch.InvalidArgumentError, match=r"load: weights: expected the path .*, got ''"):
        untorch.load(folder / "model.pt2", weights="")
    own = tmp_path / "own.pt2"
    own.write_bytes(package.bytes())
    with pytest.raises(untorch.InvalidArgumentError, match=re.escape(f"{own} has all of its own: leave weights out")):
        untorch.load(own, weights=folder)


def test_programs_share_the_file(folder: pathlib.Path, external: Package) -> None:
    (folder / "second.pt2").write_bytes(external.bytes())
    with untorch.load(folder / "model.pt2") as first, untorch.load(folder / "second.pt2") as second:
        assert first.memory()["mapped"] == (folder / "model.pt2").stat().st_size + len(TRUE)
        assert list(first.forward(X)) == list(second.forward(X)) == HONEST
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
        mappings = [line for line in lines if line.endswith(f"{folder}/{NAME}")]
        assert mappings and all(" r--p " in line for line in mappings)


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        (("external_files",), ..., 'has no "external_files"'),
        (("external_files",), [], "external_files has 0 names, expected from 1 to 4096"),
        (("external_files",), NAME, "external_files is not a list"),
        (("external_files",), [7], "external_files[0] is not a string"),
        (("external_files",), [NAME, NAME], "external_files[1] is there twice"),
        *(
            (("external_files",), [name], "expected the plain name of a .safetensors file, without a folder")
            for name in (
                f"../{NAME}", f"/tmp/{NAME}", f"a/{NAME}", f"..\\{NAME}", "..", ".", "", ".safetensors", "model.pt2",
                "passwd", f"a\n{NAME}", f"{'a' * 250}.safetensors",
            )
        ),
        (("weights", 0, "external"), 1, "weights[0] names external file 1 of 1"),
        (("weights", 0, "external"), -1, "external is negative: -1"),
        (("weights", 0, "external"), NAME, "external is not an integer"),
        (("weights", 0, "tensor"), ..., 'has no "tensor"'),
        (("weights", 0, "tensor"), "a" * 2000, "tensor is a text of 2000 bytes"),
        (("weights", 0, "dtype"), "F99", "its dtype and shape say what cannot be"),
        (("weights", 0, "shape"), [1 << 62, 1 << 62], "its dtype and shape say what cannot be"),
        (("weights", 0, "shape"), [5], "weights[0] has 16 bytes, its dtype and shape say 20"),
        (("weights", 0, "nbytes"), 1 << 40, "has 1099511627776 bytes, its dtype and shape say 16"),
        (("weights", 0, "sample"), "0", "sample is no SHA-256 in lower-case hexadecimal digits"),
        (("weights", 0, "sha256"), "0" * 63, "sha256 is no SHA-256 in lower-case hexadecimal digits"),
        (("weights", 0, "sha256"), "0" * 128, "sha256 has 2 digests for 1 blocks"),
        (("methods", "forward", "constants", 0, "shape"), [8], "does not fit into its weight of 16 bytes"),
        (("format_version",), 2, "names external file 0 of 0"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_manifest_that_lies(
    where: tuple[str | int, ...], value: Any, text: str, external: Package, folder: pathlib.Path
) -> None:
    (folder / "model.pt2").write_bytes(external.with_manifest(where, value).bytes())
    assert text in error_of(folder / "model.pt2")


W = ("F32", [4], 8, 24)
A = ("U8", [8], 0, 8)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is empty"),
        (b"\0\0", "is no .safetensors file: it has 2 bytes"),
        (struct.pack("<Q", 1 << 62) + b"{}", "say that the header has 4611686018427387904 bytes"),
        (struct.pack("<Q", 200_000_000) + bytes(100), "a header at most 100000000"),
        (safetensors({"a": A, "layer.w": W}, bytes(24), length=10), "is no valid JSON"),
        (struct.pack("<Q", 4) + b"[[]]", "header is not an object"),
        (struct.pack("<Q", 20000) + b"[" * 20000, "nested too deeply"),
        (safetensors({"a": 3}, b""), "tensor 'a' is not an object"),
        (safetensors({"a": {"dtype": "U8", "shape": [0]}}, b""), 'has no "data_offsets"'),
        (safetensors({"a": A, "layer.w": ("F32", [4], 8, 1 << 40)}, bytes(24)), "do not lie in the 24 bytes behind"),
        (safetensors({"a": A, "layer.w": ("F32", [4], 24, 8)}, bytes(24)), "do not lie in the 24 bytes behind"),
        (safetensors({"a": A, "layer.w": ("F32", [4], -8, 8)}, bytes(24)), "is negative: -8"),
        (safetensors({"a": A, "layer.w": ("F32", [4], 4, 20)}, bytes(24)), "overlaps the tensor before it"),
        (safetensors({"layer.w": W}, bytes(24)), "leaves a gap of 8 bytes before it"),
        (safetensors({"a": A, "layer.w": W}, bytes(28)), "describes 24 bytes of tensors, the file has 28"),
        (safetensors({"a": A, "layer.w": ("F32", [5], 8, 24)}, bytes(24)), "has 16 bytes, its dtype and shape say 20"),
        (safetensors({"a": A, "layer.w": ("F32", [1 << 62, 8], 8, 24)}, bytes(24)), "say what cannot be"),
        (safetensors({"a": A, "layer.w": ("F32", [1] * 65, 8, 24)}, bytes(24)), "has 65 dimensions"),
        (
            safetensors({"a": A}, bytes(8)),
            "has no tensor 'layer.w', expected F32 [4] for {package}; it has 1 tensors, the first is 'a': is it "
            "another checkpoint? Take the one that the package was exported with, or export again",
        ),
        (
            safetensors({"a": A, "layer.w": ("I32", [2, 2], 8, 24)}, bytes(24)),
            "tensor 'layer.w' is I32 [2, 2], {package} expects F32 [4]: is it another checkpoint?",
        ),
        (
            safetensors({"a": A, "layer.w": W}, bytes(24)),
            "tensor 'layer.w' has other values than {package} was exported with: the SHA-256 of its first and last 4 KiB",
        ),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else "",
)
def test_a_file_that_lies(data: bytes, text: str, folder: pathlib.Path) -> None:
    (folder / NAME).write_bytes(data)
    error = error_of(folder / "model.pt2")
    assert text.format(package=folder / "model.pt2") in error and str(folder / NAME) in error


def test_a_dtype_of_the_future(folder: pathlib.Path) -> None:
    (folder / NAME).write_bytes(safetensors({"a": ("F2", [32], 0, 8), "layer.w": W}, bytes(8) + WEIGHT))
    with pytest.raises(untorch.UnsupportedError, match='has the dtype "F2", which this untorch does not know: upgrade'):
        untorch.load(folder / "model.pt2")


def test_the_order_of_the_file_does_not_matter(folder: pathlib.Path) -> None:
    (folder / NAME).write_bytes(safetensors({"z": ("U8", [2], 16, 18), "layer.w": ("F32", [4], 0, 16)}, WEIGHT + b"xy"))
    assert values(folder / "model.pt2", verify=True) == HONEST


def test_a_misaligned_tensor_is_copied(folder: pathlib.Path) -> None:
    text = safetensors({"a": ("U8", [1], 0, 1), "layer.w": ("F32", [4], 1, 17)}, b"x" + WEIGHT)
    for pad in range(2):  # the header's length decides
        header = text[8 : len(text) - 17] + b" " * pad
        (folder / NAME).write_bytes(struct.pack("<Q", len(header)) + header + b"x" + WEIGHT)
        assert values(folder / "model.pt2") == HONEST


def test_what_is_no_file(folder: pathlib.Path) -> None:
    (folder / NAME).unlink()
    os.mkfifo(folder / NAME)
    assert "is no regular file" in error_of(folder / "model.pt2")
    os.unlink(folder / NAME)
    (folder / NAME).mkdir()
    assert "Is a directory" in error_of(folder / "model.pt2")


def large(external: Package, folder: pathlib.Path) -> bytearray:
    """The package's tensor becomes part of one of 9 MiB; gives the bytes of the tensors, to be changed."""
    data = bytearray(WEIGHT + bytes((9 << 20) - 16))
    blocks = [bytes(data[at : at + (4 << 20)]) for at in range(0, len(data), 4 << 20)]
    document = external.manifest["weights"][0]
    document |= {"dtype": "U8", "shape": [9 << 20], "nbytes": 9 << 20}
    document |= {"sample": sha256(bytes(data[:4096] + data[-4096:])), "sha256": "".join(map(sha256, blocks))}
    (folder / "model.pt2").write_bytes(external.bytes())
    return data


def write_large(folder: pathlib.Path, data: bytes) -> None:
    (folder / NAME).write_bytes(safetensors({"layer.w": ("U8", [9 << 20], 0, 9 << 20)}, data))


def test_changed_bytes(external: Package, folder: pathlib.Path) -> None:
    data = large(external, folder)
    package = folder / "model.pt2"
    write_large(folder, data)
    assert values(package, verify=True) == HONEST
    assert _core.sample_digest(data) == external.manifest["weights"][0]["sample"]
    data[5 << 20] ^= 1  # neither among the first nor the last
    write_large(folder, data)
    assert values(package) == HONEST
    error = error_of(package, verify=True)
    assert "has other values than" in error and "block 1 has the SHA-256" in error
    data[-1] ^= 1
    write_large(folder, data)
    assert "first and last 4 KiB" in error_of(package)


def test_a_trust_policy_covers_the_weights(external: Package, folder: pathlib.Path) -> None:
    data = large(external, folder)
    package = folder / "model.pt2"
    for policy in (
        TrustPolicy(hashes=(f"sha256:{sha256(package.read_bytes())}",)),
        TrustPolicy(folders=(str(folder),)),
    ):
        write_large(folder, data)
        assert values(package, trust=policy) == HONEST
        changed = bytearray(data)
        changed[5 << 20] ^= 1
        write_large(folder, changed)
        with pytest.raises(untorch.UntrustedError, match="tensor 'layer.w' has other values than"):
            untorch.load(package, trust=policy)


def test_a_file_that_is_truncated_while_in_use(external: Package, folder: pathlib.Path) -> None:
    data = large(external, folder)
    external.manifest["methods"]["forward"]["constants"][0]["storage_offset"] = (8 << 20) // 4
    data[8 << 20 : (8 << 20) + 16] = WEIGHT
    blocks = [bytes(data[at : at + (4 << 20)]) for at in range(0, len(data), 4 << 20)]
    external.manifest["weights"][0]["sha256"] = "".join(map(sha256, blocks))
    (folder / "model.pt2").write_bytes(external.bytes())
    write_large(folder, data)
    with untorch.load(folder / "model.pt2") as program:
        os.truncate(folder / NAME, 4096)
        with pytest.raises(untorch.InvalidFileError, match=f"{NAME} was truncated while in use"):
            program.forward(X)


def test_several_files(external: Package, folder: pathlib.Path) -> None:
    document = external.manifest
    document["external_files"] = ["other.safetensors", NAME]
    document["weights"][0]["external"] = 1
    (folder / "model.pt2").write_bytes(external.bytes())
    with pytest.raises(
        untorch.FileMissingError, match=r"takes 0 weights \(0 bytes\) from the file 'other.safetensors'"
    ):
        untorch.load(folder / "model.pt2")
    (folder / "other.safetensors").write_bytes(safetensors({}, b""))
    assert values(folder / "model.pt2") == HONEST
    with pytest.raises(
        untorch.InvalidArgumentError,
        match=r"takes weights from 2 files, 'other.safetensors' and others: expected the folder that has them, got",
    ):
        untorch.load(folder / "model.pt2", weights=folder / NAME)


@pytest.mark.slow
def test_mutants_of_the_header_end_nothing(folder: pathlib.Path) -> None:
    rng = numpy.random.default_rng(5)
    opened = refused = 0
    for _ in range(3000):
        data = bytearray(TRUE)
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data) - 16))] = int(rng.integers(256))
        (folder / "mutant.safetensors").write_bytes(data)
        try:
            tensors = _core.open_safetensors(os.fsencode(folder / "mutant.safetensors")).tensors()
        except (untorch.InvalidFileError, untorch.UnsupportedError):
            refused += 1
            continue
        opened += 1
        assert sum(len(view) for _, _, view in tensors.values()) == 24
    assert opened and refused
