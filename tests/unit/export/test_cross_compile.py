"""Cross-compilation for GPUs; tests/gpu runs such files."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from tests.native.nvfp4_experts import random_experts, random_routing
from untorch.archive import MANIFEST, ArchiveReader, ArchiveWriter
from untorch.export import CompileError, ExportReport, check, export
from untorch.export.coverage import find_missing
from untorch.export.gpus import GpuModel
from untorch.export.library import find_runtime_library
from untorch.export.patches.fake_driver import Convolution
from untorch.export.target.cross_compile import refuse_native_attention
from untorch.export.toolkit import require_triton, stub_driver
from untorch.quant import NVFP4MoE
from untorch.runtime.coverage import needed_functions
from untorch.runtime.elf import parse_elf, read_elf
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own
_CUDA_MACHINE = 190


class Mlp(nn.Module):
    """Has what a compile without a GPU could get wrong: a counter, constants, tied weights, a device by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 128))
        self.layers[3].weight = self.layers[0].weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("two", torch.tensor(2.0))
        self.register_buffer("steps", torch.arange(128.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        numbers = torch.arange(128, device=x.device) + torch.tensor(3)
        return self.layers(x) * self.two + self.steps.to(x.device) + numbers + self.calls


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).view(*x.shape[:2], 4, 32).transpose(1, 2) for p in self.projections)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x).mean((2, 3))
        return torch.sort(y, dim=1)[0], torch.cumsum(y, 1)


def methods() -> dict[str, Any]:
    length = {1: Dim("length", min=1, max=512)}
    return {
        "mlp": (Mlp().eval(), (torch.randn(8, 64),)),
        "attention": {
            "model": Attention().eval().to(torch.bfloat16), "args": (torch.randn(2, 20, 128).to(torch.bfloat16),),
            "dynamic_shapes": (length,),
        },
        "cnn": (Cnn().eval(), (torch.randn(2, 3, 16, 16),)),
    }  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param("sm_80", marks=pytest.mark.exhaustive), "H200"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ExportReport, str]:
    path = tmp_path_factory.mktemp("cross") / "model.pt2"
    report = export(methods=methods(), path=path, device="cuda", arch=request.param, progress=False)
    return report, "sm_90" if request.param == "H200" else request.param


def kernels(library: bytes) -> list[int]:
    """The architecture of every kernel in a library: 90 for sm_90."""
    found, at = [], library.find(b"\x7fELF", 1)
    while at >= 0:
        (machine,), (flags,) = struct.unpack_from("<H", library, at + 18), struct.unpack_from("<I", library, at + 48)
        if machine == _CUDA_MACHINE:
            # The ABI of newer architectures has other flags in the lowest byte.
            found.append(flags >> 8 & 0xFF if library[at + 8] >= 8 else flags & 0xFF)
        at = library.find(b"\x7fELF", at + 1)
    return found


def test_the_kernels_are_in_the_file(exported: tuple[ExportReport, str]) -> None:
    report, architecture = exported
    with ArchiveReader(report.path) as archive:
        manifest = json.loads(archive.read(MANIFEST))
        assert set(manifest["methods"]) == {"mlp", "attention", "cnn"}
        for method in manifest["methods"].values():
            assert (method["device"], method["gpu_architecture"]) == ("cuda", architecture)
            assert re.fullmatch(r"1\d\.\d+", method["ptxas"])
            found = kernels(archive.read(method["library"]))
            assert found and set(found) == {int(architecture[3:])}
            # Inputs and outputs lie where the method does: an entry names another device only.
            assert not [entry for kind in ("inputs", "outputs") for entry in method[kind] if "device" in entry]


def test_every_function_is_there(exported: tuple[ExportReport, str]) -> None:
    available = read_elf(find_runtime_library()).exported()
    with ArchiveReader(exported[0].path) as archive:
        for name in ("mlp", "attention", "cnn"):
            [entry] = [
                e.name for e in archive if e.name.startswith(f"data/aotinductor/{name}/") and e.name[-3:] == ".so"
            ]
            library = parse_elf(archive.read(entry), entry)
            assert "libcuda.so.1" in library.needed
            needed = needed_functions(library)
            assert not find_missing(needed, None, available, device="cuda")
            assert any(n.startswith("aoti_torch_cuda_") for n in needed)


