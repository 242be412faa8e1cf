"""Texts and times of made-up labels, against transformers' tokenizer; windows of long audio."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.speech_models import ctc_tokenizer
from untorch.speech.ctc import CtcText, _chunks
from untorch.speech.settings import SpeechSettings

SETTINGS = SpeechSettings(
    decoder="ctc", method="forward", sampling_rate=16000, chunk_samples=3200, frame_samples=320, overlap_samples=640,
    min_samples=400, blank_id=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> object:
    pytest.importorskip("transformers")
    return ctc_tokenizer()


def scores(labels: list[int]) -> np.ndarray:
    return 5 * np.eye(32, dtype=np.float32)[labels]


@pytest.mark.parametrize("seed", range(6))
def test_labels(seed: int, tokenizer: object) -> None:
    """In pieces of any size: what was given out is the text, and never taken back."""
    rng = np.random.default_rng(seed)
    labels = [int(label) for label in rng.choice([0, 0, 4, 4, 5, 6, 7, 8, 3], 200) for _ in range(rng.integers(1, 4))]
    wanted = tokenizer.decode(labels, output_word_offsets=True)  # type: ignore[attr-defined]
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}  # type: ignore[attr-defined]
    text = CtcText([by_id[i] for i in range(32)], SETTINGS, len(labels) * 0.02)
    pieces, at = [], 0
    while at < len(labels):
        count = int(rng.integers(1, 30))
        pieces.append(text.append(scores(labels[at : at + count])))
        at += count
    assert "".join(pieces) == text.text == wanted.text
    words = [word for segment in text.segments() for word in segment.words]
    assert [(word.text, round(word.start / 0.02), round(word.end / 0.02)) for word in words] == [
        (word["word"], word["start_offset"], word["end_offset"]) for word in wanted.word_offsets
    ]
    # As transformers' pipeline divides them.
    assert [word.start for word in words] == [word["start_offset"] * 320 / 16000 for word in wanted.word_offsets]


def test_phrases() -> None:
    """A pause of 0.8 seconds ends one, and so does its length."""
    text = CtcText(["", "", "", "", "|", "A", "B"], SETTINGS, 100.0)
    text.append(scores([5, 4, 6, 4, *[0] * 40, 5]))
    assert [one.text for one in text.segments()] == ["A B", "A"]
    first = text.segments()[0]
    assert (first.start, first.end) == (0.0, pytest.approx(0.06))
    assert first.tokens == (5, 6)
    assert first.avg_logprob == pytest.approx(-np.log(1 + 31 * np.exp(-5)), rel=1e-4)
    text = CtcText(["", "", "", "", "|", "A", "B"], SETTINGS, 100.0)
    text.append(scores([5, 4, 6, 4] * 50))
    assert max(len(one.text) for one in text.segments()) == 79
    assert " ".join(one.text for one in text.segments()) == text.text


def test_nothing_is_said() -> None:
    text = CtcText(["<pad>"], SETTINGS, 1.0)
    assert text.append(scores([0, 0, 31])) == ""
    assert text.segments() == ()


def test_lower_case() -> None:
    text = CtcText(["", "", "", "", "|", "A", "B"], replace(SETTINGS, lower_case=True), 1.0)
    assert text.append(scores([5, 0, 6])) == "ab"


@pytest.mark.parametrize("count", [400, 3200, 3201, 3840, 3841, 5119, 5120, 5121, 16000])
def test_windows(count: int) -> None:
    """Each frame is taken once, in order, with its neighbours; no window is longer than the model's, or too short."""
    end = 0
    for start, begin, stop, limit in _chunks(count, SETTINGS):
        assert begin == end
        assert (begin - start) % 320 == 0
        assert begin - start == (0 if begin == 0 else 640)
        assert 400 <= limit - start <= 3200
        assert limit == count or limit - stop == 640
        end = stop
    assert end == count
