"""Recurrent modules and packed sequences stay whole while a model is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from untorch.export.errors import CompileError
from untorch.export.patches import packed_sequences, recurrent_shapes
from untorch.ops.recurrent import MODULE_OPERATOR

STEPS = ({0: Dim("steps", min=2, max=64)},)
MODULES = [
    (lambda: nn.RNN(4, 6, nonlinearity="relu"), torch.ops.aten.rnn_relu.input),
    (lambda: nn.RNN(4, 6), torch.ops.aten.rnn_tanh.input),
    (lambda: nn.GRU(4, 6, bidirectional=True), torch.ops.aten.gru.input),
    (lambda: nn.LSTM(4, 6, num_layers=2, batch_first=True), torch.ops.aten.lstm.input),
]


class Packed(nn.Module):
    def __init__(self, cell: nn.Module, total_length: int | None = None, **options: Any) -> None:
        super().__init__()
        self.cell, self.total_length, self.options = cell, total_length, options

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        out, state = self.cell(packed)
        return *nn.utils.rnn.pad_packed_sequence(out, total_length=self.total_length, **self.options), state


@pytest.mark.filterwarnings("ignore:.*_flat_weights")
def test_torch_still_unrolls_sequences() -> None:
    with pytest.raises(Exception, match="specialized it to be a constant"):
        torch.export.export(nn.GRU(4, 6).eval(), (torch.randn(5, 2, 4),), dynamic_shapes=STEPS)


@pytest.mark.filterwarnings("ignore:.*_flat_weights")
def test_torch_still_refuses_packed_sequences() -> None:
    with pytest.raises(Exception, match=r".+"):  # which one differs by version
        torch.export.export(Packed(nn.GRU(4, 6)).eval(), (torch.randn(5, 2, 4), torch.tensor([5, 3])))


@pytest.mark.parametrize(("make", "operator"), MODULES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("strict", [False, True])
def test_a_dynamic_length(make: Any, operator: Any, strict: bool) -> None:
    module = make().eval()
    x = torch.randn(5, 3, 4)
    kernels = dict(operator.py_kernels)
    dimension = 1 if module.batch_first else 0
    shapes = ({dimension: Dim("steps", min=2, max=64)},)
    with recurrent_shapes():
        program = torch.export.export(module, (x,), dynamic_shapes=shapes, strict=strict)
        eager, expected = module(x), None
    [node] = [node for node in program.graph.nodes if node.target == operator]
    expected = module(x)
    for got, want in zip(
        torch.utils._pytree.tree_leaves(eager), torch.utils._pytree.tree_leaves(expected), strict=True
    ):
        assert torch.equal(got, want)  # tensors that are not fake are computed
    for value, want in zip(node.meta["val"], torch.utils._pytree.tree_leaves(expected), strict=True):
        assert value.dim() == want.dim()
        assert value.shape[-1] == want.shape[-1]
        assert value.dtype == want.dtype
    assert operator.py_kernels == kernels


@pytest.mark.parametrize("total", [None, 5, 8])
def test_packed_sequences_are_one_operator(total: int | None) -> None:
    model = Packed(nn.LSTM(4, 6, num_layers=2, bidirectional=True), total, padding_value=-1.0).eval()
    x, lengths = torch.randn(5, 3, 4), torch.tensor([2, 5, 3])
    expected = model(x, lengths)
    with packed_sequences():
        program = torch.export.export(model, (x, lengths))
    assert [node.target for node in program.graph.nodes].count(MODULE_OPERATOR) == 1
    got = program.module()(x, lengths)
    for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)
    assert nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False).data.shape == (10, 4)


def test_states_are_taken_and_lists_of_lengths() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(4, 6, batch_first=True)

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True)
            out, state = self.cell(packed, h)
            return nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=5)[0], state

    model, args = Model().eval(), (torch.randn(2, 5, 4), torch.randn(1, 2, 6))
    expected = model(*args)
    with packed_sequences():
        program = torch.export.export(model, args)
    for a, b in zip(program.module()(*args), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("use", [lambda packed: packed.data, list], ids=["data", "parts"])
def test_other_uses_of_a_packed_sequence_are_refused(use: Any) -> None:
    with packed_sequences():
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor([5, 3]))
        with pytest.raises(CompileError, match="a packed sequence is padded while it is exported, and has no "):
            use(packed)


@pytest.mark.parametrize("module", [nn.GRU(4, 6), nn.LSTM(4, 6, proj_size=3).eval()], ids=["training", "proj_size"])
def test_modules_that_take_no_packed_sequence(module: nn.Module) -> None:
    with packed_sequences():
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor([5, 3]))
        with pytest.raises(CompileError, match=r"in eval\(\) mode and without proj_size: call model.eval\(\), or pad"):
            module(packed)
