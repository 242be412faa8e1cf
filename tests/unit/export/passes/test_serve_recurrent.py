"""The pass that serves recurrent modules: before, after, and what is skipped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from untorch.export.errors import CompileError
from untorch.export.options import ExportOptions
from untorch.export.passes import PassReport, run_passes
from untorch.export.passes.serve_recurrent import serve_recurrent
from untorch.export.patches import packed_sequences, recurrent_shapes
from untorch.ops import recurrent_steps
from untorch.ops.recurrent import MODULE_OPERATOR, OPERATOR


class Model(nn.Module):
    def __init__(self, cell: nn.Module, states: bool = False) -> None:
        super().__init__()
        self.cell, self.states = cell, states

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> Any:
        return self.cell(x, states if isinstance(self.cell, nn.LSTM) else states[0]) if self.states else self.cell(x)


def run(
    model: nn.Module, *args: torch.Tensor, dynamic: Any = None, device: str = "cpu"
) -> tuple[fx.GraphModule, PassReport]:
    model.eval()
    with torch.no_grad():
        with recurrent_shapes(), packed_sequences():
            module = torch.export.export(model, args, dynamic_shapes=dynamic).module()
        expected = model(*args)
        if device == "cuda":  # the other passes for GPUs are not for tensors on the CPU
            report = serve_recurrent(module, device)
            module.recompile()
        else:
            report = next(r for r in run_passes(module, ExportOptions()) if r.name == "serve_recurrent")
        got = module(*args)
    tolerance = 1e-5 if args[0].dtype in (torch.float32, torch.float64) else 2e-2
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (got, expected)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return module, report


def layers(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target == OPERATOR]


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        (nn.RNN(6, 5), "tanh"),
        (nn.RNN(6, 5, nonlinearity="relu", bias=False), "relu"),
        (nn.GRU(6, 5, num_layers=2, bidirectional=True), "gru"),
        (nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True), "lstm"),
    ],
)
def test_modules(cell: nn.RNNBase, name: str) -> None:
    module, report = run(Model(cell), torch.randn(4, 3, 6))
    assert len(report.changed) == 1
    assert not report.skipped
    calls = layers(module)
    assert len(calls) == cell.num_layers * (2 if cell.bidirectional else 1)
    assert {call.args[8] for call in calls} == {name}
    assert [call.args[9] for call in calls] == [False, True] * (len(calls) // 2) if cell.bidirectional else [False]
    state = module.state_dict()
    assert "cell.weight_ih_l0" not in state
    assert state["cell_weight_hh_l0_packed"].shape[1:] == (5, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cell", "name"),
    [
        (nn.RNN(6, 5), "tanh"),
        (nn.RNN(6, 5, nonlinearity="relu", bias=False), "relu"),
        (nn.GRU(6, 5, num_layers=2, bidirectional=True), "gru"),
        (nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True), "lstm"),
    ],
)
def test_modules_on_a_gpu(cell: nn.RNNBase, name: str, dtype: torch.dtype) -> None:
    cell = copy.deepcopy(cell).to(dtype)
    module, report = run(Model(cell), torch.randn(4, 3, 6).to(dtype), device="cuda")
    assert len(report.changed) == 1
    assert not report.skipped
    calls = [node for node in module.graph.nodes if node.target == recurrent_steps.OPERATOR]
    assert len(calls) == cell.num_layers
    assert {call.args[6] for call in calls} == {name}
    assert all(call.meta["val"][0].dtype == dtype for call in calls)
    state = module.state_dict()
    if cell.bidirectional:  # one tensor for both directions
        assert state["cell_weight_hh_l0_both"].shape[1] == 5
        assert "cell.weight_hh_l0" not in state
    else:
        assert "cell.weight_hh_l0" in state


def test_states_lengths_and_a_dynamic_length_on_a_gpu() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(6, 5, num_layers=2, bidirectional=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
            out, state = self.cell(packed, (h, c))
            return nn.utils.rnn.pad_packed_sequence(out, total_length=x.shape[0])[0], *state

    def arguments(lengths: list[int]) -> tuple[torch.Tensor, ...]:
        return torch.randn(max(lengths), 3, 6), torch.tensor(lengths), torch.randn(4, 3, 5), torch.randn(4, 3, 5)

    model, dynamic = Packed(), ({0: torch.export.Dim("steps", min=2, max=50)}, None, None, None)
    module, report = run(model, *arguments([1, 4, 2]), dynamic=dynamic, device="cuda")
    assert len(report.changed) == 1
    args = arguments([9, 1, 5])
    with torch.no_grad():
        for got, expected in zip(module(*args), model(*args), strict=True):
            torch.testing.assert_close(got, expected)


def test_given_states_and_a_dynamic_length() -> None:
    steps = torch.export.Dim("steps", min=2, max=50)
    state = torch.randn(1, 3, 5)
    module, report = run(
        Model(nn.LSTM(6, 5), states=True),
        torch.randn(4, 3, 6),
        state,
        state,
        dynamic={"x": {0: steps}, "states": (None, None)},
    )
    assert len(report.changed) == 1
    x, h, c = torch.randn(9, 3, 6), torch.randn(1, 3, 5), torch.randn(1, 3, 5)
    assert module(x, h, c)[0].shape == (9, 3, 5)


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's own, of eager
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_dynamic_length_that_would_be_unrolled(batch_first: bool) -> None:
    """Inductor would unroll it for the example's length, and give results of that length for all others."""
    cell = nn.LSTM(6, 5, proj_size=3, batch_first=batch_first).eval()
    shapes = {"x": {int(batch_first): torch.export.Dim("steps", min=2, max=50)}}
    with torch.no_grad(), recurrent_shapes():
        module = torch.export.export(Model(cell), (torch.randn(4, 4, 6),), dynamic_shapes=shapes).module()
    text = r"method 'forward': lstm \(.*self.cell\(x\)\): the length of its sequences is dynamic, .*\(proj_size\)\. Leave this"
    with pytest.raises(CompileError, match=text):
        run_passes(module, ExportOptions())
    shapes = {"x": {int(not batch_first): torch.export.Dim("batch", min=2, max=50)}}
    _, report = run(Model(cell), torch.randn(4, 4, 6), dynamic=shapes)
    assert report.skipped == {"lstm": "it projects its hidden state (proj_size)"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    module, report = run(Model(nn.GRU(6, 5)).to(dtype), torch.randn(4, 3, 6).to(dtype))
    assert len(report.changed) == 1
    [layer] = layers(module)
    assert layer.meta["val"][0].dtype == torch.float32
    stored = dtype if dtype == torch.bfloat16 else torch.float32  # of the hidden state's weights, read at every step
    assert [layer.args[i].meta["val"].dtype for i in (1, 2)] == [torch.float32, stored]
    assert module.state_dict()["cell_weight_hh_l0_packed"].dtype == stored


def test_packed_sequences() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(6, 5, bidirectional=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            out, state = self.cell(nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))
            return nn.utils.rnn.pad_packed_sequence(out, total_length=4)[0], state

    module, report = run(Packed(), torch.randn(4, 3, 6), torch.tensor([1, 4, 2]))
    assert len(report.changed) == 1
    assert MODULE_OPERATOR not in [node.target for node in module.graph.nodes]
    assert all(call.args[7] is not None for call in layers(module))


def test_what_is_skipped() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(6, 5)

        def forward(self, x: torch.Tensor) -> Any:
            out = self.cell(x)
            self.cell.weight_hh_l0.mul_(0.5)
            return out

    for model, reason, dtype in (
        (Model(nn.LSTM(6, 5, proj_size=3)), "it projects its hidden state (proj_size)", torch.float32),
        (Model(nn.GRU(6, 5)), "a weight is float64 on cpu", torch.float64),
        (Written(), "the model writes into the weight cell.weight_hh_l0", torch.float32),
    ):
        model = model.to(dtype).requires_grad_(False).eval()
        with torch.no_grad(), recurrent_shapes():
            module = torch.export.export(model, (torch.randn(4, 3, 6).to(dtype),)).module()
        report = next(r for r in run_passes(module, ExportOptions()) if r.name == "serve_recurrent")
        assert list(report.skipped.values()) == [reason]
        assert not layers(module)
