"""The sampling kernel in Triton's interpreter against the reference, the reference against the host's sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreter import INTERPRETED, run_interpreted
from untorch.llm.logits import Logits
from untorch.llm.params import SamplingParams
from untorch.llm.sampler import Sampler, SamplerState
from untorch.llm.sampler import token_logprobs as logprobs_of_host
from untorch.ops.sampling.operator import (
    MOST_LOGPROBS,
    choose_tokens,
    launch_choose,
    launch_logprobs,
    token_logprobs,
)

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
WIDTH, VOCABULARY = 300, 280


def case(seed: int, count: int = 12) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((9, WIDTH)) * rng.choice([0.5, 3, 30])).astype(np.float32)
    logits[1] = np.round(logits[1])  # many are equal
    logits[2, rng.random(WIDTH) < 0.9] = -np.inf
    logits[3] = 0
    logits[4, VOCABULARY:] = 99
    return {
        "logits": torch.from_numpy(logits),
        "rows": torch.from_numpy(rng.integers(0, 9, count)),
        "temperature": torch.from_numpy(rng.choice([0, 0.3, 1, 2], count).astype(np.float32)),
        "top_k": torch.from_numpy(rng.choice([0, 1, 3, 50, 10_000], count)),
        "top_p": torch.from_numpy(rng.choice([1, 0.9, 0.5, 1e-6], count).astype(np.float32)),
        "min_p": torch.from_numpy(rng.choice([0, 0, 0.05, 1], count).astype(np.float32)),
        "uniform": torch.from_numpy(rng.random(count).astype(np.float32)),
        "vocabulary": VOCABULARY,
    }


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="runs the others")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.exhaustive
@pytest.mark.skipif(INTERPRETED, reason="runs the others")
def test_further_cases_in_the_interpreter() -> None:
    run_interpreted(__file__, "exhaustive")


@interpreted
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 4))]
)
def test_the_kernel(seed: int) -> None:
    given = case(seed)
    got = launch_choose(**given, wrap=lambda kernel: kernel, block=128)
    expected = choose_tokens(**given)
    # At the border of two tokens rounding decides: at most one by chance.
    differing = (got != expected).nonzero().flatten().tolist()
    assert len(differing) <= 1, [(int(got[i]), int(expected[i]), {k: v[i] for k, v in given.items() if k[0] in "tmur"})
                                 for i in differing]  # fmt: skip


@interpreted
def test_rows_without_a_token() -> None:
    given = case(0, 4)
    given["logits"][0], given["logits"][1, 5], given["logits"][2, 7] = -torch.inf, torch.nan, torch.inf
    given["rows"] = torch.arange(4)
    got = launch_choose(**given, wrap=lambda kernel: kernel, block=128)
    assert got[:3].tolist() == choose_tokens(**given)[:3].tolist() == [-1, -1, -1]
    assert got[3] >= 0


def logprobs_case(seed: int) -> dict[str, Any]:
    given = case(seed)
    rng = np.random.default_rng(seed)
    given["logits"][5, VOCABULARY - 3 : VOCABULARY] = 40  # among the last ones
    count = len(given["rows"])
    return {
        "logits": given["logits"],
        "rows": given["rows"],
        "tokens": torch.from_numpy(rng.integers(-1, VOCABULARY, count)),
        "wanted": torch.from_numpy(rng.integers(0, MOST_LOGPROBS + 1, count)),
        "vocabulary": VOCABULARY,
    }


@interpreted
@pytest.mark.parametrize("seed", range(2))
def test_the_kernel_of_logprobs(seed: int) -> None:
    given = logprobs_case(seed)
    got = launch_logprobs(**given, wrap=lambda kernel: kernel, block=128)
    for one, expected in zip(got, token_logprobs(**given), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
@pytest.mark.parametrize("seed", range(3))
def test_the_reference_of_logprobs_says_what_the_host_says(seed: int) -> None:
    given = logprobs_case(seed)
    logprobs, ranks, top, top_ids = token_logprobs(**given)
    for i, (row, token, wanted) in enumerate(
        zip(*(given[name].tolist() for name in ("rows", "tokens", "wanted")), strict=True)
    ):
        expected = logprobs_of_host(given["logits"][row, :VOCABULARY].numpy(), max(token, 0), MOST_LOGPROBS)
        assert ranks[i] == expected.rank
        np.testing.assert_allclose(logprobs[i], expected.logprob, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(top[i, :wanted], [one for _, one in expected.top][:wanted], rtol=1e-6, atol=1e-6)
        assert not top[i, wanted:].any() and not top_ids[i, wanted:].any()
        assert (
            given["logits"][row, top_ids[i, :wanted]].sort(descending=True).values
            == given["logits"][row, top_ids[i, :wanted]]
        ).all()


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
def test_fewer_tokens_than_logprobs() -> None:
    given = {"rows": torch.tensor([1]), "tokens": torch.tensor([2]), "wanted": torch.tensor([3]), "vocabulary": 3}
    *_, top, top_ids = token_logprobs(torch.tensor([[9.0] * 5, [1, 3, 2, 7, 7]]), **given)
    assert top_ids[0].tolist() == [1, 2, 0] + [0] * 17 and top.shape == (1, MOST_LOGPROBS)


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
@pytest.mark.parametrize("seed", range(4))
def test_the_reference_says_what_the_host_says(seed: int) -> None:
    given = case(seed)
    params = [
        SamplingParams(temperature=float(t), top_k=int(k), top_p=float(p), min_p=float(m), seed=i)
        for i, (t, k, p, m) in enumerate(
            zip(given["temperature"], given["top_k"], given["top_p"], given["min_p"], strict=True)
        )
    ]
    rows = given["rows"].tolist()
    draws = Sampler(VOCABULARY).draws([SamplerState(own) for own in params], rows)
    arrays = (draws.rows, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform)
    got = choose_tokens(given["logits"], *map(torch.from_numpy, arrays), VOCABULARY).tolist()
    states = [SamplerState(own) for own in params]
    expected = [one.token for one in Sampler(VOCABULARY).sample(Logits(given["logits"].numpy()), states, rows)]
    assert sum(a != b for a, b in zip(got, expected, strict=True)) <= 1, (got, expected)


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets")
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_compiles(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from untorch.ops.sampling.choose import choose_tokens as kernel
    from untorch.ops.sampling.logprobs import token_logprobs as logprobs_kernel

    types = {
        "logits_ptr": "*fp32", "rows_ptr": "*i64", "temperature_ptr": "*fp32", "top_k_ptr": "*i64",
        "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "uniform_ptr": "*fp32", "tokens_ptr": "*i64", "stride": "i32",
        "vocabulary": "i32", "BLOCK": "constexpr",
    }  # fmt: skip
    logprobs = {
        "logits_ptr": "*fp32", "rows_ptr": "*i64", "tokens_ptr": "*i64", "wanted_ptr": "*i64", "logprobs_ptr": "*fp32",
        "ranks_ptr": "*i64", "top_ptr": "*fp32", "top_ids_ptr": "*i64", "stride": "i32", "vocabulary": "i32",
        "most": "i32", "BLOCK": "constexpr",
    }  # fmt: skip
    target = GPUTarget("cuda", capability, 32)
    for function, signature in ((kernel, types), (logprobs_kernel, logprobs)):
        source = ASTSource(fn=function, signature=signature, constexprs={"BLOCK": 4096})
        assert triton.compile(source, target=target, options={"num_warps": 8, "num_stages": 1}).asm["ptx"]
