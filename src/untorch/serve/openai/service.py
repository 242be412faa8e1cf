"""What all endpoints share: the models, the server's options, the bound on requests, and requests in the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from untorch.llm import Chunk, Engine, Generation, Prompt, RequestOutput, SamplingParams
from untorch.runtime.errors import ClosedError, InvalidArgumentError
from untorch.serve.admission import Admission
from untorch.serve.embedder import Embedder
from untorch.serve.errors import QueueFullError
from untorch.serve.openai.errors import (
    ApiError,
    context_length_exceeded,
    expected,
    invalid,
    model_not_found,
    not_loaded,
    too_many_requests,
)
from untorch.serve.openai.fields import Fields
from untorch.serve.openai.tools import FORMATS
from untorch.speech import Transcriber

__all__ = [
    "Embedders",
    "Engines",
    "Metrics",
    "Nothing",
    "Options",
    "Service",
    "Submission",
    "Timed",
    "Transcribers",
    "in_thread",
    "retried",
]

_Result = TypeVar("_Result")
_TRIES = 3
_OTHER_TASKS = {
    "generate": "it has no embeddings, it generates text",
    "embed": "it generates no text, it makes embeddings: use /v1/embeddings",
    "classify": "it generates no text and makes no embeddings, but scores: use the Open Inference Protocol",
}


class Engines(Protocol):
    """The language models that are served."""

    def names(self) -> list[str]:
        """Of all of them."""
        ...

    def get(self, name: str) -> Engine | None:
        """The engine; None if there is none of that name."""
        ...


class Transcribers(Protocol):
    """The speech models that are served."""

    def names(self) -> list[str]:
        """Of all of them."""
        ...

    def get(self, name: str) -> Transcriber | None:
        """The model; None if there is none of that name."""
        ...


class Embedders(Protocol):
    """The models that embed by a front end of their own, not by an engine."""

    def names(self) -> list[str]:
        """Of all of them."""
        ...

    def get(self, name: str) -> Embedder | None:
        """The model; None if there is none of that name."""
        ...


class Nothing:
    """There is no speech model, or no embedder."""

    def names(self) -> list[str]:
        """None."""
        return []

    def get(self, name: str) -> None:
        """None."""
        return


class Metrics(Protocol):
    """What is told how quickly tokens come, in seconds."""

    def first_token(self, model: str, seconds: float) -> None:
        """The time to a request's first token."""
        ...

    def output_token(self, model: str, seconds: float) -> None:
        """The time of each further token, on average."""
        ...


@dataclass(frozen=True)
class Options:
    """How the API behaves.

    Attributes:
        max_requests: Prompts of one model that run and wait together; more are answered 429. None: no bound.
        timeout: Seconds after which a request that still generates is answered 504. None: no limit.
        tool_format: How models write tool calls: "hermes", "llama3", "mistral" or "qwen3_coder", or a dictionary of
            these by the model's name. None: as the chat template shows.
        reasoning: Whether ``<think>…</think>`` is split off as ``reasoning_content``. None: if the chat template
            has it.
        metrics: Is told how quickly tokens come.
        unavailable: Says why a model of this name cannot be called now, which is answered 503; None: it is unknown.
        max_body: Bytes of a body after decompression.
        admission: Counts the prompts, with those of other protocols. None: an own one, for max_requests.

    Raises:
        InvalidArgumentError: An option is wrong.
    """

    max_requests: int | None = None
    timeout: float | None = None
    tool_format: str | Mapping[str, str] | None = None
    reasoning: bool | None = None
    metrics: Metrics | None = None
    admission: Admission | None = None
    unavailable: Callable[[str], str | None] | None = None
    max_body: int = 64 * 2**20

    def __post_init__(self) -> None:
        most = self.max_requests
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise InvalidArgumentError(f"Options: max_requests: expected a positive integer, got {most!r}")
        seconds = self.timeout
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0
        ):
            raise InvalidArgumentError(f"Options: timeout: expected seconds above 0, got {seconds!r}")
        given = self.tool_format
        for name in [given] if isinstance(given, str) else list((given or {}).values()):
            if name not in FORMATS:
                known = ", ".join(FORMATS)
                raise InvalidArgumentError(f"Options: tool_format: expected one of {known}, got {name!r}")

    def tool_format_of(self, model: str) -> str | None:
        """What is given for the model."""
        given = self.tool_format
        return given if given is None or isinstance(given, str) else given.get(model)


class Timed:
    """A generation whose chunks are timed as they are read."""

    def __init__(self, generation: Generation, model: str, metrics: Metrics | None) -> None:
        self._generation, self._model, self._metrics = generation, model, metrics
        self._begin = time.perf_counter()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks."""
        first, last, count = 0.0, 0.0, 0
        async for chunk in self._generation:
            if chunk.token_ids:
                last = time.perf_counter()
                first = first or last
                count += len(chunk.token_ids)
            yield chunk
        if self._metrics is not None and count:
            self._metrics.first_token(self._model, first - self._begin)
            if count > 1:
                self._metrics.output_token(self._model, (last - first) / (count - 1))

    def result(self) -> RequestOutput:
        """Once all chunks have been read."""
        return self._generation.result()

    def cancel(self) -> None:
        """End it."""
        self._generation.cancel()


class Submission:
    """A request's prompts in the engine. ``close`` cancels those that run, and makes room for others."""

    def __init__(self, generations: Sequence[Timed], release: Callable[[], None]) -> None:
        self.generations = generations
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        """May be called again."""
        for generation in self.generations:
            generation.cancel()
        release, self._release = self._release, None
        if release is not None:
            release()


