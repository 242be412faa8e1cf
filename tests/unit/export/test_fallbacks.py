"""Tests of check(): what a model calls, before and after compiling, and what is said of what nothing serves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from untorch.archive import ArchiveWriter
from untorch.export import Fallback, check, export, fallbacks
from untorch.export.errors import UnsupportedOperatorsError
from untorch.export.fallbacks import forecast_fallbacks, list_fallbacks
from untorch.export.library import find_runtime_library
from untorch.runtime.errors import InvalidArgumentError

NO_CUDA = "this untorch was built without CUDA: install the CUDA toolkit (nvcc) and reinstall untorch"


class Fn(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def attend(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Many(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        values = torch.linalg.svd(x @ x.t())[1]
        return values, torch.topk(x, 2)[0], x.cumsum(0), torch.nonzero(x > 0), torch.linalg.qr(x)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8)), (torch.randn(4, 32),)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)), (torch.randn(1, 3, 8, 8),)),
    "attention": (lambda: Fn(attend), (torch.randn(1, 2, 8, 16),)),
    "lstm": (lambda: nn.LSTM(8, 16, batch_first=True), (torch.randn(2, 5, 8),)),
    "many": (Many, (torch.randn(6, 6),)),
    "pointwise": (lambda: Fn(lambda x: x.sin() + x.softmax(-1)), (torch.randn(4, 6),)),
}  # fmt: skip


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def names(found: list[Fallback]) -> set[tuple[str, str, bool]]:
    return {(item.kind, item.name, item.served) for item in found}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_the_forecast_is_what_the_library_needs(name: str, tmp_path: Path) -> None:
    make, args = MODELS[name]
    program = quietly(torch.export.export, make().eval(), args)
    forecast = quietly(check, program)
    quietly(export, program, path=tmp_path / "m.pt2", progress=False)
    compiled = check(tmp_path / "m.pt2")
    assert names(forecast) == names(compiled)
    assert bool(forecast) is (name != "pointwise")
    assert all(item.sources and not item.todo for item in forecast if name == "many")


def test_both_kinds_with_their_source() -> None:
    make, args = MODELS["many"]
    found = {item.name: item for item in quietly(check, quietly(torch.export.export, make(), args))}
    kernel, function = found["aten::_linalg_svd"], found["aoti_torch_cpu_topk"]
    assert (kernel.kind, kernel.operator, kernel.served) == ("kernel", "aten::_linalg_svd", True)
    assert (function.kind, function.operator, function.served) == ("function", "topk", True)
    assert function.sources[0].startswith(f"{__file__}:")
    assert "torch.topk(x, 2)" in function.sources[0]


def test_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [
        "aoti_torch_cpu_mm_out",
        "aoti_torch_cpu__pdist_backward",
        "aoti_torch_clone",
        "aoti_torch_cpu_new_thing",
    ]
    nodes = json.dumps({"nodes": [{"name": "b", "node": {"target": "mine::op"}}]})
    assert list_fallbacks(functions, nodes) == [
        Fallback(
            "_pdist_backward", "function", "aoti_torch_cpu__pdist_backward", False, (),
            "a backward operator: untorch runs inference only; change the model",
        ),
        Fallback("mm_out", "function", "aoti_torch_cpu_mm_out", True),
        Fallback(
            "new_thing", "function", "aoti_torch_cpu_new_thing", False, (),
            "libuntorch.so does not have it; change the model, or update untorch",
        ),
        Fallback(
            "mine::op", "kernel", "mine::op", False, (),
            'it has no C shim and no registered kernel; register a kernel with untorch.register_kernel("mine::op", fn), '
            "or change the model",
        ),
    ]  # fmt: skip
    for built, todo in (
        (True, "libuntorch.so does not have it; change the model, or update untorch"),
        (False, NO_CUDA),
    ):
        monkeypatch.setattr("untorch.export.coverage._has_cuda_shims", lambda built=built: built)
        [item] = list_fallbacks(["aoti_torch_cuda_new_thing"], None, device="cuda")
        assert item.todo == todo
    [item] = list_fallbacks([], nodes, device="cuda")
    assert item.todo == (
        "it has no C shim and no kernel for CUDA; register one that works on arrays on the GPU with "
        'untorch.register_kernel("mine::op", fn, device="cuda"), change the model, or export it for the CPU'
    )


@pytest.mark.slow
def test_int4_weights_in_the_layout_of_a_cpu_are_refused(tmp_path: Path) -> None:
    """Where they are no constants, which the pass repack_int4 repacks."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, 32, scales)
            return y

    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.zeros(64, 128, dtype=torch.int32), 1)
    with pytest.raises(UnsupportedOperatorsError) as error:
        quietly(
            export, Model(), (torch.randn(3, 128), weight, torch.ones(4, 64, 2)), tmp_path / "m.pt2", progress=False
        )  # fmt: skip
    assert str(error.value).endswith(
        ": works on int4 weights packed for the vectors of the CPU that packed them, which their shape does not tell: "
        "export the model with `untorch`, which repacks weights that are constants; change the model"
    )


def test_nothing_is_written_and_nothing_stays_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import AotCodeCompiler

    before = AotCodeCompiler.compile
    make, args = MODELS["pointwise"]
    monkeypatch.chdir(tmp_path)
    assert quietly(forecast_fallbacks, quietly(torch.export.export, make(), args)) == []
    assert AotCodeCompiler.compile == before
    assert not list(tmp_path.iterdir())


def test_check_of_a_library_and_of_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_runtime_library()
    check(library)
    monkeypatch.setattr(fallbacks, "needed_functions", lambda elf: ["aoti_torch_nothing"])
    with pytest.raises(UnsupportedOperatorsError, match="the runtime lacks 1 operator:\n  C function aoti_torch_noth"):
        check(str(library))
    path = tmp_path / "m.pt2"
    with ArchiveWriter(path) as writer:
        writer.write("data/aotinductor/forward/a.so", library.read_bytes())
        writer.write(
            "data/aotinductor/forward/a.json",
            json.dumps({"nodes": [{"name": "b", "node": {"target": "mine::op"}}]}).encode(),
        )
    with pytest.raises(UnsupportedOperatorsError, match="the runtime lacks 2 operators"):
        check(path)
    with pytest.raises(InvalidArgumentError, match=r"expected an ExportedProgram or the path of a \.so or \.pt2"):
        check(3)  # type: ignore[arg-type]


def test_forecast_for_a_program() -> None:
    @torch.library.custom_op("untorch_test::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    opaque.register_fake(torch.empty_like)

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(torch.ops.untorch_test.opaque(x)).softmax(-1)

    program = torch.export.export(Model(), (torch.randn(2, 3),))
    (missing,) = quietly(forecast_fallbacks, program)
    assert (missing.kind, missing.name, missing.served) == ("kernel", "untorch_test::opaque", False)
    assert "torch.ops.untorch_test.opaque(x)" in missing.sources[0]
    with pytest.raises(UnsupportedOperatorsError, match="untorch_test::opaque"):
        quietly(check, program)
