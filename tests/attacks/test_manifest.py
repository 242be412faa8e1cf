"""Manifests that are damaged or lie about the file."""

from __future__ import annotations

import json
import pathlib
import random
import re
from typing import Any

import pytest
from compiler import model_library
from craft import LIBRARY, Lie, Package, RealPackage, zip_bytes
from probe import Prober

import untorch
from untorch import _core
from untorch.runtime.unsupported import BUILT_WITHOUT_CUDA

M = ("methods", "forward")
X = (*M, "inputs", 0)
C = (*M, "constants", 0)
HUGE = 1 << 62
QUANTIZED = {"dtype": "int4", "nbytes": 8, "packed_shape": [4, 4], "group_size": 32}
PACKED = {**QUANTIZED, "operator": "int4_linear", "tensors": ["w", "s"], "group_size": 32, "activations": "bfloat16"}

NO_CUDA = "no NVIDIA driver was found" if _core.has_symbol("aoti_torch_cuda_mm_out") else BUILT_WITHOUT_CUDA

# path in the manifest, value (... removes it), the error's text
LIES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("format",), "other", 'is not of the format "untorch"'),
    (("format",), ..., 'has no "format"'),
    (("format",), 3, "format is not a string"),
    (("format_version",), 4, "has format version 4; this untorch reads 2 and 3: upgrade untorch"),
    (("format_version",), 1, "has format version 1; this untorch reads 2 and 3: export it again"),
    (("format_version",), 0, "has the impossible format version 0"),
    (("format_version",), "1", "format_version is not an integer"),
    (("format_version",), 1.5, "format_version is not an integer"),
    (("weights",), {}, "weights is not a list"),
    (("weights", 0), 7, "weights[0] is not an object"),
    (("weights", 0, "file"), "data/none", "names 'data/none', which is not in the archive"),
    (("weights", 0, "nbytes"), 17, "holds 16 bytes, the manifest says 17"),
    (("weights", 0, "nbytes"), -1, "nbytes is negative: -1"),
    (("weights", 0, "nbytes"), 12, "holds 16 bytes, the manifest says 12"),
    (("methods",), [], "methods is not an object"),
    (("methods",), {}, "has no methods"),
    (M, None, "method 'forward' is not an object"),
    ((*M, "library"), "data/none.so", "names 'data/none.so', which is not in the archive"),
    ((*M, "library"), ..., 'has no "library"'),
    ((*M, "extern_nodes"), "none.json", "names 'none.json', which is not in the archive"),
    ((*M, "device"), 1, "device is not a string"),
    ((*M, "device"), "cuda:0", "was compiled for cuda:0, and " + NO_CUDA),
    ((*M, "device"), "tpu", "was compiled for tpu; untorch serves cpu and cuda"),
    ((*M, "gpu_architecture"), 90, "gpu_architecture is not a string"),
    ((*M, "variants"), {}, "variants is not a list"),
    ((*M, "variants"), [1], "variant 0 is not an object"),
    ((*M, "variants"), [{"library": "none.so"}], "variant 0 library names 'none.so', which is not in the archive"),
    ((*M, "variants"), [{"library": LIBRARY, "constants": []}], 'variant 0 has no "cpu"'),
    ((*M, "constants", 0, "device"), 1, "device is not a string"),
    ((*M, "cpu", "architecture"), "riscv64", "was compiled for riscv64, this machine is"),
    ((*M, "cpu", "features"), ["avx2048"], "was compiled for a CPU with avx2048, which this one lacks"),
    ((*M, "cpu", "features"), "avx2", "features is not a list"),
    ((*M, "tf32"), True, "tf32 is not an object"),
    ((*M, "tf32"), {"convolution": True}, 'tf32 has no "matmul"'),
    ((*M, "tf32"), {"convolution": 1, "matmul": True}, "convolution is not true or false"),
    ((*M, "inputs"), {}, "inputs is not a list"),
    ((*M, "inputs"), [], "the manifest says 0 and 1"),
    ((*M, "outputs"), [], "the manifest says 1 and 0"),
    ((*M, "outputs", 0), 5, "output 0 is not an object"),
    ((*M, "outputs", 0), {"constant": 5}, 'output 0 has no "name"'),
    ((*X, "value"), 5, "value is for an int64 without dimensions"),
    ((*X, "value"), {"symbol": "s0"}, "value is for an int64 without dimensions"),
    ((*X, "name"), ..., 'has no "name"'),
    ((*X, "dtype"), "float33", 'has an unknown dtype "float33"'),
    ((*X, "shape"), 4, "shape is not a list"),
    ((*X, "shape"), [-4], "shape is negative: -4"),
    ((*X, "shape"), ["s0"], "shape is not an object"),
    ((*X, "shape"), [{"symbol": 3}], "symbol is not a string"),
    ((*X, "shape"), [{"expr": "s0", "rpn": ["+"]}], "rpn is malformed"),
    ((*X, "shape"), [{"expr": "s0", "rpn": []}], "rpn is malformed"),
    ((*X, "shape"), [{"expr": "s0", "rpn": [1, 2]}], "rpn is malformed"),
    ((*X, "shape"), [{"expr": "s0", "rpn": [1, "+"]}], "rpn is malformed"),
    ((*X, "shape"), [{"expr": "s0", "rpn": [[]]}], "is not a string"),
    ((*X, "contiguous"), "yes", "contiguous is not true or false"),
    ((*C, "name"), "v", "needs the weight 'w', which the manifest does not have"),
    ((*M, "constants"), [], "needs the weight 'w', which the manifest does not have"),
    ((*C, "dtype"), "int32", "expects the weight 'w' to be float32, the manifest has int32"),
    ((*C, "dtype"), "float64", "does not fit into its weight of 16 bytes"),
    ((*C, "shape"), [5], "does not fit into its weight of 16 bytes"),
    ((*C, "shape"), [HUGE, HUGE], "differ in length"),
    ((*C, "strides"), [HUGE], "reach too far"),
    ((*C, "strides"), [-1], "strides is negative: -1"),
    ((*C, "storage_offset"), 1, "does not fit into its weight of 16 bytes"),
    ((*C, "storage_offset"), (1 << 63) - 1, "does not fit into its weight of 16 bytes"),
    ((*C, "storage_offset"), -1, "storage_offset is negative"),
    ((*C, "weight"), 1, "names weight 1 of 1"),
    ((*C, "weight"), HUGE, "of 1"),
    ((*C, "mutated"), 1, "mutated is not true or false"),
    ((*M, "quantization"), 3, "quantization is not a list"),
    ((*M, "quantization"), [1], "quantization[0] is not an object"),
    ((*M, "quantization"), [{**QUANTIZED, "operator": 4}], "quantization[0] operator is not a string"),
    ((*M, "quantization"), [{**QUANTIZED, "operator": "int4_linear"}], 'quantization[0] has no "tensors"'),
    ((*M, "quantization"), [{**PACKED, "tensors": ["w"]}], "has 1 tensors, int4_linear takes 2"),
    ((*M, "quantization"), [{**PACKED, "operator": "nvfp4_linear"}], "has 2 tensors, nvfp4_linear takes 3"),
    ((*M, "quantization"), [{**PACKED, "group_size": "32"}], "group_size is not an integer"),
    ((*M, "quantization"), [{**PACKED, "activations": "int3"}], 'quantization[0] has an unknown dtype "int3"'),
    (("states",), 1, "states is not"),
    (("states",), [{"fqn": "s"}], "weight"),
    (("states",), [{"fqn": "s", "weight": 1}], "names weight 1 of 1"),
]


