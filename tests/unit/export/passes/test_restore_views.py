"""Tests of restore_views: before, after, what stays a copy and why, and the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import nn

from untorch.export.passes import PassReport
from untorch.export.passes.restore_views import restore_views, view_of

aten = torch.ops.aten

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice.Tensor": lambda x: aten.slice_copy.Tensor(x, 1, 1, 4),
    "view": lambda x: aten.view_copy(x, [2, 12]),
    "view.dtype": lambda x: aten.view_copy.dtype(x, torch.int32),
    "permute": lambda x: aten.permute_copy(x, [1, 0]),
    "transpose.int": lambda x: aten.transpose_copy.int(x, 0, 1),
    "t": lambda x: aten.t_copy(x),
    "select.int": lambda x: aten.select_copy.int(x, 0, -1),
    "expand": lambda x: aten.expand_copy(x, [3, 4, 6]),
    "squeeze": lambda x: aten.squeeze_copy(x),
    "squeeze.dim": lambda x: aten.squeeze_copy.dim(x, 0),
    "squeeze.dims": lambda x: aten.squeeze_copy.dims(x, [0]),
    "unsqueeze": lambda x: aten.unsqueeze_copy(x, 1),
    "diagonal": lambda x: aten.diagonal_copy(x),
    "alias": lambda x: aten.alias_copy(x),
    "detach": lambda x: aten.detach_copy(x),
    "as_strided": lambda x: aten.as_strided_copy(x, [2, 3], [2, 1], 1),
    "unfold": lambda x: aten.unfold_copy(x, 1, 3, 2),
    "_reshape_alias": lambda x: aten._reshape_alias_copy(x, [12, 2], [2, 1]),
    "narrow": lambda x: aten.narrow_copy(x, 0, 1, 2),
    "split.Tensor": lambda x: aten.split_copy.Tensor(x, 2, 1),
    "split_with_sizes": lambda x: aten.split_with_sizes_copy(x, [1, 5], 1),
    "unbind.int": lambda x: aten.unbind_copy.int(x, 0),
    "view_as_real": lambda x: aten.view_as_real_copy(aten.complex(x, x)),
    "view_as_complex": lambda x: aten.view_as_complex_copy(x.view(4, 3, 2)),
}  # fmt: skip


class One(nn.Module):
    """A copy in the middle, so that neither an input nor an output shares its memory."""

    def __init__(self, copy: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.copy = copy

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        made = self.copy(x.sin())
        made = made if isinstance(made, list | tuple) else [made]
        return [value.flatten() * 2 for value in made]


def run(model: nn.Module, *args: torch.Tensor, dynamic: Any = None) -> tuple[list[str], list[str], PassReport]:
    """Targets before and after, and the report; the module's results stay eager's, bit by bit."""
    module = unlift(model, *args, dynamic=dynamic)
    before = targets(module)
    report = restore_views(module)
    close(module)
    assert_same(module(*(a.clone() for a in args)), model(*(a.clone() for a in args)))
    return before, targets(module), report


@pytest.mark.parametrize("name", CASES)
def test_every_copy_becomes_its_view(name: str) -> None:
    copy = name.replace(".", "_copy.", 1) if "." in name else f"{name}_copy"
    before, after, report = run(One(CASES[name]), torch.randn(4, 6))
    assert copy in before
    assert after == [name if target == copy else target for target in before]
    assert len(report.changed) == 1
    assert not report.skipped


def test_the_mapping_comes_from_the_operators() -> None:
    """No operator with the tag is forgotten: each has a view, or none with its schema exists."""
    without = set()
    for qualified in torch._C._dispatch_get_all_op_names():
        name, _, overload = qualified.removeprefix("aten::").partition(".")
        if not qualified.startswith("aten::") or not name.endswith("_copy"):
            continue
        copy = getattr(getattr(aten, name), overload or "default")
        if torch.Tag.view_copy not in copy.tags or "out" in overload:
            continue
        view = view_of(copy)
        if view is None:
            without.add(name)
        else:
            assert view is getattr(getattr(aten, name.removesuffix("_copy")), overload or "default")
    assert not without, without


@pytest.mark.slow
def test_one_file(tmp_path: Path) -> None:
    class Copies(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = aten.permute_copy(x * 2, [1, 0])
            first, second = aten.split_copy.Tensor(y, 3, 0)
            third, _ = aten.split_copy.Tensor(y, 3, 0)
            return (first * second).sum(0), third + 1, aten.slice_copy.Tensor(y, 1, 0, 2).sum(0)

    x = torch.randn(4, 6)
    results, method = exported(Copies(), [x], tmp_path)
    assert_same(results, Copies()(x), rtol=1e-6, atol=1e-6)
    [report] = [r for r in method.passes if r.name == "restore_views"]
    assert report.changed == ["permute_copy", "split_copy", "slice_copy"]
    assert report.skipped == {"split_copy_1": "an output would get other strides"}


def test_parts_that_stay_copies() -> None:
    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return aten.split_copy.Tensor(x, 3, 1)

    before, after, report = run(Parts(), torch.randn(4, 6))
    assert before == ["split_copy.Tensor", "getitem", "getitem"]
    assert after == ["split.Tensor", "getitem", "clone", "getitem", "clone"]
    assert list(report.skipped.values()) == ["an output would become a view of an input or of a tensor of the module"]


def test_sizes_that_change() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    _, after, _ = run(One(lambda x: aten.permute_copy(x, [1, 0])), torch.randn(4, 6), dynamic=({0: batch},))
    assert "permute" in after


def outputs(kind: str, x: torch.Tensor, table: torch.Tensor) -> Any:
    y = x * 2
    return {
        "input": lambda: aten.view_copy(x, [24]),
        "view of an input": lambda: aten.slice_copy.Tensor(x.view(24), 0, 1, 5).view(2, 2),
        "buffer": lambda: (x, aten.view_copy(table, [24])),
        "outputs": lambda: (y, aten.view_copy(y, [24])),
        "strides": lambda: aten.permute_copy(y, [1, 0]),
        "strides later": lambda: aten.permute_copy(y, [1, 0]) + 1,
        "a view needs them": lambda: aten.permute_copy(y, [1, 0]).view(24).sum(),
        "source written": lambda: (aten.view_copy(y, [24]), y.add_(1).sum())[0] * 2,
        "source's base written": lambda: (aten.select_copy.int(y[1:], 0, 0), y.add_(1).sum())[0] * 2,
        "result written": lambda: aten.view_copy(y, [24]).add_(1) + y.sum(),
        "input written": lambda: (aten.view_copy(x, [24]) * 2, x.add_(1))[0] * 3,
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("input", "an output would become a view of an input or of a tensor of the module"),
        ("view of an input", "an output would become a view of an input or of a tensor of the module"),
        ("buffer", "an output would become a view of an input or of a tensor of the module"),
        ("outputs", "an output would become a view of another output"),
        ("strides", "an output would get other strides"),
        ("strides later", "an output would get other strides"),
        ("a view needs them", "view does not take the view's strides: "),
        ("source written", "the model writes into its source"),
        ("source's base written", "the model writes into its source"),
        ("result written", "the model writes into its result"),
        ("input written", "the model writes into its source"),
    ],
)
def test_copies_that_stay(kind: str, reason: str) -> None:
    class Stays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(24.0).view(4, 6))

        def forward(self, x: torch.Tensor) -> Any:
            return outputs(kind, x, self.table)

    before, after, report = run(Stays(), torch.randn(4, 6))
    assert after == before
    [got] = report.skipped.values()
    assert got.startswith(reason)


def test_an_output_with_the_same_strides_becomes_a_view() -> None:
    class Reshaped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return aten.view_copy(x * 2, [24])

    assert run(Reshaped(), torch.randn(4, 6))[:2] == (["mul.Tensor", "view_copy"], ["mul.Tensor", "view"])


def test_only_one_of_two_outputs_becomes_a_view() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 2
            return aten.view_copy(y, [24]), aten.view_copy(y, [12, 2])

    _, after, report = run(Two(), torch.randn(4, 6))
    assert after == ["mul.Tensor", "view", "view_copy"]
    assert list(report.skipped.values()) == ["an output would become a view of another output"]
