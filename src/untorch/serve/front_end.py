"""A package's pipeline as it is served: its steps run on threads, and calls of its methods are joined with others'."""

from __future__ import annotations

import asyncio
import copy
import io
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from untorch.pipeline.base import Pipeline, numbered, renumbered
from untorch.pipeline.extras import import_extra
from untorch.pipeline.image_steps import read_image
from untorch.pipeline.speech import SpeechRecognition
from untorch.pipeline.text import TextPipeline
from untorch.runtime.errors import ClosedError, InvalidArgumentError
from untorch.serve.embedder import MOST_CHARACTERS, MULTIPLE
from untorch.serve.errors import DeadlineError, NotReadyError
from untorch.speech.audio import read_audio

if TYPE_CHECKING:
    from untorch.serve.batching import Call
    from untorch.serve.model import Port
    from untorch.speech import Recognition, Transcription

__all__ = ["IMAGE_TASKS", "INPUTS", "FrontEnd", "Servable"]

# What the input of a task is: a text, an image or audio.
INPUTS = {
    "text-classification": "text", "reranking": "text", "token-classification": "text", "fill-mask": "text",
    "text-embedding": "text", "text-to-image": "text", "class-to-image": "text", "image-classification": "image",
    "zero-shot-image-classification": "image", "object-detection": "image", "image-segmentation": "image",
    "audio-classification": "audio", "automatic-speech-recognition": "audio",
}  # fmt: skip
# Tasks whose results are images.
IMAGE_TASKS = frozenset({"text-to-image", "class-to-image"})
# Those that are for arrays, or that choose another Python type.
_LOCAL_OPTIONS = frozenset({"sampling_rate", "latents", "output_type"})
# What photographs come as. Pillow reads more, some by other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_MOST_RATIO = (
    100  # of an image's sides: a step that gives the shorter one a size makes the longer one as many times longer
)
_MOST_THREADS = 128


class Servable(Protocol):
    """A method whose calls are queued."""

    inputs: tuple[Port, ...]

    @property
    def max_batch_size(self) -> int:
        """Rows of a joined call; 0: calls are not joined."""
        ...

    def submit(self, inputs: Mapping[str, Any], done: Callable[[Call], None], timeout: float | None) -> Call:
        """Adds a call."""
        ...


class FrontEnd:
    """Texts, or files of images or sound, to what ``untorch.pipeline`` gives. ``run`` is for one event loop.

    As many requests as there are cores compute at a time; the others wait, or have a call of a method in its queue,
    where it is joined with those of other requests.

    Args:
        name: Of the package.
        pipeline: Its own, of which copies are made.
        methods: As they are served.
        max_pixels: Of an image.
        max_audio: Seconds of a sound.
        max_batch_size: Rows of a call.
        timeout: Seconds of a request; 0: no limit.
    """

    def __init__(
        self,
        name: str,
        pipeline: Pipeline,
        methods: Mapping[str, Servable],
        *,
        max_pixels: int,
        max_audio: float = 3600.0,
        max_batch_size: int = 32,
        timeout: float = 0.0,
    ) -> None:
        self.name, self.task, self.architecture = name, pipeline.task, pipeline.architecture
        self.input = INPUTS[pipeline.task]
        self.options = tuple(option for option in pipeline.options if option not in _LOCAL_OPTIONS)
        self.timeout = timeout
        self._pipeline, self._methods, self._max_pixels = pipeline, methods, max_pixels
        self._rows = _rows(methods, max_batch_size)
        if self.input == "image" or self.task in IMAGE_TASKS:
            module = import_extra("PIL.Image", "pillow", "an image")
            module.init()
            self._formats = [name for name in _FORMATS if name in module.OPEN]  # AVIF is not in every build
        if self.input == "audio":
            import_extra("soundfile", "soundfile", "audio")
            self._rate, self._seconds = _audio_limits(pipeline, max_audio)
        if isinstance(pipeline, TextPipeline) and pipeline.tokens.ignores_padding:
            pipeline.tokens.multiple = MULTIPLE
        cores = len(os.sched_getaffinity(0))
        self._slots = threading.Semaphore(max(2, cores))
        self._threads = ThreadPoolExecutor(
            min(_MOST_THREADS, max(8, 2 * max_batch_size)), thread_name_prefix=f"untorch-{name}-front-end"
        )

    @property
    def labels(self) -> list[str] | None:
        """The package's labels; None: it has none."""
        settings = self._pipeline.settings
        return settings.texts("labels") if settings.optional("labels", list) is not None else None

    async def run(self, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> Any:
        """The result of the one input, or a list with those of all of them.

        Args:
            inputs: Texts as ``untorch.pipeline`` takes them, or the bytes of files.
            options: Of the task.
            is_list: Whether it was a list.

        Raises:
            InvalidArgumentError: Inputs or options are not the task's.
            DeadlineError: It was not computed in time.
            ClosedError: The package is unloaded, or loaded again.
        """
        job = _Job(self, self.timeout or None)
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._run, job, inputs, options, is_list)
        except RuntimeError:  # closed, as the package is loaded again
            raise ClosedError(f"model '{self.name}' is unloaded") from None
        try:
            return await asyncio.wait_for(future, self.timeout or None)
        except asyncio.TimeoutError:
            raise job.too_late() from None
        finally:
            job.cancel()

    def close(self) -> None:
        """Takes no more requests. Those that run end by themselves, or as their methods are closed."""
        self._threads.shutdown(wait=False)

    def _run(self, job: _Job, inputs: Sequence[Any], options: Mapping[str, Any], is_list: bool) -> Any:
        with self._slots:
            pipeline = copy.copy(self._pipeline)
            hooks = {"invoke": job.invoke, "transcribe": job.transcribe, "finish_mask": to_png}
            vars(pipeline).update({name: hook for name, hook in hooks.items() if hasattr(pipeline, name)})
            results: list[Any] = []
            for begin in range(0, len(inputs), self._rows):
                job.check()
                part = []
                for index, one in enumerate(inputs[begin : begin + self._rows], begin):
                    with numbered(index if is_list else None):
                        part.append(self._read(one))
                if not is_list:
                    return pipeline(part[0], **options)
                with renumbered(begin, len(part)):
                    results += pipeline(part, batch_size=self._rows, **options)
            return results

    def _read(self, given: Any) -> Any:
        """What the pipeline takes. No text of a request is ever read as a path."""
        if self.input == "image":
            image = read_image(given, max_pixels=self._max_pixels, formats=self._formats)
            width, height = image.size
            if max(width, height) > _MOST_RATIO * min(width, height):
                raise InvalidArgumentError(
                    f"pipeline: inputs: expected an image whose sides differ by a factor of at most {_MOST_RATIO}, "
                    f"got {width} × {height}"
                )
            return image
        if self.input == "audio":
            return read_audio(given, self._rate, max_seconds=self._seconds)
        _check_texts(given)
        return given