class Service:
    """Endpoints call it from any thread."""

    def __init__(
        self,
        engines: Engines,
        options: Options,
        transcribers: Transcribers | None = None,
        embedders: Embedders | None = None,
    ) -> None:
        self.engines, self.options = engines, options
        self.transcribers: Transcribers = Nothing() if transcribers is None else transcribers
        self.embedders: Embedders = Nothing() if embedders is None else embedders
        self.created = int(time.time())
        self._admission = options.admission or Admission(options.max_requests)

    def engine(self, fields: Fields, task: str = "generate") -> tuple[str, Engine]:
        """The request's model, which has to have this task. Raises ApiError."""
        name = _name(fields)
        engine = self.find(name)
        if engine is None:
            if self.transcribers.get(name) is not None:
                raise invalid("model", "it transcribes speech: use /v1/audio/transcriptions", "unsupported")
            if self.embedders.get(name) is not None:
                raise invalid("model", _OTHER_TASKS["embed"], "unsupported")
            raise self.missing(name)
        if engine.settings.task != task:
            raise invalid("model", _OTHER_TASKS[engine.settings.task], "unsupported")
        return name, engine

    def embedder(self, fields: Fields) -> tuple[str, Embedder | None]:
        """The request's model, if it embeds by a front end of its own. Raises ApiError."""
        name = _name(fields)
        return name, self.embedders.get(name)

    def transcriber(self, fields: Fields) -> tuple[str, Transcriber]:
        """The request's model, which has to transcribe speech. Raises ApiError."""
        name = _name(fields)
        return name, self.transcriber_of(name)

    def transcriber_of(self, name: str) -> Transcriber:
        """The speech model of a name. Raises ApiError."""
        found = self.transcribers.get(name)
        if found is None:
            if self.find(name) is not None or self.embedders.get(name) is not None:
                raise invalid("model", "it transcribes no speech, it is a model for text", "unsupported")
            raise self.missing(name)
        return found

    def missing(self, name: str) -> ApiError:
        """404 for a name that is unknown; 503, after which clients try again, for a model that is not loaded now."""
        reason = None if self.options.unavailable is None else self.options.unavailable(name)
        return model_not_found(name, self.names()) if reason is None else not_loaded(name, reason)

    def names(self) -> list[str]:
        """Of all models, and of the adapters beside them."""
        models = self.engines.names()
        loras = [lora for name in models if (engine := self.engines.get(name)) is not None for lora in engine.loras]
        return list(dict.fromkeys([*models, *self.transcribers.names(), *self.embedders.names(), *loras]))

    def find(self, name: str) -> Engine | None:
        """The engine of a language model, or of the model that has an adapter of this name."""
        engine = self.engines.get(name)
        base = self.base(name)
        return self.engines.get(base) if engine is None and base is not None else engine

    def base(self, name: str) -> str | None:
        """The model that has an adapter of this name; None if the name is a model's, or unknown."""
        if self.engines.get(name) is not None or self.transcribers.get(name) is not None:
            return None
        for model in self.engines.names():
            engine = self.engines.get(model)
            if engine is not None and name in engine.loras:
                return model
        return None

    def check_length(self, engine: Engine, prompt: Sequence[int], param: str) -> None:
        """Raises ApiError if the prompt is empty or does not fit."""
        if not prompt:
            raise invalid(param, "expected at least one token, got none")
        if len(prompt) > engine.max_prompt_tokens:
            raise context_length_exceeded(param, engine.max_prompt_tokens, len(prompt))

    def submit(
        self,
        model: str,
        engine: Engine,
        prompts: Sequence[Sequence[int] | Prompt],
        params: SamplingParams,
        priority: int,
    ) -> Submission:
        """Give the prompts to the engine. Raises ApiError, and what ``Engine.submit`` raises."""
        base = self.base(model)
        release = self.admit(base or model, len(prompts), "prompt")
        lora = None if base is None else model
        generations: list[Timed] = []
        submission = Submission(generations, release)
        try:
            for prompt in prompts:
                handle = engine.submit(prompt, params, lora=lora, priority=priority, timeout=self.options.timeout)
                generations.append(Timed(handle, model, self.options.metrics))
        except BaseException:
            submission.close()
            raise
        return submission

    def admit(self, model: str, count: int, param: str) -> Callable[[], None]:
        """Room for that many prompts, until the result is called, once. Raises ApiError if there is none."""
        most = self._admission.most
        if most is not None and count > most:
            raise invalid(param, f"expected at most {most} prompts, which is the server's limit, got {count}")
        try:
            return self._admission.enter(model, count)
        except QueueFullError:
            assert most is not None
            raise too_many_requests(model, most) from None


def _name(fields: Fields) -> str:
    name = fields.required("model")
    if not isinstance(name, str):
        raise expected("model", "a string", name, "invalid_type")
    return name


async def retried(begin: Callable[[], Awaitable[_Result]]) -> _Result:
    """What begins a request; again where the model was closed before that, as it was loaded again."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(ClosedError):
            return await begin()
    return await begin()


async def in_thread(work: Callable[[], _Result], undo: Callable[[_Result], None]) -> _Result:
    """The work's result, without blocking the event loop. undo: of a result that nobody waits for any more."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else undo(done.result()))
        raise
