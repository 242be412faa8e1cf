"""sort, topk, kthvalue, mode and median against eager PyTorch: values, positions, NaN, ties, strides."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shim import ShimError, call, library_path

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Few distinct values, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.sampled_from(DTYPES), st.booleans(), st.data())
def test_sort_is_stable_and_keeps_strides(
    shape: list[int], dtype: torch.dtype, descending: bool, data: st.DataObject
) -> None:
    x = sample(tuple(shape), dtype, len(shape))
    if len(shape) > 1 and data.draw(st.booleans()):
        x = x.transpose(0, -1)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    values, indices = call("aoti_torch_cpu_sort", x, dim, descending, returns=2)
    expected = torch.sort(x, dim=dim, descending=descending, stable=True)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)
    if x.numel():
        assert values.stride() == expected.values.stride()


def test_sort_puts_nan_last_and_takes_scalars() -> None:
    x = torch.tensor([1.0, float("nan"), -1.0, float("inf"), float("nan")])
    for descending in (False, True):
        values, indices = call("aoti_torch_cpu_sort_stable", x, None, 0, descending, returns=2)
        expected = torch.sort(x, stable=True, descending=descending)
        assert torch.equal(indices, expected.indices)
        assert torch.allclose(values, expected.values, equal_nan=True)
    values, indices = call("aoti_torch_cpu_sort", torch.tensor(3.0), -1, False, returns=2)
    assert values.item() == 3.0 and indices.item() == 0


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("n", "k"), [(7, 3), (1000, 4), (50, 50), (5, 0)])
def test_topk(n: int, k: int, largest: bool) -> None:
    x = torch.randn(3, n, 2, generator=torch.Generator().manual_seed(0))
    x[0, n // 2, 0] = float("nan")
    values, indices = call("aoti_torch_cpu_topk", x, k, 1, largest, True, returns=2)
    expected = torch.topk(x, k, 1, largest)
    assert torch.allclose(values, expected.values, equal_nan=True)
    assert torch.allclose(x.gather(1, indices), values, equal_nan=True)
    assert values.stride() == expected.values.stride()


def test_topk_refuses_a_k_out_of_range() -> None:
    with pytest.raises(ShimError, match=r"topk: k is 6, expected 0 to 5 \(the size of dimension 0\)"):
        call("aoti_torch_cpu_topk", torch.zeros(5), 6, 0, True, True, returns=2)
    with pytest.raises(ShimError, match="sort: dimension 2 is out of range for a 2-D tensor"):
        call("aoti_torch_cpu_sort", torch.zeros(2, 2), 2, False, returns=2)


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_kthvalue_and_mode(dtype: torch.dtype, keepdim: bool) -> None:
    x = sample((4, 9, 3), dtype, 1).transpose(0, 2)
    values, indices = call("aoti_torch_cpu_kthvalue", x, 4, 1, keepdim, returns=2)
    assert torch.equal(values, torch.kthvalue(x, 4, 1, keepdim).values)
    index = indices if keepdim else indices.unsqueeze(1)
    assert torch.equal(x.gather(1, index), values if keepdim else values.unsqueeze(1))
    values, indices = call("aoti_torch_cpu_mode", x, 1, keepdim, returns=2)
    expected = torch.mode(x, 1, keepdim)
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)


def test_kthvalue_refuses_zero() -> None:
    with pytest.raises(ShimError, match="kthvalue: k is 0, expected 1 to 3"):
        call("aoti_torch_cpu_kthvalue", torch.zeros(3), 0, 0, False, returns=2)
    with pytest.raises(ShimError, match=r"mode: dimension 1 of shape \[2, 0\] is empty"):
        call("aoti_torch_cpu_mode", torch.zeros(2, 0), 1, False, returns=2)


def test_median() -> None:
    nan = float("nan")
    for x in (torch.tensor([[3.0, 1.0], [2.0, 4.0]]).t(), torch.tensor([1.0, nan, 3.0]), torch.tensor([nan, nan]),
              torch.tensor([5, 2, 9, 1]), torch.empty(0)):  # fmt: skip
        for name, op in (("median", torch.median), ("nanmedian", torch.nanmedian)):
            got = call(f"aoti_torch_cpu_{name}", x, returns=1)
            torch.testing.assert_close(got, op(x), equal_nan=True)


OUT_OF_MEMORY = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from shim import ShimError, call
x = torch.rand(2, 4_000_000)
call("aoti_torch_cpu_topk", torch.rand(64, 4096), 1, -1, True, True, returns=2)  # the threads are there before the limit
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 20), resource.RLIM_INFINITY))
try:
    call("aoti_torch_cpu_topk", x, 1, -1, True, True, returns=2)
except ShimError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(torch.equal(call("aoti_torch_cpu_topk", x, 1, -1, True, True, returns=2)[0], x.topk(1).values))
"""


@pytest.mark.slow
@pytest.mark.unsanitized
def test_a_thread_that_runs_out_of_memory_fails_the_call_and_not_the_process() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "2", "UNTORCH_LIBRARY": library_path()}
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, str(pathlib.Path(__file__).parent)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "topk: out of memory\nTrue\n"), done.stderr
