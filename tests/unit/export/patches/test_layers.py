"""Equal layers are compiled once: generated code has a function for them, which computes what inlined layers do."""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from tests.unit.export.test_outline import Block, Stack
from untorch.export import ExportReport, export
from untorch.export.patches.layers import called_layers

pytestmark = pytest.mark.filterwarnings("ignore")


def source_of(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".wrapper.cpp")]
        return archive.read(name).decode()


def exported(path: Path, module: nn.Module, **options: Any) -> ExportReport:
    shapes = ({0: torch.export.Dim("rows", max=64)},)
    return export(
        module.eval(), (torch.randn(4, 16),), path, dynamic_shapes=shapes, keep_sources=True, progress=False, **options
    )


def test_torch_compiles_no_called_graphs() -> None:
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    with pytest.raises(NotImplementedError, match="invoke_subgraph"):
        CppWrapperCpu.codegen_invoke_subgraph(object.__new__(CppWrapperCpu), None)


@pytest.mark.slow
def test_a_function_for_equal_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Stack([Block(16) for _ in range(8)], every=True)
    report = exported(tmp_path / "m.pt2", module)
    source = source_of(tmp_path / "m.pt2")
    assert source.count("auto call_layer_0 = ") == 1
    calls = called_layers(source)
    assert calls.keys() == {"layer_0"} and calls["layer_0"] >= 7
    [entry] = [entry for entry in report.methods["forward"].passes if entry.name == "outline_layers"]
    assert entry.changed == [f"layer_0: {calls['layer_0']} calls"]
    with untorch.load(tmp_path / "m.pt2") as program:
        for rows in (4, 1, 63):
            x = torch.randn(rows, 16)
            with torch.no_grad():
                want = module(x)
            for got, state in zip(program(x.numpy()), want, strict=True):
                np.testing.assert_allclose(np.asarray(got), state, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_few_of_many_layers_go_through_the_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    nodes: list[int] = []
    original = compile_fx._recursive_post_grad_passes

    def passes(module: Any, *args: Any, **kwargs: Any) -> Any:
        nodes.append(sum(node.op == "call_function" for node in module.graph.nodes))
        return original(module, *args, **kwargs)

    monkeypatch.setattr(compile_fx, "_recursive_post_grad_passes", passes)
    torch.manual_seed(0)
    module = Stack([Block(16) for _ in range(16)])
    for outlined in (True, False):
        exported(tmp_path / "m.pt2", module, outline_layers=outlined)
        with untorch.load(tmp_path / "m.pt2") as program:
            for rows in (4, 1, 63):
                x = torch.randn(rows, 16)
                with torch.no_grad():
                    np.testing.assert_allclose(np.asarray(program(x.numpy())), module(x), rtol=1e-4, atol=1e-5)
    few, all_of_them = nodes
    assert few < all_of_them / 2


class Remembering(nn.Module):
    """A layer with a state of its own."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.adds = nn.LayerNorm(16), nn.Linear(16, 16), adds
        self.register_buffer("state", torch.zeros(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        if self.adds:
            self.state.add_(y.mean(0))
        else:
            self.state[:1] = y[:1]
        return x + y + self.state.mean(0)


@pytest.mark.slow
@pytest.mark.parametrize("adds", [False, True])
def test_states_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adds: bool) -> None:
    """Sums become copies behind all layers: those are not found among few layers, and all are compiled."""
    from untorch.export.patches import layers

    found: list[bool] = []
    original = layers.lengthen

    def spy(*arguments: Any) -> None:
        found.append(False)
        original(*arguments)
        found[-1] = True

    monkeypatch.setattr(layers, "lengthen", spy)
    torch.manual_seed(0)
    module = Stack([Remembering(adds) for _ in range(8)])
    expected = copy.deepcopy(module)
    exported(tmp_path / "m.pt2", module)
    assert found == [not adds]
    with untorch.load(tmp_path / "m.pt2") as program:
        for rows in (4, 2, 63):
            x = torch.randn(rows, 16)
            with torch.no_grad():
                np.testing.assert_allclose(np.asarray(program(x.numpy())), expected(x), rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    """A layer with a constant of one element, with which Inductor computes."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.tensor([scale]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x) * torch.sigmoid(self.scale.expand(16)))


@pytest.mark.slow
def test_values_that_layers_left_out_have_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Stack([Scaled(2.0 if 4 <= i <= 8 else 1.0) for i in range(13)])
    exported(tmp_path / "m.pt2", module, passes={"fold_constants": False})
    x = torch.randn(4, 16)
    with untorch.load(tmp_path / "m.pt2") as program, torch.no_grad():
        np.testing.assert_allclose(np.asarray(program(x.numpy())), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_it_is_an_option(tmp_path: Path) -> None:
    report = exported(tmp_path / "m.pt2", Stack([Block(16) for _ in range(4)]), outline_layers=False)
    assert called_layers(source_of(tmp_path / "m.pt2")) == {}
    assert all(entry.name != "outline_layers" for entry in report.methods["forward"].passes)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "outlined"), [(None, False), (True, True)])
def test_for_gpus_it_is_asked_for(tmp_path: Path, given: bool | None, outlined: bool) -> None:
    """causal_lm asks for it, whose models were measured."""
    pytest.importorskip("triton")
    report = exported(
        tmp_path / "m.pt2",
        Stack([Block(16) for _ in range(5)]),
        device="cuda",
        arch="sm_90",
        outline_layers=given,
        passes={"merge_linears": False},
    )
    assert bool(called_layers(source_of(tmp_path / "m.pt2"))) == outlined
    assert any(entry.name == "outline_layers" for entry in report.methods["forward"].passes) == outlined


@pytest.mark.slow
def test_layers_that_write_a_cache(tmp_path: Path) -> None:
    """A language model's step: each layer writes at its own offset of the pool; windows differ by layer."""
    from tests.conformance.language_models import greedy, make_model
    from untorch.export import causal_lm
    from untorch.llm import Engine, SamplingParams

    torch.manual_seed(0)
    model = make_model("Gemma3")
    report = causal_lm(model, tmp_path / "m.pt2", token_counts=(16,), progress=False)
    assert [e.changed for e in report.methods["step_16"].passes if e.name == "outline_layers"]
    prompts = [[5, 17, 3], list(range(3, 40)), [7]]
    with Engine(tmp_path / "m.pt2", kv_memory="4MiB", text=False) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [greedy(model, prompt, 8) for prompt in prompts]
