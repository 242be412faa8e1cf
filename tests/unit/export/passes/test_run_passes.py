"""Tests of the order of the passes, of switching them off, and of one that fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pass_graphs import exported, targets, unlift
from torch import fx, nn

from untorch.export import CompileError
from untorch.export.mutations import find_mutations
from untorch.export.options import ExportOptions
from untorch.export.passes import PassReport, run_passes, table
from untorch.export.passes.table import PASS_NAMES, PASSES, render_table

ROOT = Path(table.__file__).parent


def module() -> fx.GraphModule:
    return unlift(nn.Linear(32, 32), torch.randn(2, 32))


def test_every_pass_reports_in_its_order() -> None:
    assert len(set(PASS_NAMES)) == len(PASSES)
    reports = run_passes(module(), ExportOptions())
    assert [report.name for report in reports] == list(PASS_NAMES)
    assert {report.name for report in reports if report.not_run} == {
        "conv1d_as_conv2d", "channels_last_weights", "fuse_convolutions", "tune_convolutions", "paged_attention_kernels", "recurrent_kernels", "merge_linears",
        "fuse_decoder_linears", "fuse_rope_cache", "quantize_int4_activations", "attention_in_bfloat16",
        }  # fmt: skip


@pytest.mark.parametrize("name", PASS_NAMES)
def test_each_can_be_switched_off(name: str) -> None:
    [report] = [r for r in run_passes(module(), ExportOptions(passes={name: False})) if r.name == name]
    assert report == PassReport(name, not_run="it is switched off by the option passes")


@pytest.mark.parametrize(
    ("cpu", "extensions", "expected"),
    [
        ("native", "vnni bf16 amx", True),
        ("native", "vnni bf16", False),
        ("portable", "amx", False),
        (["native"], "amx", False),
    ],
)
def test_files_for_this_cpu_are_for_amx(
    cpu: Any, extensions: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_core", SimpleNamespace(cpu_extensions=lambda: extensions))
    assert table._is_for_amx(ExportOptions(cpu=cpu)) is expected


def test_the_option_pack_linears_still_works() -> None:
    for options in (ExportOptions(pack_linears=False), ExportOptions(passes={"pack_linears": False})):
        graph = module()
        report = run_passes(graph, options)[-1]
        assert report.not_run is not None and report.not_run.startswith("it is switched off by the option pa")
        assert "linear" in targets(graph)


def replace_pass(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[[fx.GraphModule], PassReport]) -> None:
    """``run`` in place of the registered pass ``name``."""
    changed = [
        replace(entry, run=lambda module, options, device, architecture: run(module)) if entry.name == name else entry
        for entry in PASSES
    ]
    monkeypatch.setattr(table, "PASSES", tuple(changed))


def test_a_pass_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: fx.GraphModule) -> PassReport:
        raise KeyError("lost")

    replace_pass(monkeypatch, "drop_dead_code", fails)
    with pytest.raises(CompileError) as caught:
        run_passes(module(), ExportOptions(), "cpu", "encode")
    assert str(caught.value) == (
        "method 'encode': pass 'drop_dead_code' failed: 'lost'; passes={'drop_dead_code': False} switches it off"
    )
    assert isinstance(caught.value.__cause__, KeyError)
    run_passes(module(), ExportOptions(passes={"drop_dead_code": False}))


def test_a_pass_that_breaks_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(module: fx.GraphModule) -> PassReport:
        [node] = [n for n in module.graph.nodes if n.op == "call_function"]
        node.prepend(module.graph.output_node())
        return PassReport("drop_dead_code")

    replace_pass(monkeypatch, "drop_dead_code", breaks)
    with pytest.raises(CompileError, match="method 'forward': pass 'drop_dead_code' failed: "):
        run_passes(module(), ExportOptions())


@pytest.mark.slow
def test_parameters_with_gradients_bring_no_autograd_nodes(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(32, 32), nn.Parameter(torch.randn(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                y = self.linear(x) * self.scale.exp()
            return y.detach() + x

    model, x = Model(), torch.randn(2, 32)
    assert all(parameter.requires_grad for parameter in model.parameters())
    [result], method = exported(model, [x], tmp_path)
    assert not result.requires_grad
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert not [name for name in method.operators if "grad" in name and "grad_mode" not in name]
    graph = unlift(nn.Sequential(nn.Linear(32, 32), nn.GELU()), x)
    run_passes(graph, ExportOptions())
    assert not [t for t in targets(graph) if "grad" in t or "backward" in t]


def test_statistics_that_a_normalisation_writes_are_written() -> None:
    with torch.no_grad():
        norm = torch.export.export(nn.BatchNorm1d(4).train(), (torch.randn(3, 4),)).module()
    assert isinstance(norm, fx.GraphModule)
    assert find_mutations(norm.graph).attributes == {"running_mean", "running_var", "num_batches_tracked"}
    evaluated = unlift(nn.BatchNorm1d(4), torch.randn(3, 4))
    assert not find_mutations(evaluated.graph).attributes


def test_the_table_is_the_only_list() -> None:
    """The option's check, the docstring and the page come from it."""
    assert ExportOptions.__doc__ is not None
    assert f"The names: {', '.join(PASS_NAMES)}." in ExportOptions.__doc__
    ExportOptions(passes=dict.fromkeys(PASS_NAMES, False))
    page = (Path(__file__).parents[4] / "docs" / "export.md").read_text()
    assert page.partition("<!-- passes: written by scripts/render_passes.py -->\n\n")[2].startswith(render_table())
    rows = re.findall(r"^\| `(\w+)` \| (on|off|CUDA) \|", render_table(), re.MULTILINE)
    assert rows == [(entry.name, entry.default_text) for entry in PASSES]


def test_what_the_table_says_of_each_pass() -> None:
    options = {field.name for field in fields(ExportOptions)}
    for entry in PASSES:
        assert entry.purpose and set(entry.devices) <= {"cpu", "cuda"} and entry.devices
        assert entry.option is None or entry.option in options
        assert (ROOT / f"{entry.name}.py").is_file()


def test_a_pass_that_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tuple(replace(entry, default=entry.name != "drop_dead_code") for entry in PASSES)
    monkeypatch.setattr(table, "PASSES", changed)
    why = {report.name: report.not_run for report in run_passes(module(), ExportOptions())}
    assert why["drop_dead_code"] == "it is switched off by the option passes"
    why = {
        report.name: report.not_run for report in run_passes(module(), ExportOptions(passes={"drop_dead_code": True}))
    }
    assert why["drop_dead_code"] is None
