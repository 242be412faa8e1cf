"""Errors that destroy a GPU's context: one exception class, kept for the device, and everything else goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.native.cuda.fake_gpu import found

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(100, 64), nn.Linear(64, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).relu()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton")
    from untorch.export import export

    path = tmp_path_factory.mktemp("words") / "words.pt2"
    export(Words().eval(), (torch.randint(0, 100, (4, 16)),), path, device="cuda", arch="sm_90", progress=False)
    return path


CALL = """
ids = np.zeros((4, 16), np.int64)
program = untorch.load(path)
program(ids)
other = untorch.load(path, device="cuda:1")
fake.fake_fail({code})
texts = []
for _ in range(2):
    try:
        program(ids)
    except untorch.DeviceLostError as error:
        texts.append(str(error))
fake.fake_fail(0)
try:
    program(ids)
except untorch.DeviceLostError as error:
    texts.append(str(error))
found["texts"] = texts
found["other"] = other(ids).shape
program.close()
other.close()
"""


def test_an_assertion_names_the_kernels_that_check_values(driver: Path, words: Path) -> None:
    result = found(driver, words, CALL.format(code=710))
    first = result["texts"][0]
    assert len(result["texts"]) == 3 and set(result["texts"]) == {first}  # kept, also when the driver recovers
    assert first.startswith("cuda:0 is lost to this process: CUDA")
    assert "an input holds a value, such as an index, that is out of range" in first
    assert (
        "method 'forward' checks values in triton_poi_fused_embedding_0 (index out of bounds: 0 <= tmp0 < 100)" in first
    )
    assert first.endswith("every later use of the device fails: start the process anew")
    assert result["other"] == [4, 16, 8]


@pytest.mark.parametrize("code", [700, 702, 719])
def test_other_fatal_errors(driver: Path, words: Path, code: int) -> None:
    result = found(driver, words, CALL.format(code=code))
    assert len(set(result["texts"])) == 1 and len(result["texts"]) == 3
    assert "is lost to this process" in result["texts"][0]
    assert "out of range" not in result["texts"][0]


def test_an_error_that_passes_is_no_lost_device(driver: Path, words: Path) -> None:
    script = """
ids = np.zeros((4, 16), np.int64)
program = untorch.load(path)
program(ids)
fake.fake_fail(1)
try:
    program(ids)
except untorch.DeviceLostError:
    found["lost"] = True
except untorch.UntorchError as error:
    found["text"] = str(error)
fake.fake_fail(0)
found["shape"] = program(ids).shape
"""
    result = found(driver, words, script)
    assert "lost" not in result and "text" in result
    assert result["shape"] == [4, 16, 8]


def test_what_destructors_free_is_gone_with_the_context(driver: Path, words: Path) -> None:
    """Model libraries of PyTorch's end the process when cudaFree fails."""
    script = """
program = untorch.load(path)
program(np.zeros((4, 16), np.int64))
runtime = ctypes.CDLL(untorch._core.__file__)
memory = ctypes.c_void_p()
found["codes"] = [runtime.utdaMalloc(ctypes.byref(memory), 64)]
for code in (1, 710):
    fake.fake_fail(code)
    found["codes"] += [runtime.utdaFree(memory), runtime.utdaEventDestroy(None), runtime.utdaStreamDestroy(None)]
program.close()
"""
    assert found(driver, words, script)["codes"] == [0, 1, 1, 1, 0, 0, 0]
