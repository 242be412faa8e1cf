"""One seed for every random operator; read-only arrays for inputs that a model writes into."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

import untorch
from untorch.export import export


def test_the_seed_reaches_both_generators() -> None:
    from untorch.runtime.registry import random_generator

    untorch.manual_seed(11)
    assert untorch.initial_seed() == 11
    first = random_generator().random()
    untorch.manual_seed(11)
    assert random_generator().random() == first


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, None])
def test_a_seed_is_an_unsigned_integer(seed: object) -> None:
    with pytest.raises(untorch.InvalidArgumentError, match=r"^manual_seed: expected an integer from 0 to 2\*\*64 - 1"):
        untorch.manual_seed(seed)  # type: ignore[arg-type]


class Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_read_only_array_is_refused_where_the_model_writes(tmp_path: Path) -> None:
    export(Scale(), (torch.zeros(3),), tmp_path / "scale.pt2", progress=False)
    with untorch.load(tmp_path / "scale.pt2") as program:
        x = numpy.ones(3, numpy.float32)
        assert program.forward(x).tolist() == [3, 3, 3]
        assert x.tolist() == [2, 2, 2]
        x.setflags(write=False)
        with pytest.raises(untorch.InvalidArgumentError, match="read-only: the model writes into this input"):
            program.forward(x)
        assert x.tolist() == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_misaligned_memory_is_written_on_the_cpu(tmp_path: Path) -> None:
    export(Scale(), (torch.zeros(3),), tmp_path / "scale.pt2", progress=False)
    with untorch.load(tmp_path / "scale.pt2") as program:
        memory = untorch.zeros(8, "float32").numpy()
        for start in range(5):
            memory[:] = 1
            assert program.forward(memory[start : start + 3]).tolist() == [3, 3, 3]
            assert memory.sum() == 11
