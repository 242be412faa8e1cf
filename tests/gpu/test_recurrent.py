"""Exported recurrent layers: any length and batch, lengths of each sequence, states, graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import untorch
from untorch.export import export

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2}  # float32: TF32 of the input's linear layer
BATCH, STEPS = Dim("batch", min=1, max=64), Dim("steps", min=2, max=512)
MODULES: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(64, 200, 2, batch_first=True),
    "rnn": lambda: nn.RNN(64, 48, batch_first=True, nonlinearity="relu"),
}


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(64, 48, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], state


def close(got: Any, expected: Any, dtype: torch.dtype) -> None:
    expected = torch.utils._pytree.tree_leaves(expected)
    for a, b in zip(torch.utils._pytree.tree_leaves(got), expected, strict=True):
        torch.testing.assert_close(torch.from_dlpack(a), b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MODULES)
def test_any_length_and_batch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODULES[name]().eval().requires_grad_(False)
    wide = MODULES[name]().eval().requires_grad_(False).cuda()
    model = model.to(dtype).cuda()
    wide.load_state_dict(model.state_dict())
    report = export(
        model, (torch.randn(3, 7, 64, device="cuda").to(dtype),), tmp_path / "m.pt2", device="cuda", progress=False,
        dynamic_shapes=({0: BATCH, 1: STEPS},),
    )  # fmt: skip
    changed: Any = {entry.name: entry.changed for entry in report.methods["forward"].passes}
    assert len(changed["serve_recurrent"]) == 1
    with untorch.load(report.path) as program, untorch.stream(torch.cuda.current_stream()):
        for batch, steps in ((3, 7), (1, 300), (8, 33), (1, 2), (64, 40)):
            x = torch.randn(batch, steps, 64, device="cuda").to(dtype)
            expected = torch.utils._pytree.tree_map(lambda value: value.to(dtype), wide(x.float()))
            close(program.forward(x), expected, dtype)
        x = torch.randn(2, 50, 64, device="cuda").to(dtype)
        with program.forward.graph(x) as graph:
            for _ in range(3):
                x = torch.randn(2, 50, 64, device="cuda").to(dtype)
                called = [
                    torch.from_dlpack(value).clone() for value in torch.utils._pytree.tree_leaves(program.forward(x))
                ]
                for a, b in zip(torch.utils._pytree.tree_leaves(graph(x)), called, strict=True):
                    assert torch.equal(torch.from_dlpack(a), b)


def test_lengths(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ragged().eval().requires_grad_(False).cuda()
    report = export(
        model, (torch.randn(3, 7, 64, device="cuda"), torch.tensor([4, 7, 1], device="cuda")), tmp_path / "m.pt2",
        device="cuda", progress=False, dynamic_shapes=({0: BATCH, 1: STEPS}, {0: BATCH}),
    )  # fmt: skip
    with untorch.load(report.path) as program, untorch.stream(torch.cuda.current_stream()):
        for lengths in ([4, 7, 1], [31], [2, 90, 90, 5, 1, 17, 40, 3, 60]):
            x = torch.randn(len(lengths), max(lengths), 64, device="cuda")
            ends = torch.tensor(lengths)
            close(program.forward(x, ends.cuda()), model(x, ends), torch.float32)
