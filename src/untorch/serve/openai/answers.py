"""What answers of chats and completions have in common: usage, ids, stream options, the endpoint's frame."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from untorch.llm import TokenLogprobs
from untorch.llm.outputs import Usage
from untorch.serve.openai.errors import from_exception, invalid, not_served
from untorch.serve.openai.fields import Fields

__all__ = ["Stream", "UsageSum", "guarded", "new_id", "read_stream", "shown_tokens"]

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Stream:
    """Whether chunks are wanted, and the usage in a last one."""

    on: bool = False
    usage: bool = False


def read_stream(fields: Fields) -> Stream:
    """Of ``stream`` and ``stream_options``. Raises ApiError."""
    on = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return Stream(on)
    if not on:
        raise invalid("stream_options", "expected stream to be true with it")
    options.only(("include_usage", "include_obfuscation"))
    if options.boolean("include_obfuscation"):
        raise not_served(options.param("include_obfuscation"), "chunks are not padded")
    return Stream(on, options.boolean("include_usage"))


class UsageSum:
    """Adds up the tokens of several prompts."""

    def __init__(self) -> None:
        self._prompts: dict[int, Usage] = {}
        self._completion = self._drafted = self._accepted = 0

    def add(self, prompt: int, usage: Usage | None) -> None:
        """Of a sample, or of all samples, of the prompt with this index."""
        if usage is not None:
            self._prompts[prompt] = usage
            self._completion += usage.completion_tokens
            self._drafted += usage.draft_tokens
            self._accepted += usage.accepted_tokens

    def json(self, completion_tokens: int | None = None) -> dict[str, Any]:
        """``usage``."""
        prompt = sum(usage.prompt_tokens for usage in self._prompts.values())
        completion = self._completion if completion_tokens is None else completion_tokens
        cached = sum(usage.cached_tokens for usage in self._prompts.values())
        found: dict[str, Any] = {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        if self._drafted:
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": self._drafted - self._accepted,
            }
        return found


def new_id(prefix: str) -> str:
    """Of an answer."""
    return f"{prefix}-{secrets.token_hex(14)}"


def shown_tokens(
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    finish_reason: str | None,
    stop_reason: str | int | None,
    stop_ids: Sequence[int],
) -> tuple[Sequence[int], Sequence[TokenLogprobs]]:
    """Without the token that ended the text, which is no part of it."""
    ends = finish_reason == "stop" and tokens
    if ends and (stop_reason == tokens[-1] if isinstance(stop_reason, int) else tokens[-1] in stop_ids):
        return tokens[:-1], logprobs[:-1]
    return tokens, logprobs


def guarded(handler: Handler) -> Handler:
    """Errors of the handler become answers; those of reading the body are the server's."""

    async def run(request: Request) -> Response:
        try:
            await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        try:
            return await handler(request)
        except Exception as error:
            return from_exception(error).response()

    return run
