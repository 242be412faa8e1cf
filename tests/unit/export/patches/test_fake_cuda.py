"""The fake CUDA driver's patches; test_cross_compile.py has what is compiled with them."""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import graph
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.fx_passes import joint_graph
from torch._subclasses import fake_tensor

from untorch.export import check, export
from untorch.export.gpus import find_gpu
from untorch.export.patches.fake_cuda import (
    _one_parser,
    autotune_block,
    contiguous,
    convolution_layout,
    copy,
    fake_cuda,
    fake_tensor_device,
    indexing,
    same_tensor,
    uniform_values,
)
from untorch.export.patches.indexing import read_index, write_index

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers here")
H100 = find_gpu("H100")


class Masked(nn.Module):
    """Where everything is kept, by a mask that is one value everywhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.full((), True, device=x.device).expand(x.shape[0], 1).logical_not().to(x.dtype)
        return torch.where(mask == 0, x * 2, mask)


@pytest.mark.slow
def test_values_that_are_known_beforehand(tmp_path: Path) -> None:
    """What torch works out while it compiles must not need the GPU."""
    report = export(Masked(), (torch.ones(4, 8),), tmp_path / "a.pt2", device="cuda", arch="sm_90", progress=False)
    assert not {"aoti_torch_cuda_full", "aoti_torch_cuda_where"} & set(report.methods["forward"].operators)


class Parts(nn.Module):
    """Puts values into parts of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape)
        y[:, :4] = x[:, 4:]
        y[:, 4:] = x[:, :4] * 2
        return y


@pytest.mark.slow
def test_values_in_parts_of_a_tensor(tmp_path: Path) -> None:
    export(Parts(), (torch.ones(4, 8),), tmp_path / "a.pt2", device="cuda", arch="sm_90", progress=False)


def test_copies_that_are_contiguous() -> None:
    own = torch.Tensor.contiguous
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    with contiguous():
        assert torch.Tensor.contiguous is not own
        turned = image.mT.contiguous()
        last = image.contiguous(memory_format=torch.channels_last)
        assert image.contiguous() is image
    assert torch.Tensor.contiguous is own
    assert turned.is_contiguous()
    assert torch.equal(turned, image.mT)
    assert last.stride() == (24, 1, 8, 2)
    assert torch.equal(last, image)


