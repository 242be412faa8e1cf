"""Small inputs of a CUDA graph that come from the CPU are one copy, with a fake driver: fake_driver.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.native.cuda.fake_gpu import found
from untorch.export import export

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

SCRIPT = """
def arrays(seed):
    rng = np.random.default_rng(seed)
    return [
        rng.random((4, 6), np.float32), rng.integers(0, 99, (5,)), np.array([True, False, True]),
        rng.random((200, 100), np.float32), np.float32(rng.random()),
    ]
def equal(results, given):
    # With an array on the GPU, results are tensors.
    results = [result if isinstance(result, np.ndarray) else result.numpy() for result in results]
    return [bool(np.array_equal(result, value)) for result, value in zip(results, given)]
program = untorch.load(path)
first, second, third = arrays(0), arrays(1), arrays(2)
graph = program.forward.graph(*first)
def uploads(given):
    before = fake.fake_uploads()
    results = graph(*given)
    return fake.fake_uploads() - before, equal(results, third)
found["alone"] = [uploads(given)[0] for given in (first, second)]
found["all"] = uploads(third)
# One of the packed ones from the GPU, in the middle of the others.
on_gpu = list(third)
on_gpu[1] = untorch.empty((5,), "int64", "cuda")
found["mixed"] = uploads(on_gpu)[0]
"""


class Same(nn.Module):
    def forward(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return xs


def test_one_copy_for_the_small_ones(driver: Path, tmp_path: Path) -> None:
    path = tmp_path / "same.pt2"
    example = (
        torch.rand(4, 6), torch.arange(5), torch.tensor([True, False, True]), torch.rand(200, 100), torch.tensor(1.0),
    )  # fmt: skip
    export(Same(), example, path, device="cuda", arch="sm_90", progress=False)
    result = found(driver, path, SCRIPT, GRAPHS=1)
    # The small ones together, and the one of 80,000 bytes.
    assert result["alone"] == [2, 2]
    assert result["all"] == [2, [True] * 5]
    assert result["mixed"] == 2
