"""Graphs that a method keeps of its calls (``load(…, cuda_graphs=N)``), with a fake driver: fake_driver.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.bound import Bound
from tests.native.cuda.fake_gpu import found
from untorch.export import export

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own

WITHOUT = [0, "the program was loaded without cuda_graphs"]
PROLOGUE = """
def address(tensor):
    return tensor.__cuda_array_interface__["data"][0]
def events():
    return [line.split() for line in fake.fake_events().decode().splitlines()]
def replays():
    return sum(what == "replay" for what, _ in events())
"""


class Many(nn.Module):
    """A state, a written input, a result that is an input, and one that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 16)
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.up(x).relu(), x, x[:, :0] * 2

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.total += self.up(x).sum(0)
        return self.total * 2

    def fill(self, pool: torch.Tensor) -> torch.Tensor:
        pool += 1
        return pool.sum()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "many.pt2"
    x, rows = torch.randn(4, 32), Dim("rows", min=1, max=64)
    model = Many().eval()
    export(
        methods={
            "forward": {"model": model, "args": (x,), "dynamic_shapes": ({0: rows},)},
            "add": {"model": Bound(model, "add"), "args": (x,)},
            "fill": {"model": Bound(model, "fill"), "args": (x,)},
        },
        path=path, device="cuda", arch="sm_90", progress=False,
    )  # fmt: skip
    return path


def test_a_call_is_captured_when_its_shapes_come_again(driver: Path, many: Path) -> None:
    script = """
program = untorch.load(path, cuda_graphs=2)
method = program.forward
def given(rows):
    return untorch.zeros((rows, 32), "float32", "cuda")
seen = []
for rows in (4, 4, 4, 5, 5, 4, 6, 6, 6, 5):
    before = replays()
    method(given(rows))
    seen.append((rows, replays() - before, method.graphs[0]))
found["seen"], found["refusal"] = seen, method.graphs[1]
outputs = [method(given(6)) for _ in range(3)]
places = [address(one[0]) for one in outputs]
found["own"] = len(set(places)), [one[0].shape for one in outputs], [one[2].shape for one in outputs]
x = given(6)
found["alias"] = address(method(x)[1]) == address(x)
arrays = [method(np.ones((6, 32), np.float32)) for _ in range(2)]
found["numpy"] = [type(part).__name__ for part in arrays[0]], [part.shape for part in arrays[0]]
last = max(i for i, (what, _) in enumerate(events()) if what == "replay")
found["order"] = [what for what, _ in events()[last - 1:last + 5]]
program.close()
try:
    method(x)
except untorch.ClosedError as error:
    found["closed"] = str(error)
"""
    result = found(driver, many, PROLOGUE + script, GRAPHS=1)
    # Shapes, replays of the call, and graphs behind it. The oldest graph goes when a third one comes.
    assert result["seen"] == [
        [4, 0, 0], [4, 1, 1], [4, 1, 1], [5, 0, 1], [5, 1, 2], [4, 1, 2], [6, 0, 2], [6, 1, 2], [6, 1, 2], [5, 0, 2],
    ]  # fmt: skip
    assert result["refusal"] == ""
    assert result["own"] == [3, [[6, 16]] * 3, [[6, 0]] * 3]
    assert result["alias"]
    assert result["numpy"] == [["ndarray"] * 3, [[6, 16], [6, 32], [6, 0]]]
    # The copy comes before what the next replay waits for.
    assert result["order"][:3] == ["wait", "replay", "copy"]
    assert "record" in result["order"][3:]
    assert result["closed"] == "method 'forward': the program is closed"


def test_states_of_sessions(driver: Path, many: Path) -> None:
    script = """
program = untorch.load(path, cuda_graphs=4)
x = untorch.zeros((4, 32), "float32", "cuda")
with program.session() as first, program.session() as second:
    counts = []
    for session in (first, second, first, second, second):
        before = replays()
        session.add(x)
        counts.append(replays() - before)
    found["counts"] = counts
    found["graphs"] = first.add.graphs[0], second.add.graphs[0], program.add.graphs[0]
    # What has no state is the program's.
    first.forward(x), second.forward(x), program.forward(x)
    found["shared"] = first.forward.graphs[0], second.forward.graphs[0], program.forward.graphs[0]
"""
    result = found(driver, many, PROLOGUE + script, GRAPHS=1)
    assert result["counts"] == [0, 0, 1, 1, 1]
    assert result["graphs"] == [1, 1, 0]
    assert result["shared"] == [1, 1, 1]


def test_calls_that_are_not_captured(driver: Path, many: Path) -> None:
    script = """
with untorch.load(path) as program:
    x = untorch.zeros((4, 32), "float32", "cuda")
    for _ in range(3):
        program.forward(x)
    found["without"] = program.forward.graphs
with untorch.load(path, cuda_graphs=4) as program:
    for _ in range(3):
        program.fill(x)
        program.forward(x)
    found["written"], found["refused"] = program.fill.graphs, program.forward.graphs
found["replays"] = replays()
"""
    # This driver refuses captures.
    result = found(driver, many, PROLOGUE + script)
    assert result["without"] == WITHOUT
    assert result["written"] == [0, "the model writes into input 'x'"]
    count, text = result["refused"]
    assert count == 0
    assert text.startswith("beginning a capture: CUDA_ERROR")
    assert result["replays"] == 0
