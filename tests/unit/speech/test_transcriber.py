"""A transcriber that is closed while it transcribes."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from untorch import ClosedError
from untorch.speech import Transcriber, Transcription
from untorch.speech.outputs import Control, Recognition, StepRecognition

SOUND = np.zeros(160, np.float32)


class Words:
    """A model that says one word a step."""

    engine = None
    parameters: frozenset[str] = frozenset()
    has_times = has_words = translates = False

    def __init__(self, *_: Any) -> None:
        self.closed = False

    def submit(self, samples: Any, request: Any) -> Recognition:
        control = Control(request.deadline)

        def steps() -> Generator[str, None, Transcription]:
            text = ""
            for word in ("one", "two"):
                if self.closed:
                    raise ClosedError("closed")
                text += word
                yield word
            return Transcription(text, 1.0)

        return StepRecognition(steps(), control)

    def close(self, drain: float = 0.0) -> None:
        self.closed = True


@pytest.fixture
def transcriber(monkeypatch: pytest.MonkeyPatch) -> Transcriber:
    program = types.SimpleNamespace(manifest={}, path="a.pt2", close=lambda: None)
    settings = types.SimpleNamespace(decoder="ctc", sampling_rate=16000, architecture="Words", languages=())
    monkeypatch.setattr("untorch.speech.transcriber.load", lambda *_, **__: program)
    monkeypatch.setattr("untorch.speech.transcriber.read_settings", lambda *_: settings)
    monkeypatch.setattr("untorch.speech.transcriber.CtcModel", Words)
    return Transcriber("a.pt2")


def test_closing_lets_audio_end(transcriber: Transcriber) -> None:
    running, left = transcriber.submit(SOUND), transcriber.submit(SOUND)
    next(iter(running))
    left.cancel()
    closing = threading.Thread(target=transcriber.close, args=(30,))
    closing.start()
    while not transcriber._closed:
        time.sleep(0.001)
    with pytest.raises(ClosedError, match="transcribe: the transcriber is closed"):
        transcriber.submit(SOUND)
    assert running.result().text == "onetwo"
    closing.join(30)
    assert not closing.is_alive()


def test_closing_has_an_end(transcriber: Transcriber) -> None:
    running = transcriber.submit(SOUND)
    next(iter(running))
    transcriber.close(0.05)
    assert running.done
    with pytest.raises(ClosedError):
        running.result()
