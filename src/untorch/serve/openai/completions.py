"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from untorch.llm import Engine, RequestOutput, SamplingParams
from untorch.runtime.errors import ClosedError, UntorchError
from untorch.serve.openai.answers import Stream, UsageSum, new_id, read_stream, shown_tokens
from untorch.serve.openai.errors import expected, from_exception, not_served
from untorch.serve.openai.fields import Fields, parse_body, read_body
from untorch.serve.openai.logprobs import CompletionLogprobs
from untorch.serve.openai.parameters import COMPLETIONS, check_parameters
from untorch.serve.openai.prompts import read_prompts
from untorch.serve.openai.sampling import MOST_LOGPROBS, make_params, read_max_tokens, read_sampling, read_structure
from untorch.serve.openai.service import Service, Submission, in_thread, retried
from untorch.serve.openai.streaming import DONE, EventStream, Reply, event, merge, results

__all__ = ["completions"]

_MAX_TOKENS = 16  # OpenAI's default
_NAMES = dict.fromkeys(("json_schema", "regex", "grammar"), "structured_outputs")


@dataclass(frozen=True)
class _Completions:
    """A request in the engine. is_empty: no token was asked for; the engine makes one that nobody sees."""

    model: str
    engine: Engine
    params: SamplingParams
    stream: Stream
    prompts: list[list[int]]
    echo: bool
    is_empty: bool
    submission: Submission
    id: str
    created: int

    def head(self) -> dict[str, Any]:
        """What every object begins with."""
        return {
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
            "system_fingerprint": None,
        }  # fmt: skip

    def prompt_text(self, index: int) -> str:
        """To be echoed."""
        tokenizer = self.engine.tokenizer
        if not self.echo or tokenizer is None:
            return ""
        return tokenizer.decode(self.prompts[index], self.params.skip_special_tokens)

    def logprobs(self) -> CompletionLogprobs | None:
        """For one choice, if they are wanted."""
        if self.params.logprobs is None:
            return None
        return CompletionLogprobs(
            self.engine.tokenizer, self.params.logprobs > 0, self.params.skip_special_tokens
        )  # fmt: skip


async def completions(service: Service, request: Request) -> Response:
    """The endpoint. Raises ApiError, and what the engine raises."""
    body = await read_body(request, service.options.max_body)
    job = await retried(lambda: in_thread(lambda: _begin(service, parse_body(body)), _undo))
    if job.stream.on:
        return EventStream(_events(job), job.submission.close)

    async def answer() -> Response:
        return JSONResponse(_answer(job, await results(job.submission.generations)))

    return Reply(answer, job.submission.close)


def _undo(made: _Completions) -> None:
    made.submission.close()


def _begin(service: Service, fields: Fields) -> _Completions:
    check_parameters(fields, COMPLETIONS)
    model, engine = service.engine(fields)
    stream, echo = read_stream(fields), fields.boolean("echo")
    prompts = read_prompts(fields, "prompt", engine)
    for prompt in prompts:
        service.check_length(engine, prompt, "prompt")
    sampling = read_sampling(fields, engine)
    logprobs = fields.integer("logprobs", 0, MOST_LOGPROBS)
    if echo and logprobs is not None:
        if stream.on:
            raise not_served("stream", "logprobs of an echoed prompt come with the whole answer")
        sampling["prompt_logprobs"] = logprobs
    best_of = fields.integer("best_of", sampling.get("n", 1), 128)
    if best_of is not None and stream.on and best_of > sampling.get("n", 1):
        raise not_served("stream", "best_of decides at the end")
    most = read_max_tokens(fields, "max_tokens", least=0)
    if most == 0 and not echo:
        raise expected("max_tokens", "an integer of 1 or more, as there is no echo", 0)
    if most is None:
        most = max(_MAX_TOKENS, sampling.get("min_tokens", 0))
    params = make_params(
        {
            **sampling, **read_structure(fields), "best_of": best_of, "logprobs": logprobs, "max_tokens": max(most, 1),
        },
        _NAMES,
    )  # fmt: skip
    priority = fields.integer("priority", -(1 << 31), 1 << 31) or 0
    try:
        submission = service.submit(model, engine, prompts, params, priority)
    except ClosedError:
        raise
    except UntorchError as error:
        raise from_exception(error, _NAMES) from None
    return _Completions(
        model, engine, params, stream, prompts, echo, most == 0, submission, new_id("cmpl"), int(time.time())
    )


def _choice(index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _answer(job: _Completions, outputs: list[RequestOutput]) -> dict[str, Any]:
    choices, usage = [], UsageSum()
    for at, output in enumerate(outputs):
        usage.add(at, output.usage)
        prompt = job.prompt_text(at)
        for place, completion in enumerate(output.completions):
            tokens, known = shown_tokens(
                completion.token_ids, completion.logprobs or (), completion.finish_reason, completion.stop_reason,
                job.engine.settings.stop_ids,
            )  # fmt: skip
            text, reason = completion.text, str(completion.finish_reason)
            if job.is_empty:
                tokens, known, text, reason = [], [], "", "length"
            logprobs = None
            if (made := job.logprobs()) is not None:
                before = output.prompt_logprobs or []
                logprobs = made.append([*(output.prompt_token_ids if before else ()), *tokens], [*before, *known])
            choices.append(_choice(at * job.params.n + place, prompt + text, reason, logprobs))
    return {**job.head(), "choices": choices, "usage": usage.json(0 if job.is_empty else None)}


async def _events(job: _Completions) -> AsyncGenerator[bytes, None]:
    head = job.head()
    if job.stream.usage:
        head["usage"] = None
    usage = UsageSum()
    lists: dict[int, CompletionLogprobs | None] = {}

    async for at, chunk in merge(job.submission.generations):
        index, text, logprobs, reason = at * job.params.n + chunk.index, chunk.text, None, chunk.finish_reason
        tokens, known = shown_tokens(
            chunk.token_ids, chunk.logprobs or (), reason, chunk.stop_reason, job.engine.settings.stop_ids
        )  # fmt: skip
        if job.is_empty:
            text, tokens, known, reason = "", [], [], "length"
        if index not in lists:
            lists[index] = job.logprobs()
            text = job.prompt_text(at) + text
        if (made := lists[index]) is not None and tokens:
            logprobs = made.append(tokens, known)
        if reason is not None:
            usage.add(at, chunk.usage)
        if text or logprobs or reason:
            yield event({**head, "choices": [_choice(index, text, reason, logprobs)]})
    last = b""
    if job.stream.usage:
        last = event({**head, "choices": [], "usage": usage.json(0 if job.is_empty else None)})
    yield last + DONE
