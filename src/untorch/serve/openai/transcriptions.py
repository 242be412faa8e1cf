"""``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from untorch.runtime.errors import ClosedError, InvalidArgumentError
from untorch.serve.openai.errors import ApiError, expected, from_exception, invalid, not_served
from untorch.serve.openai.fields import Fields
from untorch.serve.openai.forms import parse_form
from untorch.serve.openai.parameters import TRANSCRIPTIONS, TRANSLATIONS, Parameter, check_parameters
from untorch.serve.openai.service import Service, in_thread, retried
from untorch.serve.openai.streaming import DONE, EventStream, Reply, check_end, event
from untorch.speech import Recognition, Segment, Transcriber, Transcription, to_srt, to_vtt

__all__ = ["FORMATS", "GRANULARITIES", "transcriptions", "translations"]

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_TIMED = ("srt", "verbose_json", "vtt")  # which need to know when something was said
GRANULARITIES = ("segment", "word")


@dataclass
class _Job:
    """A request. cancel: what ends it, once it runs."""

    service: Service
    model: str
    transcriber: Transcriber
    task: str
    file: bytes
    arguments: dict[str, Any]
    format: str
    granularities: list[str]
    stream: bool
    release: Callable[[], None] = lambda: None
    handle: Recognition | None = field(default=None, init=False)

    def close(self) -> None:
        """Ends it, and makes room for others. May be called again."""
        release, self.release = self.release, lambda: None
        release()
        if self.handle is not None:
            self.handle.cancel()


async def transcriptions(service: Service, request: Request) -> Response:
    """The endpoint. Raises ApiError."""
    return await _answer(service, request, "transcribe", TRANSCRIPTIONS)


async def translations(service: Service, request: Request) -> Response:
    """The endpoint: speech of any language to text in English. Raises ApiError."""
    return await _answer(service, request, "translate", TRANSLATIONS)


async def _answer(service: Service, request: Request, task: str, table: dict[str, Parameter]) -> Response:
    job = _read(service, await parse_form(request, table), task, table)
    job.release = service.admit(job.model, 1, "file")
    if not job.stream:
        return Reply(lambda: _whole(job), job.close)
    try:  # what is wrong with the file has a status of its own
        handle = await _submit(job)
    except BaseException:
        job.close()
        raise
    return EventStream(_events(job, handle), job.close)


def _read(service: Service, fields: Fields, task: str, table: dict[str, Parameter]) -> _Job:
    check_parameters(fields, table)
    model, transcriber = service.transcriber(fields)
    if task == "translate" and not transcriber.translates:
        raise invalid("model", "it does not translate: use /v1/audio/transcriptions", "unsupported")
    file = fields.required("file")
    if not isinstance(file, bytes):
        raise expected("file", "a file", file, "invalid_type")
    form = fields.choice("response_format", FORMATS, "json")
    if form in _TIMED and not transcriber.has_times:
        raise not_served("response_format", f'the model does not know when words were said: use "json", not "{form}"')
    granularities = _granularities(fields, form)
    if "word" in granularities and not transcriber.has_words:
        raise not_served("timestamp_granularities", 'the model knows the times of segments alone: use "segment"')
    stream = fields.boolean("stream")
    if stream and form not in ("json", "text"):
        raise invalid("stream", f'expected response_format "json" or "text" with it, got "{form}"')
    arguments: dict[str, Any] = {
        "language": fields.string("language"), "prompt": fields.string("prompt"),
        "temperature": fields.number("temperature", 0, 1),
    }  # fmt: skip
    for name, value in arguments.items():
        neutral = name == "temperature" and value == 0
        if value is not None and not neutral and name not in transcriber.parameters:
            raise not_served(name, f"{transcriber.settings.architecture} has no such setting")
    arguments["timestamps"] = form in _TIMED
    return _Job(service, model, transcriber, task, file, arguments, form, granularities, stream)


def _granularities(fields: Fields, form: str) -> list[str]:
    given = fields.array("timestamp_granularities")
    if not given:
        return ["segment"]
    for value in given:
        if value not in GRANULARITIES:
            raise expected("timestamp_granularities", '"segment" or "word"', value)
    if form != "verbose_json":
        raise invalid("timestamp_granularities", f'expected response_format "verbose_json" with it, got "{form}"')
    return given


async def _submit(job: _Job) -> Recognition:
    """Decodes the file and encodes the sound, on a thread. Raises ApiError."""

    def submit() -> Recognition:
        return job.transcriber.submit(job.file, task=job.task, timeout=job.service.options.timeout, **job.arguments)

    async def begin() -> Recognition:
        try:
            return await in_thread(submit, lambda handle: handle.cancel())
        except ClosedError:
            job.transcriber = job.service.transcriber_of(job.model)
            raise

    try:
        job.handle = await retried(begin)
    except InvalidArgumentError as error:
        raise from_exception(error, {"audio": "file"}) from None
    return job.handle


async def _pieces(job: _Job, handle: Recognition) -> AsyncGenerator[str, None]:
    """As they come; the first one is timed."""
    metrics, begin = job.service.options.metrics, time.perf_counter()
    waits = job.transcriber.engine is not None
    async for piece in handle:
        if waits and metrics is not None:
            metrics.first_token(job.model, time.perf_counter() - begin)
            waits = False
        yield piece


async def _whole(job: _Job) -> Response:
    handle = await _submit(job)
    async for _ in _pieces(job, handle):
        pass
    result = _finished(handle)
    if job.format == "text":
        return PlainTextResponse(result.text + "\n")
    if job.format == "srt":
        return PlainTextResponse(to_srt(result.segments or ()))
    if job.format == "vtt":
        return PlainTextResponse(to_vtt(result.segments or ()), media_type="text/vtt")
    if job.format == "verbose_json":
        return JSONResponse(_verbose(job, result))
    return JSONResponse({"text": result.text, "usage": _usage(result)})


async def _events(job: _Job, handle: Recognition) -> AsyncGenerator[bytes, None]:
    async for piece in _pieces(job, handle):
        if piece:
            yield event({"type": "transcript.text.delta", "delta": piece})
    result = _finished(handle)
    yield event({"type": "transcript.text.done", "text": result.text, "usage": _usage(result)})
    yield DONE


def _finished(handle: Recognition) -> Transcription:
    """Its result, which is there. Raises ApiError if it was not the model that ended it."""
    result = handle.result()
    check_end(result.finish_reason)
    if result.finish_reason == "length":
        raise ApiError(
            400, "file: the text is longer than the model, or than the memory for it: cut the audio into parts",
            param="file", code="context_length_exceeded",
        )  # fmt: skip
    return result


def _usage(result: Transcription) -> dict[str, Any]:
    usage = result.usage
    if usage is None:
        return {"type": "duration", "seconds": math.ceil(result.duration)}
    given = usage.audio_tokens + usage.text_tokens
    return {
        "type": "tokens", "input_tokens": given, "output_tokens": usage.output_tokens,
        "total_tokens": given + usage.output_tokens,
        "input_token_details": {"audio_tokens": usage.audio_tokens, "text_tokens": usage.text_tokens},
    }  # fmt: skip


def _verbose(job: _Job, result: Transcription) -> dict[str, Any]:
    temperature = job.arguments["temperature"] or 0.0
    found: dict[str, Any] = {
        "task": job.task, "language": result.language or "", "duration": result.duration, "text": result.text,
    }  # fmt: skip
    if "segment" in job.granularities:
        found["segments"] = [_segment(i, one, temperature) for i, one in enumerate(result.segments or ())]
    if "word" in job.granularities:
        found["words"] = [{"word": one.text, "start": one.start, "end": one.end} for one in result.words]
    return {**found, "usage": _usage(result)}


def _segment(index: int, segment: Segment, temperature: float) -> dict[str, Any]:
    text = segment.text.encode()
    return {
        "id": index, "seek": 0, "start": segment.start, "end": segment.end, "text": segment.text,
        "tokens": [*segment.tokens], "temperature": temperature, "avg_logprob": segment.avg_logprob,
        "compression_ratio": len(text) / len(zlib.compress(text)),
        **({} if segment.no_speech_prob is None else {"no_speech_prob": segment.no_speech_prob}),
    }  # fmt: skip
