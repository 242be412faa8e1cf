"""``RunnerLinear`` and ``RunnerMoE``: how long their runners are registered, and a model that is compiled with them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from untorch.ops.nvfp4_moe import OPERATOR
from untorch.quant.moe import NVFP4MoE
from untorch.runtime.errors import InvalidArgumentError
from untorch.torch_compile import runners
from untorch.torch_compile.modules import RunnerLinear, RunnerMoE
from untorch.torch_compile.runners import find_runner, unregister_runner

# torch's own, while it imports its compiler
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Linear:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def run_linear(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Experts:
    """The operator's reference, behind a runner."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        self.given = given

    def run_moe(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        y: torch.Tensor = OPERATOR(rows, topk_weights.flatten(0, -2), topk_ids.flatten(0, -2).int(), *self.given)
        return y.view(hidden_states.shape)


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    monkeypatch.setattr(runners, "_entries", {})
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_linear() -> RunnerLinear:
    return RunnerLinear(Linear(torch.eye(3, 4)), 3)


@pytest.mark.slow
def test_the_end_of_a_module_is_the_end_of_its_id() -> None:
    module = make_linear()
    runner, runner_id = weakref.ref(module.runner), module.runner_id
    assert find_runner(runner_id) is runner()
    assert torch.equal(module(torch.arange(4.0)), torch.arange(3.0))
    del module
    gc.collect()
    assert runner() is None
    assert runners._entries == {}
    with pytest.raises(InvalidArgumentError, match=f"got {runner_id}, which was unregistered"):
        find_runner(runner_id)


@pytest.mark.slow
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_call_the_same_runner(duplicate: Any) -> None:
    module = make_linear()
    runner = weakref.ref(module.runner)
    other = duplicate(module)
    assert other.runner is module.runner
    del module
    gc.collect()
    assert torch.equal(other(torch.arange(4.0)), torch.arange(3.0))
    del other
    gc.collect()
    assert runner() is None
    assert runners._entries == {}


@pytest.mark.slow
def test_a_compiled_module_ends_too() -> None:
    module = make_linear()
    runner = weakref.ref(module.runner)
    compiled = torch.compile(module, fullgraph=True)
    assert torch.equal(compiled(torch.arange(4.0)), torch.arange(3.0))
    del module, compiled
    torch._dynamo.reset()
    gc.collect()
    assert runner() is None


@pytest.mark.slow
def test_a_runner_that_was_unregistered_by_hand() -> None:
    module = make_linear()
    unregister_runner(module.runner_id)
    with pytest.raises(InvalidArgumentError, match=r"^RunnerLinear: runner_id: expected the id of a registered runner"):
        _ = module.runner
    with pytest.raises(InvalidArgumentError, match=r"^run_linear: runner_id: .* which was unregistered"):
        module(torch.ones(4))
    del module
    gc.collect()


@pytest.mark.slow
def test_a_module_cannot_be_pickled() -> None:
    module = make_linear()
    with pytest.raises(InvalidArgumentError) as error:
        pickle.dumps(module)
    assert str(error.value) == (
        f"pickle: a module that calls runner {module.runner_id} cannot be pickled: the id means nothing in another "
        f"process; make the module there"
    )
    assert module.state_dict() == {}


@pytest.mark.slow
def test_a_runner_that_is_a_module_keeps_its_parameters() -> None:
    class Runner(nn.Linear):
        def run_linear(self, x: torch.Tensor) -> torch.Tensor:
            return self(x)

    runner = Runner(4, 3)
    module = RunnerLinear(runner, 3)
    x = torch.randn(2, 4)
    assert torch.equal(module(x), runner(x))
    assert list(module.parameters()) == []
    assert list(module.children()) == []


@pytest.mark.slow
def test_what_is_refused() -> None:
    with pytest.raises(InvalidArgumentError) as error:
        RunnerMoE(Linear(torch.ones(3, 4)), 4)  # type: ignore[arg-type]
    assert str(error.value) == "RunnerMoE: runner: expected an object with a method run_moe, got Linear"
    with pytest.raises(InvalidArgumentError) as error:
        RunnerLinear(Experts([]), 4)  # type: ignore[arg-type]
    assert str(error.value) == "RunnerLinear: runner: expected an object with a method run_linear, got Experts"
    for wrong in (0, -1, True, 3.0, None):
        with pytest.raises(InvalidArgumentError) as error:
            RunnerLinear(Linear(torch.ones(3, 4)), wrong)  # type: ignore[arg-type]
        assert str(error.value) == f"RunnerLinear: out_features: expected a positive integer, got {wrong!r}"
        with pytest.raises(InvalidArgumentError, match=r"^RunnerMoE: hidden_size: expected a positive integer, got"):
            RunnerMoE(Experts([]), wrong)  # type: ignore[arg-type]
    assert runners._entries == {}


@pytest.mark.slow
def test_repr() -> None:
    linear, moe = make_linear(), RunnerMoE(Experts([]), 4)
    assert repr(linear) == f"RunnerLinear(out_features=3, runner_id={linear.runner_id})"
    assert repr(moe) == f"RunnerMoE(hidden_size=4, runner_id={moe.runner_id})"


# A small transformer with experts.

WIDTH, HEADS, EXPERTS, TOP_K = 32, 4, 6, 2


def weights(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def packed(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).to(torch.float8_e4m3fn)

    return [
        packed(EXPERTS, 96, WIDTH // 2), scale(EXPERTS, 96, WIDTH // 16),
        packed(EXPERTS, WIDTH, 24), scale(EXPERTS, WIDTH, 3),
        torch.rand((EXPERTS, 2), generator=generator) / 8, torch.rand(EXPERTS, generator=generator) / 8,
    ]  # fmt: skip


class Layer(nn.Module):
    def __init__(self, seed: int, with_runners: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.router = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, EXPERTS)
        out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out: nn.Module = RunnerLinear(Linear(out.weight.detach()), WIDTH) if with_runners else out
        given = weights(seed)
        self.experts: nn.Module = RunnerMoE(Experts(given), WIDTH) if with_runners else NVFP4MoE(*given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(attended)
        hidden = self.norm2(x)
        topk_weights, topk_ids = self.router(hidden).softmax(-1).topk(TOP_K)
        return x + self.experts(hidden, topk_weights / topk_weights.sum(-1, keepdim=True), topk_ids)


class Transformer(nn.Module):
    def __init__(self, with_runners: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.layers = nn.ModuleList(Layer(seed, with_runners) for seed in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("with_runners", [False, True])
@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=pytest.mark.exhaustive)])
def test_a_compiled_transformer(with_runners: bool, mode: str) -> None:
    model = Transformer(with_runners).eval().requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    generator = torch.Generator().manual_seed(3)
    for length in (5, 9, 3, 17, 8):
        tokens = torch.randint(0, 50, (2, length), generator=generator)
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 2  # that of the first call, and one for all that follow


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_that_could_have_gradients(mode: Any) -> None:
    model, tokens = Transformer(True).eval(), torch.arange(12).view(2, 6)
    compiled = torch.compile(model, fullgraph=True)
    with mode():
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_both_kinds_of_experts_are_the_same_model() -> None:
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        a, b = (Transformer(with_runners).eval()(tokens) for with_runners in (False, True))
    assert torch.equal(a, b)


@pytest.mark.slow
def test_layers_that_are_compiled_alone_call_their_own_runners() -> None:
    model = Transformer(True).eval().requires_grad_(False)
    tokens = torch.arange(12).view(2, 6)
    expected = model(tokens)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)
