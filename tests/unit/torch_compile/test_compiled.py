"""``untorch::run_linear`` and ``untorch::run_moe`` under fake tensors, torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from untorch.runtime.errors import InvalidArgumentError
from untorch.torch_compile import runners
from untorch.torch_compile.runners import RUN_LINEAR, RUN_MOE, register_runner, registered, unregister_runner

from .runner_kinds import Experts, Gives, Scale

# torch's own, while it imports its compiler and exports
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runners, "_entries", {})
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_the_fake_never_touches_the_registry() -> None:
    x = torch.empty(2, 7, 5, device="meta")
    assert RUN_LINEAR(x, 10**9, 3).shape == (2, 7, 3)
    assert RUN_MOE(x.half(), x, x, 10**9, 4).shape == (2, 7, 4)
    assert RUN_MOE(x.half(), x, x, 10**9, 4).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 8).to(dtype)
    with registered(Gives(lambda x: x.mT.contiguous().mT * 2)) as runner_id:
        torch.library.opcheck(RUN_LINEAR, (x, runner_id, 8))
        torch.library.opcheck(RUN_LINEAR, (x[:, :, ::2], runner_id, 4))
    experts = Experts(8, 5)
    experts.weight = experts.weight.to(dtype)
    topk_weights, topk_ids = torch.rand(2, 3, 2).to(dtype), torch.ones(2, 3, 2, dtype=torch.int32)
    with registered(experts) as runner_id:
        torch.library.opcheck(RUN_MOE, (x, topk_weights, topk_ids, runner_id, 5))


@pytest.mark.slow
def test_rows_may_vary_without_another_graph() -> None:
    runner, experts = Scale(2), Experts(8, 4)
    linear, moe = register_runner(runner), register_runner(experts)

    @torch.compile(fullgraph=True)
    def model(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return RUN_MOE(RUN_LINEAR(x.sin(), linear, 8), topk_weights, topk_ids, moe, 4).cos()

    for rows in (5, 3, 17, 2, 100):
        x, topk_weights, topk_ids = torch.randn(rows, 8), torch.rand(rows, 2), torch.ones(rows, 2)
        expected = experts.run_moe(x.sin() * 2, topk_weights, topk_ids).cos()
        torch.testing.assert_close(model(x, topk_weights, topk_ids), expected)
    assert runner.calls == 5  # not one while compiling
    assert counters["stats"]["unique_graphs"] == 2  # that of the first call, and one for all that follow


@pytest.mark.slow
def test_a_result_that_is_the_input_does_not_become_one_with_it() -> None:
    with registered(Gives(lambda x: x)) as runner_id:
        model = torch.compile(lambda x: RUN_LINEAR(x, runner_id, 8).add_(1), fullgraph=True)
        x = torch.randn(4, 8)
        before = x.clone()
        assert torch.equal(model(x), before + 1)
        assert torch.equal(x, before)


@pytest.mark.slow
def test_a_graph_is_for_one_id() -> None:
    ids = [register_runner(Scale(factor)) for factor in (2, 3, 5)]

    @torch.compile(fullgraph=True)
    def model(x: torch.Tensor, runner_id: int) -> torch.Tensor:
        return RUN_LINEAR(x, runner_id, 4) + 1

    x = torch.ones(2, 4)
    for _ in range(2):
        for runner_id, factor in zip(ids, (2, 3, 5), strict=True):
            assert torch.equal(model(x, runner_id), x * factor + 1)
    unregister_runner(ids[0])
    again = register_runner(Scale(7))
    assert torch.equal(model(x, again), x * 7 + 1)
    with pytest.raises(InvalidArgumentError, match=f"got {ids[0]}, which was unregistered"):
        model(x, ids[0])


class OwnError(Exception):
    pass


@pytest.mark.parametrize("kind", [OwnError, KeyError, RuntimeError, KeyboardInterrupt])
def test_what_a_runner_raises_comes_out(kind: type[BaseException]) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise kind("the reason")

    with registered(Gives(fail)) as runner_id:
        for call in (RUN_LINEAR, torch.compile(lambda *args: RUN_LINEAR(*args) + 1, fullgraph=True)):
            with pytest.raises(kind, match="the reason") as error:
                call(torch.ones(2, 4), runner_id, 4)
            assert type(error.value) is kind


@pytest.mark.slow
def test_reduce_overhead() -> None:
    runner = Scale(2)
    with registered(runner) as runner_id:
        model = torch.compile(lambda x: RUN_LINEAR(x + 1, runner_id, 4) * 3, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            x = torch.randn(5, 4)
            torch.testing.assert_close(model(x), (x + 1) * 6)
    assert runner.calls == 3


def test_torch_export_keeps_one_node() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return RUN_LINEAR(x, runner_id, 4)

    rows = torch.export.Dim("rows")
    with registered(Scale(2)) as runner_id:
        program = torch.export.export(Net(), (torch.ones(3, 4),), dynamic_shapes=({0: rows},))
        program = program.run_decompositions()
        [node] = [node for node in program.graph.nodes if node.op == "call_function"]
        assert node.target == RUN_LINEAR
        assert node.args[1] == runner_id
        assert torch.equal(program.module()(torch.ones(7, 4)), torch.full((7, 4), 2.0))
    with pytest.raises(InvalidArgumentError, match="which was unregistered"):
        program.module()(torch.ones(7, 4))
