"""``Transcriber``: a speech model's package, from audio to text."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from untorch.runtime.errors import ArgumentTypeError, ClosedError, InvalidArgumentError
from untorch.runtime.program import Program, load
from untorch.speech.audio import AudioSource, read_audio
from untorch.speech.ctc import CtcModel
from untorch.speech.outputs import Recognition, Transcription
from untorch.speech.request import TranscriptionRequest
from untorch.speech.settings import SpeechSettings, read_settings

if TYPE_CHECKING:
    from untorch.llm import Engine
    from untorch.speech.seq2seq import Seq2SeqModel
    from untorch.speech.speech_lm import SpeechLanguageModel
    from untorch.trust.policy import TrustPolicy

__all__ = ["Transcriber"]

_LANGUAGE = re.compile(r"[a-z]{2,3}")
_PAUSE = 0.02  # seconds between two looks at what runs: its steps are those of other threads


class Transcriber:
    """Transcribes with a package of ``untorch.export.speech_to_text``. Methods may be called from any thread.

    Use it as a context manager, or call ``close()``.

    Args:
        source: The package's path, or a loaded program, which stays open.
        max_seconds: Longer audio is refused.
        device: As for ``untorch.load``.
        num_runners: As for ``untorch.load``.
        num_threads: As for ``untorch.load``.
        trust: As for ``untorch.load``.
        engine: For a package with a language model: further arguments of ``untorch.llm.Engine``.

    Raises:
        InvalidFileError: The package is damaged or no speech model.
        UnsupportedError: It needs another untorch, a GPU, or a Python package that is missing.
        InvalidArgumentError: An argument is wrong.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Program,
        *,
        max_seconds: float = 3600.0,
        device: str | None = None,
        num_runners: int = 1,
        num_threads: int = 0,
        trust: TrustPolicy | str | os.PathLike[str] | None = None,
        **engine: Any,
    ) -> None:
        if isinstance(max_seconds, bool) or not isinstance(max_seconds, int | float) or not max_seconds > 0:
            raise InvalidArgumentError(f"Transcriber: max_seconds: expected seconds above 0, got {max_seconds!r}")
        self._owned = not isinstance(source, Program)
        self._program = (
            source
            if isinstance(source, Program)
            else load(source, device=device, num_runners=num_runners, num_threads=num_threads, trust=trust)
        )
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._closed = False
        self._live: weakref.WeakSet[Recognition] = weakref.WeakSet()
        self._model: CtcModel | Seq2SeqModel | SpeechLanguageModel
        try:
            self.settings: SpeechSettings = read_settings(self._program.manifest, self._program.path)
            if self.settings.decoder != "causal_lm":
                if engine:
                    raise ArgumentTypeError(
                        f"Transcriber: {', '.join(engine)}: unknown, as the package has no language model"
                    )
                if self.settings.decoder == "ctc":
                    self._model = CtcModel(self._program, self.settings)
                else:
                    from untorch.speech.seq2seq import Seq2SeqModel

                    self._model = Seq2SeqModel(self._program, self.settings)
            else:
                from untorch.speech.speech_lm import SpeechLanguageModel

                self._model = SpeechLanguageModel(self._program, self.settings, **engine)
        except BaseException:
            if self._owned:
                self._program.close()
            raise

    @property
    def engine(self) -> Engine | None:
        """Of the language model; None: the package has none."""
        return self._model.engine

    @property
    def parameters(self) -> frozenset[str]:
        """Of ``transcribe``: those that the model follows: "language", "prompt", "temperature", "seed"."""
        own = self._model.parameters
        return own | {"language"} if self.settings.languages else own

    @property
    def has_times(self) -> bool:
        """Whether results have segments with their times."""
        return self._model.has_times

    @property
    def has_words(self) -> bool:
        """Whether segments have words with their times."""
        return self._model.has_words

    @property
    def translates(self) -> bool:
        """Whether ``task="translate"`` is served: text in English of speech in another language."""
        return self._model.translates

    def transcribe(
        self,
        audio: AudioSource,
        *,
        sampling_rate: int | None = None,
        task: str = "transcribe",
        language: str | None = None,
        prompt: str | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        timestamps: bool = False,
    ) -> Transcription:
        """The text of a file, or of an array of samples at ``sampling_rate``, as ``submit`` takes them."""
        handle = self.submit(
            audio, sampling_rate=sampling_rate, task=task, language=language, prompt=prompt, temperature=temperature,
            seed=seed, timestamps=timestamps,
        )  # fmt: skip
        try:
            return handle.result()
        except BaseException:  # an interrupt
            handle.cancel()
            raise

    def submit(
        self,
        audio: AudioSource,
        *,
        sampling_rate: int | None = None,
        task: str = "transcribe",
        language: str | None = None,
        prompt: str | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        timestamps: bool = False,
    ) -> Recognition:
        """Read the audio, and begin to transcribe it.

        Args:
            audio: A path, a file's bytes, a binary file, or an array [n] or [n, channels].
            sampling_rate: Of an array. Default: the model's.
            task: "transcribe", or "translate" (to English) where the model ``translates``.
            language: ISO 639-1, where ``parameters`` has it. Default: the model finds out.
            prompt: Text before the audio's, where ``parameters`` has it.
            temperature: 0: the likeliest text. Default: 0.
            seed: Equal seeds give equal texts.
            timestamps: For Whisper: segments with the times that the model writes. Without it, and for audio of one
                window, the whole text is a segment; longer audio always has them, and so have CTC models.
            timeout: Seconds from now on after which it ends with the reason "timeout" and the text so far.

        Raises:
            InvalidArgumentError: An argument is wrong, or not for this model.
            UnsupportedError: A file needs the package soundfile.
            ClosedError: The transcriber is closed.
        """
        request = TranscriptionRequest(
            task, language, prompt, temperature, seed, None if timeout is None else time.monotonic() + timeout,
            timestamps,
        )  # fmt: skip
        self._check(request)
        samples = read_audio(
            audio, self.settings.sampling_rate, source_rate=sampling_rate, max_seconds=self._max_seconds
        )
        handle = self._model.submit(samples, request)
        with self._lock:
            if not self._closed:
                self._live.add(handle)
                return handle
        handle.cancel()
        raise ClosedError("transcribe: the transcriber is closed")

    def close(self, drain: float = 0.0) -> None:
        """Take no more audio, and free the model.

        drain: Seconds in which what runs may end. What does not, and by default everything, is cancelled.
        """
        last = time.monotonic() + drain
        with self._lock:
            self._closed = True
        while time.monotonic() < last and any(not handle.done for handle in list(self._live)):
            time.sleep(_PAUSE)
        for handle in list(self._live):
            handle.cancel()
        self._model.close(max(0.0, last - time.monotonic()))
        if self._owned:
            self._program.close()

    def __enter__(self) -> Transcriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, request: TranscriptionRequest) -> None:
        name = self.settings.architecture
        if request.task not in ("transcribe", "translate"):
            raise InvalidArgumentError(
                f'transcribe: task: expected "transcribe" or "translate", got {request.task!r}'
            )  # fmt: skip
        if request.task == "translate" and not self.translates:
            raise InvalidArgumentError(f'transcribe: task: expected "transcribe", as {name} does not translate')
        if not isinstance(request.timestamps, bool):
            raise InvalidArgumentError(
                f"transcribe: timestamps: expected True or False, got {request.timestamps!r:.80}"
            )
        if request.timestamps and not self.has_times:
            raise InvalidArgumentError(f"transcribe: timestamps: {name} does not know when words were said")
        known = self.parameters
        for parameter in ("language", "prompt", "temperature", "seed"):
            value = getattr(request, parameter)
            neutral = parameter == "temperature" and value == 0
            if value is not None and not neutral and parameter not in known:
                raise InvalidArgumentError(f"transcribe: {parameter}: {name} has no such setting, got {value!r:.80}")
        language, languages = request.language, self.settings.languages
        if language is not None:
            if not isinstance(language, str) or not _LANGUAGE.fullmatch(language):
                raise InvalidArgumentError(
                    f'transcribe: language: expected a code of ISO 639-1 such as "en", got {language!r:.80}'
                )
            if languages and language not in languages:
                raise InvalidArgumentError(
                    f"transcribe: language: expected one of {', '.join(languages)}, got {language!r}"
                )
        value = request.temperature
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2
        ):  # fmt: skip
            raise InvalidArgumentError(f"transcribe: temperature: expected a number from 0 to 2, got {value!r:.80}")
