"""One tensor for two inputs, or a weight as an input: the package has all inputs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim, ShapesCollection

import untorch
from untorch.export import export
from untorch.export.shared_inputs import separate_inputs

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 5.0))
        self.register_buffer("buffer", torch.full((4,), 7.0))
        self.plain = torch.full((4,), 11.0)

    def forward(self, a: torch.Tensor, b: Any, *, c: torch.Tensor) -> torch.Tensor:
        return a - 10 * b["b"] + 100 * c + self.weight + self.buffer + self.plain


def call(a: float, b: float, c: float) -> float:
    return a - 10 * b + 100 * c + 23


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("which", ["input", "weight", "buffer", "plain"])
def test_every_input_counts(which: str, strict: bool, tmp_path: Path) -> None:
    model = Model().eval()
    x = torch.randn(4) if which == "input" else getattr(model, which)
    report = export(
        model, (x, {"b": x}), tmp_path / "model.pt2", kwargs={"c": x}, strict=strict, progress=False,
        dynamic_shapes={"a": None, "b": {"b": None}, "c": None},
    )  # fmt: skip
    found = [text for entry in report.methods["forward"].passes for text in entry.changed if "apart" in text]
    named = ["b['b']", "c"] if which == "input" else ["a", "b['b']", "c"]
    first = "a" if which == "input" else f"the model's {which}"
    assert found == [f"traced apart: {name}, the same tensor as {first} in the example" for name in named]
    with untorch.load(tmp_path / "model.pt2") as program:
        for values in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 3, 4)):
            a, b, c = (numpy.full(4, value, numpy.float32) for value in values)
            assert program(a, {"b": b}, c=c).tolist() == [call(*values)] * 4


@pytest.mark.slow
def test_attention_of_one_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)
    length = Dim("length", min=2, max=16)
    export(attention, (x, x, x), tmp_path / "model.pt2", progress=False, verify=True,
           dynamic_shapes={name: {1: length} for name in ("query", "key", "value")})  # fmt: skip
    with untorch.load(tmp_path / "model.pt2") as program:
        inputs = [torch.randn(2, 7, 16) for _ in range(3)]
        for given in (inputs, inputs[:1] * 3):
            with torch.no_grad():
                expected = attention(*given)[0].numpy()
            assert numpy.allclose(program(*(tensor.numpy() for tensor in given))[0], expected, atol=1e-5)


def test_copies_have_the_same_strides() -> None:
    whole = torch.randn(3, 4, requires_grad=True)
    for x in (whole, whole.detach().t(), torch.randn(1, 4).expand(3, 4), torch.empty(0, 3), torch.randn(8)[::2]):
        args, kwargs, _, notes = separate_inputs(nn.Identity(), (x, {"y": x}), None, None)
        assert args[0] is x and kwargs is None and not notes  # Identity has one input: torch.export says so
        args, _, _, notes = separate_inputs(Model(), (x, {"y": x, "z": [x]}), {"c": torch.ones(1)}, None)
        copies = [args[1]["y"], *args[1]["z"]]
        assert len(notes) == 2 and len({id(x), *map(id, copies)}) == 3
        for copy in copies:
            assert (torch.equal(copy, x) and copy.data_ptr() != x.data_ptr()) or not x.numel()
            assert (copy.stride(), copy.shape, copy.requires_grad) == (x.stride(), x.shape, x.requires_grad)


def test_what_is_not_shared_stays() -> None:
    x = torch.randn(8)
    given = (x[:4], {"y": x[:4], "z": 3}), {"c": torch.ones(1)}, {"a": {0: Dim.AUTO}}
    assert separate_inputs(Model(), *given) == (*given, [])


def test_a_collection_of_shapes(tmp_path: Path) -> None:
    x, shapes = torch.randn(4, 4), ShapesCollection()
    shapes[x] = {0: Dim("rows")}
    *_, found, notes = separate_inputs(Model(), (x, {"b": x}), {"c": torch.ones(4)}, shapes)
    assert len(notes) == 1
    assert found["a"] == found["b"]["b"] and found["a"][0].__name__ == "rows" and found["c"] is None


@pytest.mark.slow
def test_an_exported_program_warns(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return 2 * a - b

    x = torch.ones(3)
    program = torch.export.export(Two(), (x, x))
    text = "the exported program's inputs a and b were one tensor when torch.export traced it"
    with pytest.warns(UserWarning, match=text):
        export(program, path=tmp_path / "model.pt2", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export(torch.export.export(Two(), (x, x.clone())), path=tmp_path / "model.pt2", progress=False)
