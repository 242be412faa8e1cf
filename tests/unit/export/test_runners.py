"""Models that call a runner are refused, with the operator that a file can hold; ``untorch::nvfp4_moe`` is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from untorch.export import check, export
from untorch.export.coverage import MissingOperator, find_missing
from untorch.export.errors import UnsupportedOperatorsError
from untorch.export.fallbacks import forecast_fallbacks
from untorch.quant.moe import NVFP4MoE
from untorch.runtime import registry
from untorch.torch_compile.modules import RunnerLinear, RunnerMoE

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it exports

REASON = "it calls a runner, an object of the process that registered it, which a file cannot hold; call "


class Runner:
    def run_linear(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("exporting runs no runner")

    def run_moe(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("exporting runs no runner")


class Net(nn.Module):
    def __init__(self, linear: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.linear, self.experts, self.router = linear, experts, nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        topk_weights, topk_ids = self.router(hidden).softmax(-1).topk(2)
        return self.experts(hidden, topk_weights, topk_ids) + 1


def moe() -> NVFP4MoE:
    scale = torch.float8_e4m3fn
    return NVFP4MoE(
        torch.ones(4, 32, 16, dtype=torch.uint8), torch.ones(4, 32, 2).to(scale),
        torch.ones(4, 32, 8, dtype=torch.uint8), torch.ones(4, 32, 1).to(scale), torch.ones(4), torch.ones(4),
    )  # fmt: skip


@pytest.mark.slow
def test_both_are_listed_with_what_to_call(tmp_path: Path) -> None:
    net = Net(RunnerLinear(Runner(), 32), RunnerMoE(Runner(), 32)).eval()
    with pytest.raises(UnsupportedOperatorsError) as error:
        export(net, (torch.ones(3, 32),), tmp_path / "m.pt2", progress=False)
    text = str(error.value)
    assert text.startswith("method 'forward': the runtime lacks 2 operators:\n")
    assert f"operator untorch::run_linear ({__file__}" in text  # the user's line, not the module's
    assert f"{REASON}untorch::nvfp4_linear, whose weights are tensors" in text
    assert f"{REASON}untorch::nvfp4_moe, whose weights are tensors" in text
    assert not (tmp_path / "m.pt2").exists()
    program = torch.export.export(net, (torch.ones(3, 32),))
    with pytest.raises(UnsupportedOperatorsError) as error:
        check(program)
    assert str(error.value).startswith("the exported program: the runtime lacks 2 operators:\n")
    assert f"{REASON}untorch::nvfp4_linear" in str(error.value)


@pytest.mark.parametrize("name", ["untorch::run_linear", "untorch::run_moe", "untorch::run_moe.default"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_registered_kernel_changes_nothing(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, (name, device), registry.Registration(lambda **arguments: None))
    nodes = json.dumps({"nodes": [{"name": "b", "node": {"target": name}}]})
    [missing] = find_missing([], nodes, frozenset(), device=device)
    assert missing == MissingOperator("kernel" if device == "cpu" else "cuda kernel", name)
    instead = name.replace("run_", "nvfp4_").removesuffix(".default")
    assert missing.todo == f"{REASON}{instead}, whose weights are tensors"


def test_the_tensor_operator_becomes_a_call_of_a_c_function() -> None:
    program = torch.export.export(Net(nn.Linear(32, 32), moe()).eval(), (torch.ones(3, 32),))
    found = {item.name: item for item in forecast_fallbacks(program)}
    item = found["aoti_torch_cpu_nvfp4_moe"]
    assert (item.operator, item.kind) == ("nvfp4_moe", "function")
    assert len(item.sources) == 1
    assert item.sources[0].startswith(f"{__file__}:")
    assert item.sources[0].endswith("return self.experts(hidden, topk_weights, topk_ids) + 1")
    assert all(other.served for other in found.values() if other is not item)