def test_attention_is_not_math(exported: tuple[ExportReport, str]) -> None:
    method = exported[0].methods["attention"]
    [done] = [p for p in method.passes if p.name == "choose_attention"]
    assert done.changed == ["scaled_dot_product_attention: triton: bfloat16, head size 32"]
    assert not [name for name in method.operators if "bmm" in name or "softmax" in name]


def test_the_values(exported: tuple[ExportReport, str]) -> None:
    torch.manual_seed(0)
    model = Mlp()
    with ArchiveReader(exported[0].path) as archive:
        manifest = json.loads(archive.read(MANIFEST))
        constants = {c["fqn"]: c for c in manifest["methods"]["mlp"]["constants"]}
        assert constants["calls"]["mutated"] and not constants["two"]["mutated"]
        assert not any("device" in c for c in constants.values())
        steps = archive.read(manifest["weights"][constants["steps"]["weight"]]["file"])
        assert torch.equal(torch.frombuffer(bytearray(steps), dtype=torch.float32), model.steps)
        weights = [c["weight"] for c in constants.values() if c["shape"] == [128, 64]]
        assert len(set(weights)) == 1


@pytest.mark.parametrize(
    ("sizes", "change", "arguments", "channels_last"),
    [
        ((2, 3, 8, 8), {"memory_format": torch.channels_last}, {}, True),
        ((2, 3, 8, 8), {}, {}, False),
        ((2, 3, 4, 8, 8), {"memory_format": torch.channels_last_3d}, {}, True),
        ((2, 3, 8, 8), {"memory_format": torch.channels_last}, {"transposed": True, "output_padding": [0, 1]}, False),
        ((2, 3, 8, 8), {"dtype": torch.float64, "memory_format": torch.channels_last}, {}, False),
        ((0, 3, 8, 8), {"memory_format": torch.channels_last}, {}, False),
        ((2, 3, 8), {}, {}, False),
    ],
)
def test_the_layout_of_a_convolution(
    sizes: tuple[int, ...], change: dict[str, Any], arguments: dict[str, Any], channels_last: bool
) -> None:
    """As the runtime's convolution gives it: tests/gpu/native/test_convolution.py compares that one with torch's."""
    x, n = torch.zeros(sizes).to(**change), len(sizes) - 2
    weight = torch.zeros(4, 3, *[3] * n, dtype=x.dtype)
    given = {"transposed": False, "output_padding": [0] * n, **arguments}
    chosen = Convolution.select(x, weight, None, [1] * n, [0] * n, [1] * n, groups=1, **given)
    expanded = (x.unsqueeze(2), weight.unsqueeze(2)) if n == 1 else (x, weight)  # as torch does
    wanted = torch.channels_last if n == 2 else torch.channels_last_3d
    found = Convolution.memory_format(*expanded, chosen)
    assert found == (wanted if channels_last else torch.contiguous_format)


def test_convolutions_count_on_channels_last(tmp_path: Path) -> None:
    report = export(
        Cnn().eval(), (torch.randn(2, 3, 16, 16),), tmp_path / "m.pt2", device="cuda", arch="sm_90", keep_sources=True,
        progress=False, passes={"fuse_convolutions": False},
    )  # fmt: skip
    with ArchiveReader(report.path) as archive:
        wrapper = next(archive.read(e.name).decode() for e in archive if e.name.endswith("wrapper.cpp"))
    found = re.findall(r"\{2L, 8L, \d+L, \d+L\}, \{([^}]*)\}, \"torch.ops.aten.convolution", wrapper)
    if not found and torch.__version__ < "2.12":
        pytest.skip("this torch's code does not say what it counts on")
    assert [text.split(", ")[1] for text in found] == ["1L", "1L"]


def test_generated_code_copies_no_weight_of_a_convolution(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3)).eval()
    launches = {}
    for on in (True, False):
        report = export(
            model, (torch.randn(2, 8, 6, 6),), tmp_path / f"{on}.pt2", device="cuda", arch="sm_90", keep_sources=True,
            progress=False, passes={"channels_last_weights": on, "fuse_convolutions": False},
        )  # fmt: skip
        with ArchiveReader(report.path) as archive:
            wrapper = next(archive.read(e.name).decode() for e in archive if e.name.endswith("wrapper.cpp"))
        launches[on] = len(re.findall(r"^    call_triton_", wrapper, re.MULTILINE))
    assert launches[True] == launches[False] - 2