def error_of(path: pathlib.Path, package: Package) -> str:
    """The text of the error at loading or at opening the method."""
    path.write_bytes(package.bytes())
    with pytest.raises((untorch.InvalidFileError, untorch.UnsupportedError)) as caught, untorch.load(path) as program:
        program.forward.open()
    return str(caught.value)


@pytest.mark.of_each_build
@pytest.mark.parametrize(("where", "value", "text"), LIES, ids=lambda v: str(v)[:40])
def test_a_lie_is_found(
    where: tuple[str | int, ...], value: Any, text: str, package: Package, tmp_path: pathlib.Path
) -> None:
    assert text in error_of(tmp_path / "model.pt2", package.with_manifest(where, value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "expected a value at byte 0"),
        (b"\0\0", "expected a value at byte 0"),
        (b"{", "expected a member name at byte 1"),
        (b"[" * 1000, "nested too deeply"),
        (b'{"a":' * 1000, "nested too deeply"),
        (b'{"format": "untorch", "format": "untorch"}', "duplicate member name"),
        (b'{"a": 1} x', "unexpected text after the value"),
        (b'{"a": 01}', "number with a leading zero"),
        (b'{"a": 99999999999999999999}', "integer out of range"),
        (b'{"a": 1e999}', "number out of range"),
        (b'{"a": NaN}', "expected a value"),
        (b'{"a": -}', "bad number"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": "\\u0000"}', "zero character in a string"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"a": "\\q"}', "unknown escape"),
        (b'{"a": "\n"}', "control character in a string"),
        (b'{"a": "', "string without an end"),
        (b'{"a" 1}', "expected ':'"),
        (b'{"a": 1 "b": 2}', "expected ',' or '}'"),
        (b"[1 2]", "expected ',' or ']'"),
        (b"[]", "is not an object"),
        (b"12", "is not an object"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_text_that_is_no_manifest(text: bytes, message: str, package: Package, tmp_path: pathlib.Path) -> None:
    package.manifest = text
    assert message in error_of(tmp_path / "model.pt2", package)


def test_flipped_bytes_with_the_right_checksum(package: Package, prober: Prober) -> None:
    text = json.dumps(package.manifest).encode()
    rng = random.Random(21)
    cases = []
    for _ in range(1500):
        flipped = bytearray(text)
        at, value = rng.randrange(len(text)), rng.choice((1, 2, 4, 8, 16, 32, 64, 128, rng.randrange(1, 256)))
        flipped[at] ^= value
        other = Package(package.library, bytes(flipped))
        cases.append((f"byte {at} ^ {value}: {bytes(flipped)[max(at - 20, 0) : at + 20]!r}", other.bytes()))
    wrong = [
        w for w in prober.refused(cases, allow_ok=True) if "InvalidArgumentError" not in w and "AttributeError" not in w
    ]
    assert wrong == []  # a changed name or shape may make the probe's own call wrong


@pytest.mark.parametrize("rpn", [[-(1 << 63), -1, "//"], [-(1 << 63), -1, "%"], [1, 0, "//"], [1, 0, "%"]])
def test_an_expression_that_has_no_value_ends_nothing(rpn: list[Any], package: Package, prober: Prober) -> None:
    answer = prober.open(package.with_manifest((*X, "shape"), [{"expr": "e", "rpn": rpn}]).bytes())
    assert answer.startswith(("ok:", "InvalidArgumentError: method 'forward', input 'x': expected float32[e]"))


def test_overflowing_expressions_end_nothing(package: Package, prober: Prober) -> None:
    for op in ("+", "-", "*"):
        rpn = [(1 << 63) - 1, -(1 << 63), op, (1 << 63) - 1, op]
        answer = prober.open(package.with_manifest((*X, "shape"), [{"expr": "e", "rpn": rpn}]).bytes())
        assert answer.startswith(("ok:", "InvalidArgumentError:"))


def test_a_mutated_constant_gets_a_copy(package: Package, prober: Prober) -> None:
    assert prober.open(package.with_manifest((*C, "mutated"), True).bytes()) == "ok: [1.0, 4.0, 7.0, 10.0]"
    # The manifest's shape is smaller than what the library reads.
    lie = package.with_manifest((*C, "mutated"), True).with_manifest((*C, "shape"), [1])
    assert prober.open(lie.bytes()) == "ok: [1.0, 4.0, 7.0, 10.0]"


def test_states_that_do_not_fit(package: Package, prober: Prober) -> None:
    mutated = package.with_manifest((*C, "mutated"), True)
    assert "names state 0 of 0" in prober.open(mutated.with_manifest((*C, "state"), 0).bytes())
    good = mutated.with_manifest(("states",), [{"fqn": "s", "weight": 0}]).with_manifest((*C, "state"), 0)
    assert prober.open(good.bytes()) == "ok: [1.0, 4.0, 7.0, 10.0]"
    for number in (1, HUGE, -1):
        answer = prober.open(good.with_manifest((*C, "state"), number).bytes())
        assert answer.startswith("InvalidFileError:") and "state" in answer


def test_a_misaligned_weight_is_copied(package: Package, prober: Prober) -> None:
    package.extra = [Lie("model/pad", b"x", align=1)]
    entries = package.entries()
    entries[2].align = 1
    entries.insert(2, entries.pop())
    data = zip_bytes(entries)
    assert prober.open(data) == "ok: [1.0, 4.0, 7.0, 10.0]"


def test_a_package_without_its_manifest_does_not_run_without_weights(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(zip_bytes(package.entries()[:-1]))
    with (
        untorch.load(path) as program,
        pytest.raises(untorch.InvalidFileError, match="was compiled for untorch, but there is no manifest"),
    ):
        program.forward.open()


def test_a_stock_package_without_a_library_is_refused(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(zip_bytes([Lie("m/data/aotinductor/model/a.wrapper.cpp", b"int x;")]))
    with pytest.raises(untorch.InvalidFileError, match="method 'model' has no model library"):
        untorch.load(path)
    path.write_bytes(zip_bytes([Lie("m/archive_format", b"pt2")]))
    with pytest.raises(untorch.InvalidFileError, match="was never compiled"):
        untorch.load(path)


@pytest.mark.of_each_build
@pytest.mark.parametrize(
    ("metadata", "error", "text"),
    [
        (b"{", untorch.InvalidFileError, "is no valid JSON"),
        (b'{"AOTI_DEVICE_KEY": "cuda"}', untorch.UnsupportedError, re.escape(NO_CUDA)),
        (b'{"AOTI_DEVICE_KEY": 1}', untorch.InvalidFileError, "is not a string"),
        (b'{"AOTI_MACHINE": "riscv64"}', untorch.UnsupportedError, "was compiled for riscv64"),
    ],
)
def test_stock_metadata_is_checked(
    metadata: bytes, error: type[Exception], text: str, package: Package, tmp_path: pathlib.Path
) -> None:
    folder = "m/data/aotinductor/model"
    path = tmp_path / "model.pt2"
    path.write_bytes(
        zip_bytes([Lie(f"{folder}/a.wrapper.so", package.library), Lie(f"{folder}/a.wrapper_metadata.json", metadata)])
    )
    with pytest.raises(error, match=text):
        untorch.load(path)


def test_pickled_weights_of_a_stock_package_are_explained(package: Package, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(
        zip_bytes(
            [
                Lie("m/data/aotinductor/model/a.wrapper.so", package.library),
                Lie("m/data/aotinductor/model/model_weights_config.json", b"{}"),
            ]
        )
    )
    with pytest.raises(untorch.UnsupportedError, match="keeps its weights as pickles, which only PyTorch can read"):
        untorch.load(path)


def constant(manifest: Any, name: str) -> Any:
    """A constant's entry."""
    return next(c for c in manifest["methods"]["forward"]["constants"] if c["name"] == name)


def test_a_mutated_constant_cannot_be_denied(real_package: RealPackage, prober: Prober) -> None:
    """The library would write into memory that is mapped read-only."""
    manifest = real_package.manifest
    entry = constant(manifest, "count")
    entry["mutated"] = False
    del entry["state"]
    answer = prober.open(real_package.with_manifest(manifest).bytes())
    assert answer.startswith("InvalidFileError: ")
    assert answer.endswith(": method 'forward' changes 'count', which the manifest denies")


def test_a_constant_that_is_cut_short_is_refused(real_package: RealPackage, prober: Prober) -> None:
    manifest = real_package.manifest
    entry = constant(manifest, "table")
    weight = manifest["weights"][entry["weight"]]
    entry["shape"], entry["strides"], weight["nbytes"] = [1, 8], [8, 1], 32
    files = {**real_package.files, weight["file"]: real_package.files[weight["file"]][:32]}
    answer = prober.open(RealPackage(files).with_manifest(manifest).bytes())
    assert answer.startswith("InvalidFileError: ")
    assert answer.endswith(
        ": method 'forward' was compiled for the weight 'table' with shape [8, 8] and strides [8, 1], the manifest has "
        "[1, 8] and [8, 1]"
    )


@pytest.mark.parametrize(("key", "value"), [("shape", [2]), ("dtype", "int32"), ("contiguous", False)])
def test_inputs_are_those_that_the_library_was_compiled_for(
    key: str, value: Any, real_package: RealPackage, prober: Prober
) -> None:
    manifest = real_package.manifest
    manifest["methods"]["forward"]["inputs"][0][key] = value
    answer = prober.open(real_package.with_manifest(manifest).bytes())
    assert answer.startswith("InvalidFileError: ")
    assert answer.endswith(": method 'forward' was compiled for other inputs than the manifest says")


def test_a_constant_of_the_library_is_in_the_manifest(real_package: RealPackage, prober: Prober) -> None:
    manifest = real_package.manifest
    manifest["methods"]["forward"]["constants"].remove(constant(manifest, "table"))
    answer = prober.open(real_package.with_manifest(manifest).bytes())
    assert answer.endswith(": method 'forward' needs the weight 'table', which the manifest does not have")


@pytest.mark.parametrize(
    ("declaration", "text"),
    [
        ("char untorch_interface[0]", "its interface table is empty"),
        ('char untorch_interface[] = "{"', "expected a member name"),
        ('char untorch_interface[] = "{}"', 'has no "inputs"'),
    ],
)
def test_a_damaged_interface_table(
    declaration: str, text: str, tmp_path: pathlib.Path, package: Package, prober: Prober
) -> None:
    library = model_library(tmp_path, "-DDECLARE=const " + declaration + ";")
    answer = prober.open(Package(library, package.manifest).bytes())
    assert answer.startswith("InvalidFileError: ")
    assert text in answer


def test_flipped_bytes_of_a_real_manifest(real_package: RealPackage, prober: Prober) -> None:
    text = real_package.files["extra/untorch.json"]
    rng = random.Random(25)
    digits = [at for at, c in enumerate(text) if chr(c).isdigit()]
    cases = []
    for _ in range(300):
        at = rng.choice(digits)
        flipped = text[:at] + str(rng.randrange(10)).encode() + text[at + 1 :]
        cases.append(
            (
                f"{flipped[max(at - 40, 0) : at + 9]!r}",
                RealPackage({**real_package.files, "extra/untorch.json": flipped}).bytes(),
            )
        )
    assert prober.refused(cases, allow_ok=True) == []
