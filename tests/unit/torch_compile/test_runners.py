"""``untorch::run_linear`` and ``untorch::run_moe``: the registry, and what a runner may give."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from untorch.runtime.errors import InvalidArgumentError
from untorch.torch_compile import runners
from untorch.torch_compile.runners import (
    RUN_LINEAR,
    RUN_MOE,
    RunnerError,
    find_runner,
    register_runner,
    registered,
    unregister_runner,
)

from .runner_kinds import Experts, Gives, Scale


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "_entries", {})


def test_the_schemas() -> None:
    assert str(RUN_LINEAR._schema) == "untorch::run_linear(Tensor x, int runner_id, SymInt out_features) -> Tensor"
    assert str(RUN_MOE._schema) == (
        "untorch::run_moe(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, int runner_id, SymInt "
        "hidden_size) -> Tensor"
    )


# The registry.


def test_ids_are_never_given_again() -> None:
    runner = Scale(1)
    first = register_runner(runner)
    second = register_runner(runner)
    assert second > first > 0
    assert find_runner(first) is find_runner(second) is runner
    unregister_runner(second)
    assert register_runner(runner) > second
    assert find_runner(first) is runner


def test_unregistering_twice_is_an_error() -> None:
    kept = register_runner(Scale(1))
    gone = register_runner(Scale(2))
    unregister_runner(gone)
    with pytest.raises(InvalidArgumentError) as error:
        unregister_runner(gone)
    assert str(error.value) == (
        f"unregister_runner: runner_id: expected the id of a registered runner, got {gone}, which was unregistered; "
        f"known here are: {kept} (Scale)"
    )


def test_an_unknown_id_names_the_known_ones() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(InvalidArgumentError) as error:
        RUN_LINEAR(x, 10**9, 3)
    assert str(error.value) == (
        "run_linear: runner_id: expected the id of a registered runner, got 1000000000; known here are: none"
    )
    ids = [register_runner(Scale(1)) for _ in range(2)]
    ids.append(register_runner(Experts(3, 3)))
    with pytest.raises(InvalidArgumentError) as error:
        RUN_MOE(x, x, x, -1, 3)
    assert str(error.value) == (
        f"run_moe: runner_id: expected the id of a registered runner, got -1; known here are: {ids[0]} (Scale), "
        f"{ids[1]} (Scale), {ids[2]} (Experts)"
    )
    for _ in range(20):
        register_runner(Scale(1))
    with pytest.raises(InvalidArgumentError, match=rf"{ids[0] + 15} \(Scale\) and 7 more$"):
        find_runner(0)


@pytest.mark.parametrize("wrong", ["1", None, [1]])
def test_an_id_that_is_no_number(wrong: Any) -> None:
    for function in (find_runner, unregister_runner):
        with pytest.raises(InvalidArgumentError) as error:
            function(wrong)
        assert str(error.value) == (
            f"{function.__name__}: runner_id: expected the id of a registered runner, got {wrong!r}; known here are: none"
        )


def test_registered_ends_with_the_block() -> None:
    with registered(Scale(3)) as runner_id:
        assert torch.equal(RUN_LINEAR(torch.ones(2), runner_id, 2), torch.full((2,), 3.0))
    with pytest.raises(InvalidArgumentError, match=f"got {runner_id}, which was unregistered"):
        RUN_LINEAR(torch.ones(2), runner_id, 2)
    with registered(Scale(3)) as runner_id:
        unregister_runner(runner_id)
    with pytest.raises(KeyError), registered(Scale(3)) as runner_id:
        raise KeyError
    with pytest.raises(InvalidArgumentError):
        find_runner(runner_id)


@pytest.mark.slow
def test_the_registry_keeps_a_runner_alive() -> None:
    runner_id = register_runner(Scale(2))
    gc.collect()
    assert torch.equal(RUN_LINEAR(torch.ones(2), runner_id, 2), torch.full((2,), 2.0))


@pytest.mark.slow
def test_a_weak_reference_does_not() -> None:
    runner = Scale(2)
    runner_id = register_runner(runner, weak=True)
    assert torch.equal(RUN_LINEAR(torch.ones(2), runner_id, 2), torch.full((2,), 2.0))
    del runner
    gc.collect()
    with pytest.raises(RunnerError) as error:
        RUN_LINEAR(torch.ones(2), runner_id, 2)
    assert str(error.value) == (
        f"run_linear: runner {runner_id} (Scale) has gone: it was registered with weak=True and nothing else kept it; "
        f"keep it as long as models call it, or leave weak=True out"
    )
    unregister_runner(runner_id)
    with pytest.raises(InvalidArgumentError, match="which was unregistered"):
        find_runner(runner_id)


class Slots:
    __slots__ = ()

    def run_linear(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_what_cannot_be_registered() -> None:
    for wrong, name in ((object(), "object"), (None, "NoneType"), (Scale, "the class Scale")):
        with pytest.raises(InvalidArgumentError) as error:
            register_runner(wrong)  # type: ignore[arg-type]
        assert str(error.value) == (
            f"register_runner: runner: expected an object with a method run_linear or run_moe, got {name}"
        )
    with registered(Slots()) as runner_id:
        assert torch.equal(RUN_LINEAR(torch.zeros(2), runner_id, 2), torch.ones(2))
    with pytest.raises(InvalidArgumentError) as error:
        register_runner(Slots(), weak=True)
    assert str(error.value) == (
        'register_runner: runner: Slots cannot be referenced weakly: add "__weakref__" to its __slots__, or leave '
        "weak=True out"
    )


def test_threads() -> None:
    failures: list[BaseException] = []
    ids: list[list[int]] = [[] for _ in range(8)]

    def work(place: int) -> None:
        try:
            for i in range(200):
                runner_id = register_runner(Scale(place))
                ids[place].append(runner_id)
                assert find_runner(runner_id).factor == place
                with pytest.raises(InvalidArgumentError, match="known here are"):
                    find_runner(-1)
                if i % 2:
                    unregister_runner(runner_id)
        except BaseException as error:  # an assertion in a thread would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len({runner_id for part in ids for runner_id in part}) == 1600
    assert len(runners._entries) == 800


@pytest.mark.slow
def test_a_runner_that_another_call_removes_ends_its_call() -> None:
    def remove(x: torch.Tensor) -> torch.Tensor:
        unregister_runner(runner_id)
        gc.collect()
        return x + 1

    runner_id = register_runner(Gives(remove))
    assert torch.equal(RUN_LINEAR(torch.zeros(2), runner_id, 2), torch.ones(2))


# Results.


@hypothesis.given(
    rows=st.lists(st.integers(0, 4), max_size=3),
    size=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    layout=st.sampled_from(["plain", "transposed", "sliced", "expanded", "offset", "one"]),
    seed=st.integers(0, 2**31),
)
@hypothesis.settings(deadline=None, max_examples=80)
def test_any_strides_of_a_result(rows: list[int], size: int, dtype: torch.dtype, layout: str, seed: int) -> None:
    values = torch.randn((*rows, size), generator=torch.Generator().manual_seed(seed)).to(dtype)

    def strided() -> torch.Tensor:
        if layout == "transposed" and rows:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "sliced":
            return torch.cat((values, values), -1)[..., :size]
        if layout == "expanded":
            return values[..., :1].expand(values.shape)
        if layout == "offset":  # contiguous, and not aligned
            return torch.cat((torch.zeros(1, dtype=dtype), values.flatten()))[1:].view(values.shape)
        if layout == "one":  # strides that mean nothing
            return values.as_strided(
                values.shape, [7 if n == 1 else s for n, s in zip(values.shape, values.stride(), strict=True)]
            )
        return values

    given = strided()
    expected = given.clone()
    with registered(Gives(lambda x: given)) as runner_id:
        y = RUN_LINEAR(torch.zeros((*rows, 5), dtype=dtype), runner_id, size)
    assert torch.equal(y, expected)
    assert y.dtype == dtype
    assert y.stride() == torch.empty(y.shape).stride()
    assert y.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    "alias",
    [lambda x: x, lambda x: x[:], lambda x: x.detach(), lambda x: torch.from_numpy(x.numpy()), lambda x: x.data],
)
def test_a_result_in_memory_of_an_input_is_copied(alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(4, 8)
    with registered(Gives(alias)) as runner_id:
        y = RUN_LINEAR(x, runner_id, 8)
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()


def test_a_moe_result_in_memory_of_the_weights_is_copied() -> None:
    class Weights:
        def run_moe(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
            return topk_weights

    topk_weights = torch.rand(4, 2)
    with registered(Weights()) as runner_id:
        y = RUN_MOE(torch.ones(4, 8), topk_weights, torch.ones(4, 2).int(), runner_id, 2)
    assert torch.equal(y, topk_weights)
    assert y.data_ptr() != topk_weights.data_ptr()


def test_a_result_of_its_own_memory_is_not_copied() -> None:
    made: list[int] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        made.append(y.data_ptr())
        return y

    with registered(Gives(make)) as runner_id:
        assert RUN_LINEAR(torch.ones(4, 8), runner_id, 8).data_ptr() == made[0]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (torch.ones(2, 4), "expected a result float32 [2, 3] on cpu, got float32 [2, 4] on cpu"),
        (torch.ones(2, 1, 3), "got float32 [2, 1, 3] on cpu"),
        (torch.ones(2, 3).half(), "expected a result float32 [2, 3] on cpu, got float16 [2, 3] on cpu"),
        (torch.ones(2, 3, device="meta"), "expected a result float32 [2, 3] on cpu, got float32 [2, 3] on meta"),
        (torch.ones(2, 3).to_sparse(), "got float32 [2, 3] on cpu, torch.sparse_coo"),
        (None, "expected a tensor [2, 3] as its result, got NoneType"),
        ((torch.ones(2, 3),), "expected a tensor [2, 3] as its result, got tuple"),
    ],
)
def test_a_wrong_result(result: Any, text: str) -> None:
    with registered(Gives(lambda x: result)) as runner_id:
        with pytest.raises(RunnerError) as error:
            RUN_LINEAR(torch.ones(2, 5), runner_id, 3)
        assert str(error.value).startswith(f"run_linear: runner {runner_id} (Gives): expected a")
        assert text in str(error.value)


def test_a_runner_without_the_method() -> None:
    x = torch.ones(2, 3)
    linear, experts = register_runner(Scale(1)), register_runner(Experts(3, 3))
    with pytest.raises(RunnerError) as error:
        RUN_MOE(x, x, x, linear, 3)
    assert str(error.value) == (
        f"run_moe: runner {linear} (Scale) has no method run_moe; call untorch::run_linear for it"
    )
    with pytest.raises(RunnerError, match=r"\(Experts\) has no method run_linear; call untorch::run_moe for it$"):
        RUN_LINEAR(x, experts, 3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_arguments_that_are_refused(device: str) -> None:
    x, scalar = torch.ones(2, 3, device=device), torch.ones((), device=device)
    with registered(Scale(1)) as runner_id:
        with pytest.raises(ValueError, match="^run_linear: x: expected at least one dimension, got a scalar$"):
            RUN_LINEAR(scalar, runner_id, 3)
        with pytest.raises(ValueError, match="^run_linear: out_features: expected a size, got -1$"):
            RUN_LINEAR(x, runner_id, -1)
        with pytest.raises(ValueError, match="^run_moe: hidden_states: expected at least one dimension, got a scalar$"):
            RUN_MOE(scalar, x, x, runner_id, 3)
        with pytest.raises(ValueError, match="^run_moe: hidden_size: expected a size, got -3$"):
            RUN_MOE(x, x, x, runner_id, -3)


def test_gradients_do_not_flow() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    with registered(Gives(lambda x: x @ weight)) as runner_id:
        assert not RUN_LINEAR(torch.ones(2, 3), runner_id, 3).requires_grad
        y = RUN_LINEAR(torch.ones(2, 3, requires_grad=True), runner_id, 3)
        assert y.requires_grad
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            y.sum().backward()
    with registered(Gives(lambda x: torch.nn.Parameter(x + 1))) as runner_id:
        y = RUN_LINEAR(torch.ones(2, 3), runner_id, 3)
        assert type(y) is torch.Tensor
        assert not y.requires_grad