def test_what_follows_a_convolution_is_in_its_kernel(tmp_path: Path) -> None:
    class Bottleneck(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Sequential(
                torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
            )
            self.second = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.second(self.first(x)) + x)

    report = export(
        Bottleneck().eval(), (torch.randn(2, 8, 6, 6),), tmp_path / "m.pt2", device="cuda", arch="sm_90",
        keep_sources=True, progress=False,
    )  # fmt: skip
    with ArchiveReader(report.path) as archive:
        wrapper = next(archive.read(e.name).decode() for e in archive if e.name.endswith("wrapper.cpp"))
    assert len(re.findall(r"aoti_torch_cuda_fused_convolution\(", wrapper)) == 2 + 1  # and its declaration
    assert len(re.findall(r"^    call_triton_", wrapper, re.MULTILINE)) == 2  # the layouts of input and result


def test_several_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    trace = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **named: traces.append(1) or trace(*args, **named))
    options: Any = {"methods": {"mlp": methods()["mlp"]}, "device": "cuda", "progress": False}
    report = export(path=tmp_path / "m.pt2", arch=["sm_90", "A100"], **options)
    assert len(traces) == 1  # for both
    alone = export(path=tmp_path / "alone.pt2", arch="A100", **options)
    with ArchiveReader(alone.path) as archive:
        [only] = json.loads(archive.read(MANIFEST))["methods"].values()
        library = archive.read(only["library"])
    with ArchiveReader(report.path) as archive:
        manifest = json.loads(archive.read(MANIFEST))
        method = manifest["methods"]["mlp"]
        (variant,) = method["variants"]
        for code, number in ((method, 90), (variant, 80)):
            assert code["gpu_architecture"] == f"sm_{number}"
            assert set(kernels(archive.read(code["library"]))) == {number}
        assert archive.read(variant["library"]) == library
    # The weights are there once, and both count in the same buffer.
    assert {c["weight"] for c in method["constants"]} == {c["weight"] for c in variant["constants"]}
    assert manifest["states"] == [{"fqn": "calls", "weight": manifest["states"][0]["weight"], "methods": ["mlp"]}]
    assert all(item.served for item in check(report.path))


