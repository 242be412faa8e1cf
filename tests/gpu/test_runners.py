"""Runners under torch.compile(mode="reduce-overhead"): their kernels are captured, and replays do not call them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from untorch.torch_compile import RunnerLinear, RunnerMoE

ROOT = Path(__file__).resolve().parents[2]


class Int8Linear:
    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().amax(1) / 127
        self.weight = (weight / self.scale[:, None]).round().to(torch.int8)
        self.calls = 0

    def run_linear(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (x @ self.weight.T.to(x.dtype)) * self.scale.to(x.dtype)


class Dense:
    """All experts of every token: nothing is chosen by values."""

    def __init__(self, experts: int, k: int) -> None:
        self.weight = torch.randn(experts, k, k, device="cuda") / k**0.5
        self.calls = 0

    def run_moe(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        gates = torch.zeros(hidden_states.shape[0], self.weight.shape[0], device="cuda")
        gates.scatter_(1, topk_ids.long(), topk_weights.float())
        return torch.einsum("te,tk,ekn->tn", gates, hidden_states, self.weight)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_kernels_of_runners_are_captured_and_replayed() -> None:
    runner, experts = Int8Linear(torch.randn(64, 64, device="cuda")), Dense(4, 64)
    linear, moe = RunnerLinear(runner, 64), RunnerMoE(experts, 64)

    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return moe(linear(x.sin()).relu(), weights, ids) * 2

    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")

    def given(i: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(device="cuda").manual_seed(i)
        x = torch.randn(16, 64, generator=generator, device="cuda")
        weights = torch.rand(16, 2, generator=generator, device="cuda")
        ids = torch.rand(16, 4, generator=generator, device="cuda").argsort(1)[:, :2].int()
        return x, weights, ids

    with torch.no_grad():
        for i in range(3):  # a warm-up, the capture, a replay
            compiled(*given(i))
        calls = runner.calls, experts.calls
        results = [compiled(*given(i)).clone() for i in range(3, 9)]
        assert (runner.calls, experts.calls) == calls, "replays do not call the runners"
        for i, got in enumerate(results, 3):
            torch.testing.assert_close(got, model(*given(i)), rtol=1e-4, atol=1e-4)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert calls[0] >= 2


def test_another_number_of_tokens_is_another_graph() -> None:
    runner = Int8Linear(torch.randn(64, 64, device="cuda"))
    model = nn.Sequential(RunnerLinear(runner, 64), nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for rows in (4, 9, 4, 9, 4, 9, 4, 9, 4):
            x = torch.randn(rows, 64, device="cuda")
            torch.testing.assert_close(compiled(x).clone(), model(x), rtol=1e-4, atol=1e-4)


WAITS = """
    import torch
    from untorch.torch_compile import RunnerLinear

    class Waits:
        def run_linear(self, x):
            return x * float(x.amax())  # reads a value on the CPU

    compiled = torch.compile(RunnerLinear(Waits(), 8), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            x = torch.ones(4, 8, device="cuda")
            try:
                compiled(x)
            except Exception as error:
                print(type(error).__name__, "|", " ".join(str(error).split()))
                break
        else:
            print("no error")
"""


def test_a_runner_that_waits_for_the_gpu_cannot_be_captured() -> None:
    """In a process of its own: the capture is lost, and torch's allocator with it."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WAITS)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "captur" in done.stdout, done.stdout + done.stderr[-2000:]
