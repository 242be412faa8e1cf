"""Automatic speech recognition: audio to text, by ``untorch.speech``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from untorch.pipeline.base import Pipeline, numbered
from untorch.pipeline.settings import Settings
from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.program import Program
from untorch.speech.outputs import Transcription
from untorch.speech.settings import read_settings
from untorch.speech.transcriber import Transcriber

__all__ = ["TASK", "SpeechRecognition"]

TASK = "automatic-speech-recognition"
_OF_INPUTS = ("pipeline: inputs: ", "audio: ", "transcribe: audio: ")  # begins of texts of errors


class SpeechRecognition(Pipeline):
    """``{"text": …}`` of a path, a file's bytes or samples; with return_timestamps also "chunks" with their times.

    return_timestamps: True: Whisper's segments. "word": the words of CTC models. language, task ("transcribe" or
    "translate"), prompt, temperature, seed: as for ``Transcriber.transcribe``. sampling_rate is that of arrays.
    """

    options = ("return_timestamps", "language", "task", "prompt", "temperature", "seed", "sampling_rate")

    def __init__(self, program: Program, owned: bool, transcriber: Transcriber | None = None) -> None:
        architecture = read_settings(program.manifest, program.path).architecture
        super().__init__(program, Settings({"task": TASK, "architecture": architecture}, program.path), owned)
        self._owns_transcriber = transcriber is None
        self.transcriber = Transcriber(program) if transcriber is None else transcriber

    def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> list[Any]:
        """See the class. Each audio is a request of its own."""
        given = dict(options)
        times = given.pop("return_timestamps", False)
        self._check(times)
        if times is True:
            given["timestamps"] = True
        found = []
        for index, source in enumerate(inputs):
            with numbered(index if is_list else None, _OF_INPUTS):
                found.append(_result(self.transcribe(source, **given), times))
        return found

    def transcribe(self, source: Any, **options: Any) -> Transcription:
        """As ``Transcriber.transcribe``. A server, whose requests end, puts its own function here."""
        return self.transcriber.transcribe(source, **options)

    def _check(self, times: Any) -> None:
        """Raises InvalidArgumentError for times that the model does not know."""
        known: list[Any] = [False]
        if self.transcriber.has_words:
            known.append("word")
        elif self.transcriber.has_times:
            known.append(True)
        if times is not None and not any(times is one or (times == one and isinstance(times, str)) for one in known):
            names = " or ".join(map(repr, known))
            raise InvalidArgumentError(
                f"pipeline: return_timestamps: expected {names} for {self.architecture}, got {times!r:.80}"
            )

    def close(self) -> None:
        """Ends what runs, and closes the package unless it was opened by the caller."""
        if self._owns_transcriber:
            self.transcriber.close()
        super().close()


def _result(found: Transcription, times: Any) -> dict[str, Any]:
    segments = found.segments or ()
    # Whisper's text begins with a space, which transformers keeps.
    has_words = any(segment.words for segment in segments)
    text = found.text if found.segments is None or has_words else "".join(segment.text for segment in segments)
    if not times:
        return {"text": text}
    if times == "word":
        chunks = [{"text": one.text, "timestamp": (one.start, one.end)} for one in found.words]
    else:  # rounded as transformers does
        chunks = [{"text": one.text, "timestamp": (round(one.start, 2), round(one.end, 2))} for one in segments]
    return {"text": text, "chunks": chunks}
