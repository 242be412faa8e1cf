"""Calls that are replayed by themselves: ``load(…, cuda_graphs=N)`` beside the same program without."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import untorch
from tests.bound import Bound
from untorch.export import export

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Linear(8, 10)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = self.body(x)
        return self.head(maps.mean((2, 3))), maps.transpose(1, 3)

    def count(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.numel()
        return self.seen * 1

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "net.pt2"
    torch.manual_seed(0)
    model, rows = Net().eval().requires_grad_(False).cuda(), Dim("rows", min=1, max=32)
    x = torch.randn(4, 3, 32, 32, device="cuda")
    export(
        methods={
            "forward": {"model": model, "args": (x,), "dynamic_shapes": ({0: rows},)},
            "count": {"model": Bound(model, "count"), "args": (x,)},
            "values": {"model": Bound(model, "values"), "args": (x,)},
        },
        path=path, device="cuda", progress=False,
    )  # fmt: skip
    return path


def test_results_are_those_of_calls(file: Path) -> None:
    with untorch.load(file) as plain, untorch.load(file, cuda_graphs=3) as program:
        held = []
        for rows in (4, 4, 4, 7, 7, 4, 2, 2, 1, 1, 7, 7, 4, 4):
            x = torch.randn(rows, 3, 32, 32, device="cuda")
            with untorch.stream(torch.cuda.current_stream()):
                got, want = program.forward(x), plain.forward(x)
            held.append((got, want))
        assert program.forward.graphs == (3, "")
        for got, want in held:  # later replays left them alone
            for mine, theirs in zip(got, want, strict=True):
                assert mine.shape == theirs.shape
                assert torch.equal(torch.from_dlpack(mine), torch.from_dlpack(theirs))
                assert torch.from_dlpack(mine).stride() == torch.from_dlpack(theirs).stride()
        x = np.random.default_rng(0).standard_normal((7, 3, 32, 32), np.float32)
        for mine, theirs in zip(program.forward(x), plain.forward(x), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_states_and_what_is_not_captured(file: Path) -> None:
    x = torch.ones(4, 3, 32, 32, device="cuda")
    with untorch.load(file, cuda_graphs=4) as program, program.session() as other:
        counts = [int(program.count(x).numpy()) for _ in range(5)]
        assert counts == [x.numel() * i for i in range(1, 6)]
        assert program.count.graphs == (1, "")
        assert int(other.count(x).numpy()) == x.numel()
        program.reset()
        assert int(program.count(x).numpy()) == x.numel()
        for _ in range(3):
            assert program.values(x).shape == (x.numel(),)
        count, text = program.values.graphs
        assert count == 0
        assert "which a graph cannot hold" in text


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight, x + self.weight


def test_views_of_weights_stay_views(tmp_path: Path) -> None:
    """As a stock package: in ours such results are copies in any case."""
    model, x = Weight().cuda(), torch.zeros(64, device="cuda")
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "weight.pt2"))
    with untorch.load(tmp_path / "weight.pt2") as plain, untorch.load(tmp_path / "weight.pt2", cuda_graphs=2) as loaded:
        called, results = [plain(x) for _ in range(4)], [loaded(x) for _ in range(4)]
        assert loaded.forward.graphs == (1, "")
        places = [len({torch.from_dlpack(one[0]).data_ptr() for one in some}) for some in (called, results)]
        assert places[0] == places[1]
        graph = loaded.forward.graph(x)
        views = [graph(x)[0], graph.share(loaded.forward, x)(x)[0]]
    for kept in (results[0][0], results[3][0], *views):  # they outlive the program
        assert torch.equal(torch.from_dlpack(kept), model.weight)


def test_threads(file: Path) -> None:
    given = [torch.randn(3, 3, 32, 32, device="cuda") for _ in range(6)]
    wrong: list[int] = []
    with untorch.load(file, num_runners=4) as plain, untorch.load(file, cuda_graphs=4, num_runners=4) as program:
        want = [torch.from_dlpack(plain.forward(x)[0]).clone() for x in given]
        torch.cuda.synchronize()

        def work(i: int) -> None:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), untorch.stream(stream):
                for _ in range(60):
                    got = torch.from_dlpack(program.forward(given[i])[0])
                    if not torch.equal(got, want[i]):
                        wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert program.forward.graphs == (1, "")
    assert not wrong