class _Job:
    """A request on its thread. ``cancel`` is called by another one."""

    def __init__(self, front_end: FrontEnd, timeout: float | None) -> None:
        self._front_end, self._timeout = front_end, timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._lock = threading.Lock()
        self._cancelled = False
        self._stop: Callable[[], None] | None = None

    def too_late(self) -> DeadlineError:
        return DeadlineError(f"model '{self._front_end.name}': the request was not computed within {self._timeout:g} s")

    def cancel(self) -> None:
        """What waits is not computed, what runs ends between two calls."""
        with self._lock:
            self._cancelled = True
            stop = self._stop
        if stop is not None:
            stop()

    def check(self) -> float | None:
        """The seconds that are left. Raises NotReadyError, DeadlineError: nobody waits any more."""
        if self._cancelled:
            raise NotReadyError("the request was cancelled")
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self.too_late()
        return left

    def invoke(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """A call of a method; meanwhile another request may compute."""
        left = self.check()
        ended = threading.Event()
        call = self._front_end._methods[method].submit(arguments, lambda call: ended.set(), left)

        def stop() -> None:
            call.abandoned = True  # it is not computed if it still waits
            ended.set()

        self._wait(stop, ended.wait)
        if call.error is not None:
            raise call.error
        if call.outputs is None:
            raise NotReadyError("the request was cancelled")
        return [output for output in call.outputs if output is not None]

    def transcribe(self, source: Any, **options: Any) -> Transcription:
        """Of one sound."""
        pipeline: Any = self._front_end._pipeline
        handle: Recognition = pipeline.transcriber.submit(source, timeout=self.check(), **options)
        self._wait(handle.cancel, handle.result)
        result = handle.result()
        if result.finish_reason == "timeout":
            raise self.too_late()
        if result.finish_reason == "cancelled":
            raise ClosedError(f"model '{self._front_end.name}' is unloaded")
        if result.finish_reason == "length":
            raise InvalidArgumentError(
                "pipeline: inputs: the text is longer than the model, or than the memory for it: cut the audio in parts"
            )
        return result

    def _wait(self, stop: Callable[[], None], wait: Callable[[], Any]) -> None:
        with self._lock:
            self._stop = stop
            cancelled = self._cancelled
        if cancelled:
            stop()
        self._front_end._slots.release()
        try:
            wait()
        finally:
            self._front_end._slots.acquire()
            with self._lock:
                self._stop = None


def to_png(image: Any) -> bytes:
    """The bytes of a file of a Pillow image."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _rows(methods: Mapping[str, Servable], most: int) -> int:
    """Inputs of a call."""
    if any(port.shape[:1] == (1,) for model in methods.values() for port in model.inputs):
        return 1
    return min([most, *(model.max_batch_size or 8 for model in methods.values())])


def _audio_limits(pipeline: Pipeline, most: float) -> tuple[int, float]:
    """Rate in hertz, and seconds."""
    if isinstance(pipeline, SpeechRecognition):
        return pipeline.transcriber.settings.sampling_rate, most
    rate: int = pipeline.settings.get("sampling_rate", int)
    return rate, min(most, (pipeline.settings.get("max_samples", int) + 1) / rate)


def _check_texts(given: Any) -> None:
    """Raises InvalidArgumentError for a text that is too long, wherever it stands."""
    if isinstance(given, str):
        if len(given) > MOST_CHARACTERS:
            raise InvalidArgumentError(
                f"pipeline: inputs: expected texts of at most {MOST_CHARACTERS} characters, got {len(given)}"
            )
    elif isinstance(given, list | tuple):
        for one in given:
            _check_texts(one)
    elif isinstance(given, dict):
        _check_texts(list(given.values()))
