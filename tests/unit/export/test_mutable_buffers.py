"""Which buffers are mutable, and which methods share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from untorch.export import CompileError, export
from untorch.export.method import Method, Traced
from untorch.export.mutable_buffers import MutableBuffers, share_buffers
from untorch.export.mutations import WRITTEN_ELSEWHERE, find_mutations


class Counter(nn.Module):
    def __init__(self, start: float = 0.0, size: int = 3) -> None:
        super().__init__()
        self.register_buffer("count", torch.full((size,), start))


class Adds(Counter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


class Reads(Counter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.count


def traced(name: str, module: nn.Module, size: int = 3) -> Method:
    program = torch.export.export(module, (torch.ones(size),))
    method = Method(name, module, (torch.ones(size),))
    method.traced = Traced(program, program.module())  # type: ignore[arg-type]
    return method


def test_a_reader_learns_of_its_writer() -> None:
    adds, reads, other = traced("adds", Adds()), traced("reads", Reads()), traced("other", Reads(size=4), 4)
    share_buffers([adds, reads, other])
    assert [m.module.meta[WRITTEN_ELSEWHERE] for m in (adds, reads, other)] == [set(), {"count"}, set()]
    assert find_mutations(reads.module.graph).attributes == {"count"}
    assert find_mutations(other.module.graph).attributes == frozenset()  # another size is another buffer


def constant(fqn: str, weight: int = 0, **more: Any) -> dict[str, Any]:
    return {"fqn": fqn, "dtype": "float32", "shape": [3], "weight": weight, "mutated": True, **more}


def test_what_has_one_name_or_one_memory_is_one_buffer() -> None:
    table = MutableBuffers()
    first = [constant("a"), constant("b"), constant("c"), constant("d", mutated=False)]
    table.add_method("one", "cpu", first, [10, 10, 20, 30])  # a and b lie in one place
    second = [constant("b"), constant("c", shape=[1, 3])]
    table.add_method("two", "cpu", second, [1, 2])
    assert [c.get("state") for c in first] == [0, 0, 1, None]
    assert [c["state"] for c in second] == [0, 2]
    assert table.entries == [
        {"fqn": "a", "weight": 0, "methods": ["one", "two"]},
        {"fqn": "c", "weight": 0, "methods": ["one"]},
        {"fqn": "c", "weight": 0, "methods": ["two"]},
    ]


def test_what_does_not_fit_together() -> None:
    table = MutableBuffers()
    table.add_method("one", "cpu", [constant("a")], [1])
    with pytest.raises(CompileError, match="'one' and 'two' both have a mutable buffer 'a', with different values"):
        table.add_method("two", "cpu", [constant("a", weight=1)], [1])
    with pytest.raises(CompileError, match="which the first has on cpu and the second on cuda"):
        table.add_method("three", "cuda", [constant("a")], [1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_different_initial_values_are_refused(tmp_path: Path) -> None:
    x = torch.ones(3)
    with pytest.raises(CompileError, match="a session has one"):
        export(methods={"one": (Adds(), (x,)), "two": (Adds(5.0), (x,))}, path=tmp_path / "m.pt2", progress=False)
    assert not list(tmp_path.iterdir())
