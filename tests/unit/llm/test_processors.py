"""What changes logits, against straightforward computations."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.llm.params import SamplingParams
from untorch.llm.processors import LogitsProcessor, apply_changes, gather_changes

WIDTH = 70


class FakeMatcher:
    """Allows these tokens."""

    def __init__(self, tokens: set[int]) -> None:
        self.tokens = tokens

    def fill(self, mask: np.ndarray) -> None:
        bits = np.zeros(mask.size * 32, np.uint8)
        bits[list(self.tokens)] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)


def changed(logits: np.ndarray, processors: list[Any], matchers: list[Any] | None = None) -> np.ndarray:
    result = logits.copy()
    apply_changes(result, gather_changes(processors, matchers or [None] * len(processors), logits.shape[1], WIDTH))
    return result


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_sequence(data: st.DataObject) -> None:
    token = st.integers(0, WIDTH - 1)
    params = SamplingParams(
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.5, 0.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.5, -1.0])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.25])),
        logit_bias=data.draw(st.none() | st.dictionaries(token, st.sampled_from([-100.0, -1.0, 4.0]), max_size=4)),
        min_tokens=data.draw(st.integers(0, 4)),
    )
    prompt, output = data.draw(st.lists(token, max_size=9)), data.draw(st.lists(token, max_size=200))
    stops = data.draw(st.lists(token, max_size=3))
    processor = LogitsProcessor(params, prompt, stops)
    for one in output:
        processor.append(one)
    logits = np.random.default_rng(len(output)).standard_normal((2, WIDTH)).astype(np.float32)
    expected = logits.copy()
    for one in {*prompt, *output} if params.has_penalties else set():
        value = expected[1, one]
        expected[1, one] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for one in set(output):
        expected[1, one] -= params.frequency_penalty * output.count(one) + params.presence_penalty
    for one, bias in (params.logit_bias or {}).items():
        expected[1, one] += bias
    if len(output) < params.min_tokens:
        expected[1, stops] = -np.inf
    got = changed(logits, [None, processor])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert processor.is_active or np.array_equal(got, logits)


def test_a_batch() -> None:
    logits = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)
    first = LogitsProcessor(SamplingParams(logit_bias={3: 2.0}), [], ())
    last = LogitsProcessor(SamplingParams(frequency_penalty=1.0), [1], ())
    last.append(69)
    matchers: list[Any] = [None, None, FakeMatcher({3, 31, 32, 69}), None, FakeMatcher(set())]
    got = changed(logits, [first, None, first, None, last], matchers)
    assert got[0, 3] == logits[0, 3] + np.float32(2) and np.array_equal(np.delete(got[0], 3), np.delete(logits[0], 3))
    assert np.array_equal(got[[1, 3]], logits[[1, 3]])
    assert np.flatnonzero(np.isfinite(got[2])).tolist() == [3, 31, 32, 69] and got[2, 3] == logits[2, 3] + np.float32(2)
    assert np.isneginf(got[4]).all()


def test_arrays_of_more_rows() -> None:
    matchers: list[Any] = [None, FakeMatcher({1})]
    masks, rows, at, factor, shift = gather_changes([None, None], matchers, WIDTH, WIDTH).arrays(4)
    assert rows.tolist() == [0, 1, 0, 0] and masks.tolist() == [[-1, -1, -1], [2, 0, 0]]
    assert at.tolist() == [0, 0] and factor.tolist() == [1, 1] and shift.tolist() == [0, 0]
    assert (masks.dtype, rows.dtype, at.dtype, factor.dtype, shift.dtype) == (
        np.int32, np.int64, np.int64, np.float32, np.float32,
    )  # fmt: skip


def test_the_method_of_a_package_does_the_same() -> None:
    import torch

    from untorch.export.lm.choose import ProcessLogits

    rng = np.random.default_rng(1)
    logits = rng.standard_normal((6, WIDTH)).astype(np.float32)
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={5: 1.0, 9: -100.0}, min_tokens=3)
    processors = [LogitsProcessor(params, [1, 2, 5], (7, 8)), None, LogitsProcessor(params, [], ())]
    for one in (1, 1, 40):
        processors[2].append(one)  # type: ignore[union-attr]
    matchers: list[Any] = [FakeMatcher({1, 7, 9, 33, 64, 65}), None, None]
    changes = gather_changes(processors, matchers, WIDTH, 66)
    rows = np.array([4, 1, 0, 2])
    expected = logits[rows]
    apply_changes(expected[:3], changes)
    arrays = map(torch.from_numpy, (logits, rows, *changes.arrays(4)))
    got = ProcessLogits(66)(*arrays).numpy()
    assert np.array_equal(got[:, :66], expected[:, :66])