class Indexed(nn.Module):
    """Decompositions that index, and a mask."""

    def forward(self, x: torch.Tensor, grid: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
        modes = ("bilinear", "nearest", "bicubic")
        sampled = [F.grid_sample(x, grid, mode=mode, align_corners=False, padding_mode="border") for mode in modes]
        columns = F.unfold(x, 3, padding=1)
        return (*sampled, columns, F.fold(columns, x.shape[-2:], 3, padding=1), x[kept].sum(0))


@pytest.mark.slow
def test_decompositions_that_index() -> None:
    example = (torch.randn(2, 3, 8, 8), torch.rand(2, 5, 5, 2) * 2 - 1, torch.tensor([True, False]))
    found = check(torch.export.export(Indexed(), example), "cuda", "sm_90")
    assert all(item.served for item in found)


ROW, ITEMS = torch.tensor([2, 0]), torch.arange(60).reshape(3, 4, 5)
INDICES: list[Any] = [
    0, -1, (), None, ..., slice(1, None), slice(None, None, 2), (..., 0), (0, ...), (1, 2, 3), ROW, [0, 2],
    (slice(None), None, slice(-2, None)), (slice(None), ROW), (ROW, ROW), (ROW, slice(None), ROW), (0, ROW), (..., ROW),
    (None, ROW, slice(1, 3)), ([0, 2], [1, 1]), (ROW[:, None], ROW), torch.tensor(1), (slice(None), torch.tensor(1)),
    ITEMS[:, 0, 0] > 5, ITEMS[..., 0] % 3 == 0, (ITEMS[..., 0] % 3 == 0, slice(1, 3)), ITEMS % 7 == 0,
    (slice(None), ITEMS[0, :, 0] > 5), (..., ITEMS[0] % 2 == 0),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_by_operators_is_indexing(index: Any) -> None:
    found = read_index(ITEMS, index)
    assert torch.equal(found, ITEMS[index])
    for value in (7, torch.tensor([[[7]]]), torch.arange(found.numel()).reshape(found.shape)):
        one, other = ITEMS.clone(), ITEMS.clone()
        one[index] = value if found.dim() or not isinstance(value, torch.Tensor) else value.reshape(())
        write_index(other, index, value)
        assert torch.equal(one, other)


def test_everything_is_put_back() -> None:
    pytest.importorskip("triton")
    import triton.backends
    import triton.runtime

    def state() -> list[Any]:
        return [
            dict(vars(torch.cuda)), dict(vars(CudaInterface)), dict(vars(CudaInterface.Worker)),
            dict(vars(fake_tensor.FakeTensorMode)), dict(vars(graph)), dict(vars(joint_graph)), torch.version.cuda,
            dict(triton.backends.backends), vars(triton.runtime.driver)["_active"],
            torch._C._select_conv_backend, dict(vars(torch.Tensor)), vars(PythonWrapperCodegen)["generate_and_run_autotune_block"],
        ]  # fmt: skip

    before = state()
    with fake_cuda(H100, {}, lambda kernel: None):
        assert torch.cuda.get_device_properties(0).name == "NVIDIA H100"
        assert CudaInterface.get_compute_capability() == 90
        assert triton.runtime.driver.active.get_current_target().arch == 90
    assert state() == before


@no_gpu
def test_indexing_still_sets_the_current_device() -> None:
    with fake_tensor_device(), fake_tensor.FakeTensorMode():
        x = torch.empty(2, 3, device="cuda:0")
        with pytest.raises(RuntimeError):
            x[..., 0]
        with pytest.raises(RuntimeError):
            x[..., 0] = 1
        with indexing():
            assert x[..., 0].shape == (2,)
            x[..., 0] = 1


@no_gpu
def test_torch_still_asks_the_driver() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.get_device_properties(0)


@no_gpu
def test_inductors_interface_still_asks_the_driver() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        CudaInterface.get_compute_capability(0)


def test_a_fake_tensor_on_a_gpu_still_starts_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not fake_tensor.FakeTensorMode().avoid_device_init
    assert "torch.empty(1, device=device)" in inspect.getsource(fake_tensor.init_gpu_context)


@no_gpu
def test_copy_still_sets_the_current_device() -> None:
    with fake_tensor.FakeTensorMode():
        tensor = torch.empty(2, 3, device="cuda")
        with pytest.raises(RuntimeError):
            tensor.copy_(tensor)
        with copy():
            assert tensor.copy_(tensor) is tensor


@no_gpu
def test_contiguous_still_sets_the_current_device() -> None:
    with fake_tensor.FakeTensorMode():
        tensor = torch.empty(2, 3, device="cuda")
        with pytest.raises(RuntimeError):
            tensor.mT.contiguous()
        with contiguous():
            assert tensor.mT.contiguous().stride() == (2, 1)


def test_torch_still_compares_addresses() -> None:
    """Two tensors with no memory are one to it."""
    with fake_tensor.FakeTensorMode():
        first, second = torch.empty(2, 3, device="cuda"), torch.empty(2, 3, device="cuda")
    compare = vars(graph)["is_same_tensor"]
    assert compare(first, second)
    values = {id(first): torch.zeros(2, 3), id(second): torch.ones(2, 3)}
    with same_tensor(values):
        patched = vars(graph)["is_same_tensor"]
        assert patched(first, first) and not patched(first, second)
    assert vars(graph)["is_same_tensor"] is compare


@no_gpu
def test_torch_still_computes_constants_on_the_gpu() -> None:
    made = torch.fx.Graph()
    full = made.call_function(torch.ops.aten.full.default, ([4], 1.0), {"device": torch.device("cuda")})
    full.meta["val"] = torch.ones(4)
    made.output((full,))
    module = torch.fx.GraphModule(nn.Module(), made)
    with pytest.raises((RuntimeError, NotImplementedError)):
        joint_graph.UniformValueConstantFolder(module).run()
    with uniform_values():
        joint_graph.UniformValueConstantFolder(module).run()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has cuDNN")
def test_a_torch_without_cudnn_still_expects_another_layout() -> None:
    def convolved(batch: int) -> torch.Tensor:  # FakeTensorMode keeps the results of sizes that it has seen
        with fake_tensor.FakeTensorMode():
            x = torch.empty(batch, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
            return nn.functional.conv2d(x, torch.empty(4, 3, 3, 3, device="cuda"))

    assert convolved(37).is_contiguous()
    with convolution_layout():
        assert convolved(38).is_contiguous(memory_format=torch.channels_last)


def test_torch_still_traces_its_patterns_on_the_device() -> None:
    assert "_pad_mm_init(input_device)" in inspect.getsource(joint_graph.lazy_init)


@no_gpu
def test_triton_still_needs_a_driver() -> None:
    runtime = pytest.importorskip("triton.runtime")
    with pytest.raises(RuntimeError, match="active drivers"):
        runtime.driver.active.get_current_target()


def test_kernels_are_compiled_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    compiled: list[tuple[str, str]] = []
    both = threading.Barrier(2, timeout=30)

    class Kernel(CachingAutotuner):
        def __init__(self, name: str) -> None:
            self.name, self.launchers = name, []

        def precompile(self, warm_cache_only: bool = False, **_: Any) -> None:
            if warm_cache_only:
                both.wait()
                compiled.append((self.name, threading.current_thread().name))
            else:
                self.launchers = [f"{self.name} 1", f"{self.name} 2"]

        def save_gpu_kernel(self, stream: int, launcher: Any) -> None:
            compiled.append((self.name, launcher))

    class Definitions:
        def splice(self, text: str) -> None:
            assert "async_compile.wait" in text

        def getvalue(self) -> str:
            return "a, b = make()"

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    wrapper: Any = object.__new__(PythonWrapperCodegen)
    wrapper.kernel_autotune_defs = Definitions()
    monkeypatch.setattr(builtins, "make", lambda: [Kernel("a"), Kernel("b")], raising=False)
    with autotune_block(lambda kernel: kernel.launchers[1]):
        wrapper.generate_and_run_autotune_block()
    assert {name for name, thread in compiled[:2] if thread.startswith("untorch-triton")} == {"a", "b"}
    assert compiled[2:] == [("a", "a 2"), ("b", "b 2")]


@pytest.mark.slow
def test_threads_parse_one_after_the_other() -> None:
    source = inspect.getsource(inspect)
    with _one_parser(), ThreadPoolExecutor(8) as pool:
        trees = list(pool.map(lambda _: ast.parse(source), range(64)))
    assert len({len(tree.body) for tree in trees}) == 1


def test_torch_still_runs_kernels_to_time_them() -> None:
    source = inspect.getsource(PythonWrapperCodegen.generate_and_run_autotune_block)
    assert "self.kernel_autotune_calls.getvalue()" in source and "exec(tuning_code, scope)" in source
