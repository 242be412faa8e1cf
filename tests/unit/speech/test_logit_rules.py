"""Whisper's rules of what may follow, also beside those of transformers."""

from __future__ import annotations

import numpy as np
import pytest

from untorch.speech.logit_rules import LogitRules, log_softmax
from untorch.speech.seq2seq_settings import Seq2SeqSettings

SETTINGS = Seq2SeqSettings(
    "decode", "t", 40, 40, start=21, end=20, no_timestamps=24, seconds_per_token=0.02, suppress=(3,), suppress_first=(0, 20),
    max_first_time=5,
)  # fmt: skip
FIRST = 25  # the token of 0 seconds


def allowed(tokens: list[int], with_times: bool = True, logits: np.ndarray | None = None) -> list[int]:
    given = np.zeros(40, np.float32) if logits is None else logits
    found = LogitRules(SETTINGS, with_times).apply(given, tokens)
    return [int(i) for i in np.flatnonzero(np.isfinite(found))]


def test_without_times() -> None:
    assert allowed([], with_times=False) == [i for i in range(FIRST) if i not in (0, 3, 20)]
    assert allowed([5], with_times=False) == [i for i in range(FIRST) if i != 3]


def test_a_text_begins_with_a_time() -> None:
    assert allowed([]) == [*range(FIRST, FIRST + 6)]


def test_text_comes_between_times() -> None:
    likely = np.zeros(40, np.float32)
    likely[:FIRST] = 9  # else all times together win
    assert allowed([FIRST], logits=likely) == [i for i in range(FIRST) if i not in (3, 24)]
    # A segment's end: the next one's start, the same time or later, or the end of all.
    assert allowed([FIRST, 7, FIRST + 4], logits=likely) == [20, 21, 22, 23, *range(FIRST + 4, 40)]
    assert allowed([FIRST, 7, FIRST + 4, FIRST + 6], logits=likely) == [i for i in range(FIRST) if i not in (3, 24)]
    # Times rise.
    assert allowed([FIRST, 7], logits=likely)[-1] == 39
    assert FIRST not in allowed([FIRST, 7], logits=likely)


def test_times_that_are_likelier_together() -> None:
    logits = np.full(40, -9, np.float32)
    logits[7], logits[FIRST:] = 1.0, 0.0
    assert allowed([FIRST, 7], logits=logits) == [*range(FIRST + 1, 40)]
    logits[7] = 4.0
    assert 7 in allowed([FIRST, 7], logits=logits)


def test_equal_to_transformers() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.GenerationConfig(eos_token_id=20, suppress_tokens=[3], begin_suppress_tokens=[0, 20])
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 24, 5
    rng, prompt = np.random.default_rng(0), [21, 22]
    process = [
        transformers.SuppressTokensAtBeginLogitsProcessor([0, 20], begin_index=2),
        transformers.SuppressTokensLogitsProcessor([3]),
        transformers.WhisperTimeStampLogitsProcessor(config, begin_index=2),
    ]
    rules, tokens = LogitRules(SETTINGS, with_times=True), list[int]()
    for _ in range(30):
        logits = rng.normal(0, 2, 40).astype(np.float32)
        wanted = torch.from_numpy(logits)[None]
        for step in process:
            wanted = step(torch.tensor([prompt + tokens]), wanted)
        found = rules.apply(logits, tokens)
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted[0].numpy()))
        tokens = [] if found.argmax() in (20, 21, 22, 23) else [*tokens, int(found.argmax())]


def test_log_softmax_keeps_what_is_excluded() -> None:
    found = log_softmax(np.array([0.0, -np.inf, 0.0], np.float32))
    np.testing.assert_allclose(found, [-np.log(2), -np.inf, -np.log(2)], rtol=1e-6)