@pytest.mark.parametrize(
    ("arch", "text"),
    [
        (["sm_90", "H200"], "arch: 'sm_90' and 'H200' are both sm_90: a file has one code for it"),
        ([], "arch: expected the name of a GPU, or a list of them, got an empty one"),
        (["sm_90", "sm_1"], "arch: expected one of sm_80, .* got 'sm_1'"),
    ],
)
def test_wrong_architectures(arch: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        export(nn.Linear(2, 2), (torch.zeros(1, 2),), tmp_path / "m.pt2", device="cuda", arch=arch)


def test_int4(tmp_path: Path) -> None:
    report = export(
        methods={"mlp": methods()["mlp"]},
        path=tmp_path / "a.pt2",
        device="cuda",
        arch="sm_90",
        quantize="int4",
        progress=False,
    )
    assert "aoti_torch_cuda_int4_linear" in report.methods["mlp"].operators
    with ArchiveReader(report.path) as archive:
        [method] = json.loads(archive.read(MANIFEST))["methods"].values()
    # Layers that share a weight share the packed one.
    packed = {c["weight"] for c in method["constants"] if c["dtype"] == "int32"}
    assert [entry["name"] for entry in method["quantization"]] == ["layers.3", "layers.2"] and len(packed) == 2


def test_nvfp4(tmp_path: Path) -> None:
    report = export(
        methods={"mlp": methods()["mlp"]},
        path=tmp_path / "a.pt2",
        device="cuda",
        arch="sm_90",
        quantize="nvfp4",
        progress=False,
    )
    assert "aoti_torch_cuda_nvfp4_linear" in report.methods["mlp"].operators
    with ArchiveReader(report.path) as archive:
        [method] = json.loads(archive.read(MANIFEST))["methods"].values()
    # Tiles, 8 inner ones: the layout that the GPU's kernels are for.
    shapes = {tuple(c["shape"]) for c in method["constants"] if c["dtype"] == "int32"}
    assert shapes == {(16, 1, 32, 4), (8, 1, 32, 4)}
    assert {entry["dtype"] for entry in method["quantization"]} == {"nvfp4"}
    # What loading with dequantize_weights goes by.
    names = {constant["fqn"] for constant in method["constants"]}
    assert all(names.issuperset(entry["tensors"]) for entry in method["quantization"])


def test_what_would_be_called() -> None:
    program = torch.export.export(Mlp(), (torch.randn(8, 64),))
    found = check(program, "cuda", "sm_90")
    assert all(item.served for item in found)
    assert {item.operator for item in found} & {"mm_out", "addmm_out"}


@pytest.mark.parametrize("biases", [(), (torch.ones(4, 64), torch.ones(4, 64))])
def test_experts_in_nvfp4(biases: tuple[torch.Tensor, ...]) -> None:
    limit = 7.0 if biases else None
    experts = NVFP4MoE(*random_experts(4, 64, 32, True), *biases, swiglu_limit=limit).eval().requires_grad_(False)
    inputs = torch.randn(3, 64, dtype=torch.bfloat16), *random_routing(3, 2, 4)
    found = check(torch.export.export(experts, inputs), "cuda", "sm_90")
    assert all(item.served for item in found)
    assert "nvfp4_moe" in {item.operator for item in found}


@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
@pytest.mark.parametrize(
    ("name", "arch"), [("qwen3_moe", "sm_80"), pytest.param("gpt_oss", "sm_90", marks=pytest.mark.slow)]
)
def test_experts_in_int4(name: str, arch: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.conformance import test_nvfp4 as models

    model = models.Logits(getattr(models, name)().to(torch.bfloat16)).eval().requires_grad_(False)
    report = export(
        model, (torch.randint(0, 96, (1, 9)),), tmp_path / "m.pt2", device="cuda", arch=arch,
        quantize={"dtype": "int4", "group_size": 32, "method": "rtn"}, progress=False,
    )  # fmt: skip
    method = report.methods["forward"]
    assert "aoti_torch_cuda_int4_moe" in method.operators
    assert not [operator for operator in method.operators if "grouped_mm" in operator]
    assert method.quantization is not None
    assert not [layer for layer in method.quantization.skipped if layer.endswith("experts")]
    with ArchiveReader(report.path) as archive:
        manifest = json.loads(archive.read(MANIFEST))["methods"]["forward"]
        assert set(kernels(archive.read(manifest["library"]))) == {int(arch[3:])}
    experts = [entry for entry in manifest["quantization"] if entry["operator"] == "int4_moe"]
    assert experts and {entry["dtype"] for entry in experts} == {"int4"}
    assert {entry["activations"] for entry in experts} == {"bfloat16"}
    assert len(experts) % 2 == 0


@pytest.mark.parametrize("arch", ["sm_70", "H1000", "", "cuda", 90])
def test_an_unknown_gpu(arch: Any, tmp_path: Path) -> None:
    text = r"arch: expected one of sm_80, .*sm_120, or the name of a GPU: A100, .*RTX 5090; got"
    with pytest.raises(InvalidArgumentError, match=text):
        export(Mlp(), (torch.randn(8, 64),), tmp_path / "a.pt2", device="cuda", arch=arch, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_another_device(device: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"arch='sm_90' .* device must be 'cuda', got '{device}'"):
        export(Mlp(), (torch.randn(8, 64),), tmp_path / "a.pt2", device=device, arch="sm_90", progress=False)


def test_verify_needs_the_gpu(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"verify=True runs the file, .* a GPU \(H200\) that this machine need not have: leave verify out",
    ):
        export(
            Mlp(), (torch.randn(8, 64),), tmp_path / "a.pt2", device="cuda", arch="H200", verify=True, progress=False
        )


def test_a_model_that_is_not_on_the_cpu(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(InvalidArgumentError, match=r"method 'forward': .* it has tensors on meta: move it"):
        export(model, (torch.randn(1, 2),), tmp_path / "a.pt2", device="cuda", arch="sm_90", progress=False)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnsupportedError, match="compiled by Triton, which is not installed: install the triton"):
        require_triton()


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_attention_that_torch_would_choose(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    text = r"method 'forward': scaled_dot_product_attention \(.*test_cross_compile.py.*\) would be left to PyTorch's fused "
    with pytest.raises(
        CompileError,
        match=text + r".*this compiles for H100 without one \(native: the type is float64.*attention='math'",
    ):
        export(Doubles(), (x,), tmp_path / "a.pt2", device="cuda", arch="sm_90", progress=False)
    module = torch.export.export(Doubles(), (x,)).module()
    with pytest.raises(CompileError, match="the pass choose_attention was switched off"):
        refuse_native_attention(module, [], "forward", GpuModel("H100", "sm_90", 1, 1, 1, 1, 1, 1))


class Wide(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, mask)


def test_wide_heads(tmp_path: Path) -> None:
    """As of a diffusion VAE: 512 wide, and any number of queries and keys."""
    args = torch.randn(1, 1, 9, 512), torch.randn(1, 1, 33, 512), torch.rand(1, 1, 1, 33) > 0.3
    dynamic = {2: Dim.DYNAMIC}, {2: Dim.DYNAMIC}, {3: Dim.DYNAMIC}
    report = export(
        Wide(), args, tmp_path / "m.pt2", device="cuda", arch="sm_90", dynamic_shapes=dynamic, keep_sources=True,
        progress=False,
    )  # fmt: skip
    with ArchiveReader(report.path) as archive:
        wrapper = next(archive.read(e.name).decode() for e in archive if e.name.endswith("wrapper.cpp"))
    assert "aoti_torch_cuda__scaled_dot_product_efficient_attention(" in wrapper
    assert "aoti_torch_cuda_bmm" not in wrapper


class AddOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_an_error_in_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the compiler is on strike")

    monkeypatch.setattr(torch._inductor, "aot_compile", fails)
    with pytest.raises(CompileError, match="method 'forward': AOTInductor failed: the compiler is on strike") as caught:
        export(AddOne(), (torch.ones(2),), tmp_path / "a.pt2", device="cuda", arch="sm_90", progress=False)
    assert "in fails" in str(caught.value.__cause__)
    assert not list(tmp_path.iterdir())


def test_a_child_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "aot_compile", lambda *_, **__: os._exit(7))
    with pytest.raises(CompileError, match="the process that compiles for H100 ended with exit code 7"):
        export(AddOne(), (torch.ones(2),), tmp_path / "a.pt2", device="cuda", arch="sm_90", progress=False)


def test_torch_sees_no_gpu_before_and_after(tmp_path: Path) -> None:
    """It remembers that it has no use for Triton, which must not reach the child."""
    from torch.utils._triton import has_triton

    assert not has_triton()
    export(AddOne(), (torch.ones(2),), tmp_path / "a.pt2", device="cuda", arch="sm_90", progress=False)
    assert not has_triton() and not torch.cuda.is_available()


_LARGE = """
import sys, torch
from torch import nn
from untorch.export import export

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

class Large(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(depth))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def write(model, width):
    x = torch.zeros(2, width, dtype=torch.bfloat16)
    export(model.eval(), (x,), sys.argv[1], device="cuda", arch="sm_90", progress=False)

write(Large(8, 2), 8)  # what exporting takes by itself
before = status("VmRSS")
model = Large(4096, 12)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again
write(model, 4096)
print((status("VmHWM") - before) / sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def test_host_memory(tmp_path: Path) -> None:
    """The weights are in memory once, the model's own, and go straight into the file."""
    command = [sys.executable, "-W", "ignore", "-c", _LARGE, str(tmp_path / "m.pt2")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) <= 1.3


def test_the_stub_needs_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"false -shared .* failed"):
        stub_driver(tmp_path / "libcuda.so", "false")
    stub_driver(tmp_path / "libcuda.so", "cc")
    done = subprocess.run(["readelf", "-d", tmp_path / "libcuda.so"], capture_output=True, text=True, check=True)
    assert "libcuda.so.1" in done.stdout


class Experts(nn.Module):
    """transformers' grouped GEMM in a dtype that PyTorch's refuses while it traces, and PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 48, 32), requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, 32, 48).to(torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ends = torch.histc(ids.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        y = torch.ops.transformers.grouped_mm_fallback(x, self.up.transpose(-2, -1), ends)
        return torch._grouped_mm(torch.relu(y).to(torch.bfloat16), self.down.transpose(-2, -1), ends)


def test_experts(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.moe")  # registers the operator
    args = (torch.randn(10, 32), torch.randint(0, 4, (10,)).sort()[0])
    report = export(Experts(), args, tmp_path / "m.pt2", device="cuda", arch="sm_90", progress=False)
    method = report.methods["forward"]
    [done] = [p for p in method.passes if p.name == "serve_grouped_mm"]
    assert done.changed == ["grouped_mm_fallback", "_grouped_mm"]
    with ArchiveReader(report.path) as archive:
        [entry] = [e.name for e in archive if e.name.startswith("data/aotinductor/") and e.name[-3:] == ".so"]
        needed = needed_functions(parse_elf(archive.read(entry), entry))
    assert {"aoti_torch_cuda_moe_grouped_mm", "aoti_torch_cuda_histc"} <= set(needed)
    assert not [name for name in needed if name.endswith("__grouped_mm")]


class LargeWeights(nn.Module):
    """Weights that are large enough to be written while AOTInductor compiles; of ``shape`` the code needs the size."""

    def __init__(self, reads_shape: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 1024))
        self.register_buffer("shape", torch.randn(1024, 512))
        self.reads_shape = reads_shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ self.weight)
        return y + torch.zeros_like(self.shape).sum(1) if self.reads_shape else y


@pytest.mark.parametrize("reads_shape", [False, True])
def test_weights_are_written_while_others_compile(
    reads_shape: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that turns out to be unused is not in the file."""
    restarts: list[Path] = []
    restart = ArchiveWriter.restart
    monkeypatch.setattr(ArchiveWriter, "restart", lambda self: (restarts.append(self.path), restart(self)))
    model, path = LargeWeights(reads_shape), tmp_path / "model.pt2"
    report = export(model, (torch.randn(4, 512),), path, device="cuda", arch="sm_90", progress=False)
    assert report.seconds["write weights"] > 0
    assert restarts == [path] * reads_shape
    with ArchiveReader(path) as archive:
        archive.verify()
        names = [name for name in archive.entries if name.startswith("data/weights/")]
        assert archive.read(names[0]) == model.weight.detach().numpy().tobytes()
        assert sum(archive.entries[name].size for name in names) == report.weight_nbytes
        assert all(archive.entries[name].size < 1 << 20 for name in names[1:])
        manifest = json.loads(archive.read(MANIFEST))
        used = {constant["weight"] for constant in manifest["methods"]["forward"]["constants"]}
    assert used == set(range(len(names)))


def test_checks_are_made_while_others_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a language model that take long, with half of the threads at least; their error ends the export."""
    from tests.conformance.language_models import make_model
    from untorch.export import causal_lm
    from untorch.export.lm import build

    made: list[tuple[str, bool | None, int]] = []
    threads = torch.get_num_threads()

    def check_chunks(*args: Any) -> None:
        made.append(("chunks", None, torch.get_num_threads()))

    def check_model(*args: Any, long: bool | None = None) -> None:
        made.append(("model", long, torch.get_num_threads()))
        if long:
            raise CompileError("the check")

    monkeypatch.setattr(build, "check_chunks", check_chunks)
    monkeypatch.setattr(build, "check_model", check_model)
    path, model = tmp_path / "model.pt2", make_model("Llama").to(torch.bfloat16)
    few = max(1, threads // 2, threads - 3)  # two steps and the choice of tokens compile
    with pytest.raises(CompileError, match="the check"):
        causal_lm(model, path, device="cuda", arch="sm_90", progress=False)
    assert made == [("model", False, threads), ("chunks", None, few), ("model", True, few)]
    assert not list(tmp_path.iterdir())
    assert torch.get_num_threads() == threads
    made.clear()
    with pytest.raises(CompileError, match="no_such_option"):
        causal_lm(model, path, device="cuda", arch="sm_90", kv_dtype="int8", inductor={"no_such_option": 1})
    assert made == [("chunks", None, threads), ("model", None, threads), ("chunks", None, threads)]
