"""Loads files for CUDA and calls them up to the kernel launches, with a fake driver: fake_driver.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.native.cuda.fake_gpu import found
from untorch.archive import MANIFEST, ArchiveReader
from untorch.export import export

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

# [n, k] of the package's layers, padded.
VALUES = {"int4": 896 * 512 + 256 * 896, "nvfp4": 896 * 512 + 256 * 896}


def weights_of(path: Path, method: str) -> int:
    """The bytes that a method's constants take, each entry of the file once."""
    with ArchiveReader(path) as archive:
        manifest = json.loads(archive.read(MANIFEST))
    used = {constant["weight"] for constant in manifest["methods"][method]["constants"]}
    return sum(manifest["weights"][index]["nbytes"] for index in used)


def test_weights_are_there_once_and_go_with_the_last_program(driver: Path, package: Path) -> None:
    script = """
first, second = untorch.load(path), untorch.load(path, device="cuda:0")
found["closed"] = fake.fake_live_bytes(0)
first.int4.open()
found["one"] = fake.fake_live_bytes(0)
second.int4.open()
found["two"] = fake.fake_live_bytes(0)
other = untorch.load(path, device="cuda:1")
other.nvfp4.open()
found["other"] = fake.fake_live_bytes(0), fake.fake_live_bytes(1)
found["devices"] = first.device, other.device
first.close()
found["left"] = fake.fake_live_bytes(0)
second.close()
other.close()
found["gone"] = fake.fake_live_bytes(0), fake.fake_live_bytes(1)
"""
    result = found(driver, package, script)
    weights = weights_of(package, "int4")
    assert result["closed"] == 0
    assert result["one"] == result["two"] == result["left"] == weights
    assert result["other"] == [weights, weights_of(package, "nvfp4")]
    assert result["devices"] == ["cuda:0", "cuda:1"]
    assert result["gone"] == [0, 0]


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += x
        return self.calls * 2


def test_kernels_are_loaded_once_for_all_sessions(driver: Path, tmp_path: Path) -> None:
    """Loading waits for kernels that run: a new session's first call would wait for the calls of the others."""
    path = tmp_path / "counter.pt2"
    export(Counter(), (torch.ones(4),), path, device="cuda", arch="sm_90", progress=False)
    script = """
x = np.ones(4, np.float32)
program = untorch.load(path)
sessions = [program.session() for _ in range(3)]
found["loaded"] = []
for session in sessions:
    session.forward(x)
    found["loaded"].append(fake.fake_modules_loaded())
    session.fork().forward(x)
found["after"] = fake.fake_modules_loaded()
for session in sessions:
    session.close()
found["unloaded"] = [fake.fake_modules_unloaded()]
other = untorch.load(path, device="cuda:1")
other.forward(x)
found["elsewhere"] = fake.fake_modules_loaded()
del session, sessions
other.close()
program.close()
found["unloaded"].append(fake.fake_modules_unloaded())
"""
    result = found(driver, path, script)
    first = result["loaded"][0]
    assert first > 0
    assert result["loaded"] == [first] * 3 and result["after"] == first
    assert result["elsewhere"] == 2 * first
    assert result["unloaded"] == [0, 2 * first]


