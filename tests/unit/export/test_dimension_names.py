"""What the user calls a dimension is its name in the file and in messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import Dim

import untorch
from untorch.export import export
from untorch.export.dimension_names import rename_dimensions

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


class Joined(torch.nn.Module):
    def forward(self, x: torch.Tensor, pair: dict[str, torch.Tensor], *, scale: torch.Tensor) -> Any:
        return {"doubled": torch.cat([x, x]) * scale, "sum": pair["a"] + 1, "rest": pair["b"] * 2}


@pytest.mark.slow
def test_names_in_the_file(tmp_path: Path) -> None:
    """Also of a tensor in a dictionary, in sizes made of one, and of arguments by keyword; Dim.AUTO has no name."""
    x, a, b = torch.randn(3, 4), torch.randn(5), torch.randn(6)
    shapes = {"x": {0: Dim("batch", max=64)}, "pair": {"a": (Dim("length"),), "b": {0: Dim.AUTO}}, "scale": None}
    path = tmp_path / "m.pt2"
    export(
        Joined(), (x, {"a": a, "b": b}), path, kwargs={"scale": torch.ones(1)}, dynamic_shapes=shapes, progress=False
    )
    with untorch.load(path) as program:
        method = program.forward
        text = [str(spec) for spec in method.inputs]
        assert text[:2] == ["x: float32[batch, 4]", "pair['a']: float32[length]"]
        assert text[2].startswith("pair['b']: float32[s")
        assert [str(spec) for spec in method.outputs][:2] == ["doubled: float32[2*batch, 4]", "sum: float32[length]"]
        result = method(
            np.ones((2, 4), np.float32),
            {"a": np.ones(1, np.float32), "b": np.ones(2, np.float32)},
            scale=np.full(1, 2, np.float32),
        )
        assert result["doubled"].shape == (4, 4)
        with pytest.raises(untorch.InvalidArgumentError, match=r"dimension 0 \(batch\) must be from 0 to 64"):
            method(np.ones((65, 4), np.float32), {"a": a.numpy(), "b": b.numpy()}, scale=np.ones(1, np.float32))


@pytest.mark.slow
def test_one_name_for_one_symbol(tmp_path: Path) -> None:
    """Equal dimensions have the first name; derived ones are made of it."""

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y[::2]

    rows = Dim("rows", min=2, max=32)
    path = tmp_path / "m.pt2"
    export(Sum(), (torch.randn(4), torch.randn(8)), path, dynamic_shapes=({0: rows}, {0: 2 * rows}), progress=False)
    with untorch.load(path) as program:
        assert [str(spec) for spec in program.forward.inputs] == ["x: float32[rows]", "y: float32[2*rows]"]


def test_renaming() -> None:
    entries = [
        {"shape": [{"symbol": "s1", "min": 0, "max": None}, {"expr": "2*s1 + s10", "rpn": [2, "s1", "*", "s10", "+"]}, 3]},
        {"shape": [], "value": {"symbol": "s2"}},
        {"constant": 1},
        None,
    ]  # fmt: skip
    rename_dimensions(entries, {"s1": "n", "s2": "k"})
    assert entries[0]["shape"] == [  # type: ignore[index]
        {"symbol": "n", "min": 0, "max": None}, {"expr": "2*n + s10", "rpn": [2, "n", "*", "s10", "+"]}, 3
    ]  # fmt: skip
    assert entries[1] == {"shape": [], "value": {"symbol": "k"}}
