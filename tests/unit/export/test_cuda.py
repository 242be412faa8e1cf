"""Tests of what export(device="cuda") does before a GPU is needed; tests/gpu has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

from untorch.export import CompileError, export, toolkit
from untorch.export.compile import _check_device
from untorch.export.coverage import find_missing
from untorch.export.method import Method
from untorch.export.move import Mover, Movers
from untorch.export.mutations import Mutations
from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.signature import describe_inputs, describe_outputs
from untorch.export.target import CpuTarget, CudaTarget, Target, resolve_targets
from untorch.export.toolkit import cuda_home
from untorch.export.weights import Constant, WeightStore
from untorch.runtime import registry
from untorch.runtime.coverage import needed_functions
from untorch.runtime.elf import ElfFile, Symbol
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError
from untorch.runtime.registry import register_kernel


def resolve_device(device: str) -> Target:
    [target] = resolve_targets(device)
    return target


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "", None, 0, torch.device("cuda")])
def test_an_unknown_device(device: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="device: expected 'cpu', 'cuda' or 'cuda:<index>', got"):
        export(nn.Linear(2, 2), (torch.ones(1, 2),), tmp_path / "model.pt2", device=device, progress=False)
    assert not list(tmp_path.iterdir())


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match="device='cuda' needs PyTorch with CUDA, and .* was built without it"):
        resolve_device("cuda")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="device='cuda:1' needs a GPU on the build machine"):
        resolve_device("cuda:1")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "libcuda.so.1"
    driver.touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(toolkit, "driver_library", lambda: driver)
    monkeypatch.setattr(toolkit, "cuda_home", lambda: tmp_path)


def test_the_gpu_that_compiles(two_gpus: None) -> None:
    assert isinstance(resolve_device("cpu"), CpuTarget)
    target = resolve_device("cuda")
    assert isinstance(target, CudaTarget) and (target.tensor_home, target.architecture) == ("cuda:1", "sm_91")
    target = resolve_device("cuda:0")
    assert isinstance(target, CudaTarget) and (target.tensor_home, target.architecture) == ("cuda:0", "sm_90")
    assert (target.device, target.tensor_device) == ("cuda", "cuda")
    with pytest.raises(InvalidArgumentError, match="device='cuda:2': this machine has 2 GPUs, the last is cuda:1"):
        resolve_device("cuda:2")


def _toolkit(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime.h").touch()
    (folder / "bin" / "nvcc").touch(mode=0o755)
    return folder


def test_no_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolkit, "_HEADER", Path("include") / "no_such_header.h")
    with pytest.raises(
        UnsupportedError, match="needs the toolkit's headers, and no include/no_such_header.h was found"
    ):
        cuda_home()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_module_is_copied_and_stays_where_it_is() -> None:
    module = Tied()
    mover = Mover("meta")  # a device that every machine has
    moved = mover.module("forward", module)
    assert isinstance(moved, Tied) and moved is not module
    assert {t.device.type for t in (*moved.parameters(), *moved.buffers())} == {"meta"}
    assert {t.device.type for t in (*module.parameters(), *module.buffers())} == {"cpu"}
    assert moved.second.weight is moved.first.weight
    assert isinstance(moved.first.weight, nn.Parameter)
    assert mover.module("other", module.first).weight is moved.first.weight  # shared by the methods of one file
    assert mover.module("again", moved) is moved
    assert mover.module("another method", module) is moved


def test_a_module_that_cannot_be_copied() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: object) -> object:
            raise TypeError("cannot pickle '_thread.lock' object")

    with pytest.raises(CompileError, match=r"a copy of the model for meta cannot be made \(cannot pickle .*move it"):
        Mover("meta").module("forward", Locked(2, 2))


def test_inputs_keep_their_strides() -> None:
    base = torch.arange(24.0)
    x = base.as_strided((3, 2), (1, 3), 4)
    wide = base.view(4, 6)[:, :3]
    same = torch.ones(3).expand(2, 3)
    mover = Mover("meta")
    moved = mover.tree(({"x": x}, [wide, same, 7, None], torch.empty(0, 3)))
    assert moved[0]["x"].stride() == (1, 3) and moved[1][0].stride() == (6, 1) and moved[1][1].stride() == (0, 1)
    assert moved[1][2:] == [7, None] and moved[2].shape == (0, 3)
    assert all(t.device.type == "meta" for t in (moved[0]["x"], *moved[1][:2], moved[2]))


def test_a_method_that_lies_there_is_taken_as_it_is() -> None:
    gpu = CudaTarget("sm_90", "meta")
    method = Method("forward", nn.Linear(2, 2, device="meta"), (torch.ones(1, 2),), target=gpu)
    assert Movers().move(method) is method
    method = Method("forward", nn.ReLU(), (torch.ones(1, 2),), {"y": torch.ones(1)}, target=gpu)
    moved = Movers().move(method)
    assert moved.args is not None and moved.args[0].device.type == "meta"
    assert moved.kwargs is not None and moved.kwargs["y"].device.type == "meta"


def test_an_exported_program_is_moved() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.shift + torch.arange(4, device=x.device)

    program = torch.export.export(Model(), (torch.ones(2, 4).t().contiguous().t(),))
    mover = Mover("meta")
    moved = mover.program("forward", program)
    assert {t.device.type for t in moved.state_dict.values()} == {"meta"}
    assert {t.device.type for t in program.state_dict.values()} == {"cpu"}
    assert moved.example_inputs is not None and moved.example_inputs[0][0].device.type == "meta"
    assert moved.example_inputs[0][0].stride() == (1, 2)
    [arange] = [n for n in moved.graph.nodes if "arange" in n.name]
    assert str(arange.kwargs["device"]) == "meta"
    [arange] = [n for n in program.graph.nodes if "arange" in n.name]
    assert str(arange.kwargs["device"]) == "cpu"
    assert mover.program("forward", moved) is moved


def test_tensors_that_lie_elsewhere_say_so() -> None:
    program = torch.export.export(nn.ReLU(), (torch.ones(2),))
    none = Mutations(frozenset(), frozenset())
    assert describe_inputs(program, None, none, "cuda")[0]["device"] == "cpu"
    assert "device" not in describe_inputs(program, None, none)[0]
    [output] = describe_outputs(program, "cuda")
    assert output is not None and output["device"] == "cpu"
    store = WeightStore()
    constants = [Constant("x", "x", (2,), (1,))]
    [entry], _ = store.add_method(constants, {"x": torch.ones(2)}, frozenset(), "cuda")
    assert entry["device"] == "cpu"
    [entry], _ = store.add_method(constants, {"x": torch.ones(2)}, frozenset())
    assert "device" not in entry


def test_packed_linears_are_for_the_cpu() -> None:
    module = torch.export.export(nn.Linear(64, 64), (torch.ones(2, 64),)).module()
    assert isinstance(module, torch.fx.GraphModule)
    report = run_passes(module, ExportOptions(), "cuda")[-1]
    assert (report.name, report.not_run) == ("pack_linears", "it is for cpu, and the method is for cuda")


def test_functions_of_the_driver_are_not_the_runtimes() -> None:
    names = ["cuLaunchKernel", "cudaMalloc", "aoti_torch_cuda_mm_out", "customer"]
    symbols = tuple(Symbol(name, False, False) for name in names)
    library = ElfFile("x86_64", None, ("libcuda.so.1", "libuntorch.so"), symbols)
    assert needed_functions(library) == ["aoti_torch_cuda_mm_out", "cudaMalloc", "customer"]
    assert "cuLaunchKernel" in needed_functions(ElfFile("x86_64", None, ("libuntorch.so",), symbols))


def test_a_model_that_touches_no_gpu(tmp_path: Path) -> None:
    metadata = tmp_path / "x_metadata.json"
    metadata.write_text('{"AOTI_DEVICE_KEY": "cpu"}')
    _check_device("forward", metadata, "cpu")
    _check_device("forward", None, "cuda")
    with pytest.raises(CompileError, match="compiled it for 'cpu': the model has no tensor on cuda"):
        _check_device("forward", metadata, "cuda")


def test_the_driver_is_found_beside_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "/libcuda.so" in Path("/proc/self/maps").read_text():
        pytest.skip("this process has the driver open")
    folder = _toolkit(tmp_path / "cuda")
    monkeypatch.setattr(toolkit, "cuda_home", lambda: folder)
    with pytest.raises(UnsupportedError, match="neither the driver nor a stub was found"):
        toolkit.driver_library()
    (folder / "lib64" / "stubs").mkdir(parents=True)
    (folder / "lib64" / "stubs" / "libcuda.so").touch()
    assert toolkit.driver_library() == folder / "lib64" / "stubs" / "libcuda.so"


def test_kernels_serve_models_for_the_device_that_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    nodes = '{"nodes": [{"name": "x", "node": {"target": "aten::linalg_qr"}}]}'
    none: frozenset[str] = frozenset()
    assert find_missing([], nodes, none) == []
    [missing] = find_missing([], nodes, none, device="cuda")
    assert str(missing) == (
        "operator aten::linalg_qr: it has no C shim and no kernel for CUDA; register one that works on arrays on the "
        'GPU with untorch.register_kernel("aten::linalg_qr", fn, device="cuda"), change the model, or export it for '
        "the CPU"
    )
    register_kernel("aten::linalg_qr", lambda A, mode: None, device="cuda")
    assert find_missing([], nodes, none, device="cuda") == []
    monkeypatch.setattr(registry, "native_operators", lambda device: ["aten::made_up"] if device == "cuda" else [])
    nodes = '{"nodes": [{"name": "x", "node": {"target": "aten::made_up"}}]}'
    assert find_missing([], nodes, none, device="cuda") == []
    assert len(find_missing([], nodes, none)) == 1