def test_what_arrives(driver: Path, tmp_path: Path) -> None:
    """Weights of more than 64 MiB go up by several threads, some buffers each, and every byte is in its place."""
    path = tmp_path / "large.pt2"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20_011, 1024), nn.Linear(1024, 2048))
    export(model, (torch.tensor([1, 2]),), path, device="cuda", arch="sm_90", progress=False)
    script = """
import hashlib
with untorch.load(path) as program:
    program.forward.open()
    blocks, data = [], ctypes.c_void_p()
    while size := fake.fake_block(0, len(blocks), ctypes.byref(data)):
        block = (ctypes.c_ubyte * size).from_address(data.value)
        parts = range(0, size, 4 << 20) if size > 4 << 20 else range(1)
        blocks.append("".join(hashlib.sha256(bytes(block)[i:][:4 << 20]).hexdigest() for i in parts))
    found["blocks"] = blocks
    digests = program.manifest["digests"]
    weights = [weight["file"] for weight in program.manifest["weights"]]
    found["weights"] = [digests["blocks"].get(file) or digests["entries"][file] for file in weights]
"""
    result = found(driver, path, script)
    assert len(result["weights"]) == 3
    assert sorted(result["blocks"]) == sorted(result["weights"])


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_dequantized_weights(kind: str, driver: Path, package: Path) -> None:
    """A matrix a layer, once for the programs of the file, as long as one is open that asked for it."""
    script = f"""
packed = untorch.load(path)
packed[{kind!r}].open()
found["without"] = dequantizing(), packed.memory()["dequantized"]
first, second = untorch.load(path, dequantize_weights=True), untorch.load(path, dequantize_weights=True)
first[{kind!r}].open()
found["first"] = dequantizing(), first.memory()["dequantized"], fake.fake_live_bytes(0)
second[{kind!r}].open()
session = second.session()
session[{kind!r}].open()
found["second"] = dequantizing(), second.memory()["dequantized"], fake.fake_live_bytes(0)
first.close()
found["left"] = packed.memory()["dequantized"]
session.close()
second.close()
found["gone"] = packed.memory()["dequantized"], fake.fake_live_bytes(0)
"""
    result = found(driver, package, script)
    weights, dequantized = weights_of(package, kind), 2 * VALUES[kind]
    assert result["without"] == [0, 0]
    assert result["first"] == result["second"] == [2, dequantized, weights + dequantized]
    assert result["left"] == dequantized
    assert result["gone"] == [0, weights]


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_what_multiplies(kind: str, driver: Path, package: Path) -> None:
    """W4A16 kernels serve a small M, and a larger one where no dequantized copy lies beside the weight; a large M goes to
    cuBLAS, which finds no GPU here: with the copy, or dequantized in chunks.
    """
    script = f"""
def called(program, rows):
    method = program[{kind!r}]
    method.open()  # which may dequantize
    before = len(fake.fake_launches())
    end = ""
    try:
        method(np.zeros((rows, 500), np.float16))
    except untorch.UntorchError as error:
        end = "cuBLAS" if "cublas" in str(error).lower() else str(error)
    names = fake.fake_launches()[before:].decode().split()
    return *(sum(part in name for name in names) for part in ("gemv", "gemm_sm90", "dequantize")), end
packed, dequantized = untorch.load(path), untorch.load(path, dequantize_weights=True)
for rows in (1, 8, 100, 300):
    found[str(rows)] = called(packed, rows), called(dequantized, rows)
"""
    result = found(driver, package, script)
    few, whole = [2, 0, 0, ""], [0, 0, 0, "cuBLAS"]
    assert result == {
        "1": [few, few],
        "8": [few, few],
        "100": [[0, 2, 0, ""], whole],
        "300": [[0, 0, 1, "cuBLAS"], whole],
    }


def test_memory_that_does_not_suffice(driver: Path, package: Path) -> None:
    """Packed weights fit, matrices do not: an error that says what was asked for, and nothing is left behind."""
    weights = weights_of(package, "int4")
    script = """
with untorch.load(path, dequantize_weights=True) as program:
    try:
        program.int4.open()
    except untorch.OutOfMemoryError as error:
        found["error"] = str(error)
    found["left"] = fake.fake_live_bytes(0)
with untorch.load(path) as program:
    program.int4.open()
    found["packed"] = fake.fake_live_bytes(0)
"""
    result = found(driver, package, script, MEMORY=weights + VALUES["int4"])
    assert "1.0 MiB" in result["error"] and "free" in result["error"]
    assert result["left"] == 0
    assert result["packed"] == weights


def test_a_gpu_whose_queues_are_taken(driver: Path, package: Path) -> None:
    script = """
try:
    untorch.load(path).int4
except untorch.OutOfMemoryError as error:
    found["error"] = str(error)
"""
    error = found(driver, package, script, TAKEN=1)["error"]
    assert "creating the device's context: CUDA_ERROR_OUT_OF_MEMORY" in error
    assert "set CUDA_DEVICE_MAX_CONNECTIONS to a smaller number for them, or run fewer" in error


def test_the_code_for_the_gpu(driver: Path, tmp_path: Path) -> None:
    """Of a file for two architectures the newest that the GPU runs; none of them is an error that names all."""
    path = tmp_path / "two.pt2"
    model = nn.Sequential(nn.LayerNorm(64), nn.ReLU())
    export(model, (torch.randn(4, 64),), path, device="cuda", arch=["sm_80", "sm_90"], progress=False)
    script = """
try:
    with untorch.load(path) as program:
        found["taken"] = program.forward.gpu_architecture
except untorch.UnsupportedError as error:
    found["error"] = str(error)
"""
    for capability, taken in ((80, "sm_80"), (86, "sm_80"), (90, "sm_90")):
        assert found(driver, path, script, CAPABILITY=capability) == {"taken": taken}
    for capability in (75, 100):
        error = found(driver, path, script, CAPABILITY=capability)["error"]
        assert f"was compiled for sm_80, sm_90, cuda:0 (Fake H200) is sm_{capability}: export it for that" in error
