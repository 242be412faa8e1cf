"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from untorch.llm import Chunk, Engine, Prompt, RequestOutput, SamplingParams
from untorch.runtime.errors import ClosedError, UntorchError
from untorch.serve.openai.answers import Stream, UsageSum, new_id, read_stream, shown_tokens
from untorch.serve.openai.chat_choice import ChatChoice, message_of
from untorch.serve.openai.errors import from_exception, invalid, not_served
from untorch.serve.openai.fields import Fields, parse_body, read_body
from untorch.serve.openai.format import read_answer_format
from untorch.serve.openai.logprobs import chat_logprobs
from untorch.serve.openai.messages import read_messages
from untorch.serve.openai.parameters import CHAT, check_parameters
from untorch.serve.openai.reasoning import THINK
from untorch.serve.openai.sampling import MOST_LOGPROBS, make_params, read_max_tokens, read_sampling
from untorch.serve.openai.service import Service, Submission, in_thread, retried
from untorch.serve.openai.streaming import DONE, EventStream, Reply, event, merge, results
from untorch.serve.openai.tools import FORMATS, ToolFormat, find_format
from untorch.serve.openai.tools.choice import ToolChoice, read_tools
from untorch.serve.openai.tools.grammar import Thoughts

__all__ = ["EFFORTS", "chat_completions"]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class _Chat:
    """A request in the engine. thoughts: None: they are not split off."""

    model: str
    engine: Engine
    params: SamplingParams
    stream: Stream
    tools: ToolChoice
    tool_format: ToolFormat | None
    thoughts: Thoughts | None
    submission: Submission
    id: str
    created: int

    def choice(self) -> ChatChoice:
        """A fresh one."""
        return ChatChoice(
            self.tools if self.tools.callable else None, self.tool_format,
            splits=self.thoughts is not None, is_open=self.thoughts == "open",
        )  # fmt: skip

    def head(self, kind: str) -> dict[str, Any]:
        """What every object begins with."""
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None,
        }  # fmt: skip


async def chat_completions(service: Service, request: Request) -> Response:
    """The endpoint. Raises ApiError, and what the engine raises."""
    body = await read_body(request, service.options.max_body)
    chat = await retried(lambda: in_thread(lambda: _begin(service, parse_body(body)), _undo))
    if chat.stream.on:
        return EventStream(_events(chat), chat.submission.close)

    async def answer() -> Response:
        [output] = await results(chat.submission.generations)
        return JSONResponse(_answer(chat, output))

    return Reply(answer, chat.submission.close)


def _undo(made: _Chat) -> None:
    made.submission.close()


def _begin(service: Service, fields: Fields) -> _Chat:
    check_parameters(fields, CHAT)
    model, engine = service.engine(fields)
    template = engine.chat_template
    if template is None or engine.tokenizer is None:
        raise invalid("model", "it has no chat template: use /v1/completions", "unsupported")
    stream = read_stream(fields)
    messages = read_messages(fields, template, engine.takes_images)
    tools = read_tools(fields)
    tool_format = _tool_format(service, model, engine) if tools.callable else None
    variables = {**_variables(fields), **_effort(fields, template)}
    if tools.shown:
        variables["tools"] = [tool.definition for tool in tools.shown]
    try:
        prompt = engine.chat_prompt(messages, **variables)
    except UntorchError as error:
        raise invalid("messages", str(error).removeprefix("chat: ").removeprefix("prompt: ")) from None
    tokens: Any = prompt.tokens if isinstance(prompt, Prompt) else prompt
    service.check_length(engine, tokens, "messages")
    reasoning = service.options.reasoning
    if reasoning is None:
        reasoning = THINK in template or "</think>" in template
    thoughts = _thoughts(engine, tokens) if reasoning else None
    structure, source = read_answer_format(fields, tools, tool_format, thoughts or "none", engine)
    names = dict.fromkeys(("json_schema", "regex", "grammar"), source)
    names["max_tokens"] = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    sampling = read_sampling(fields, engine)
    if tool_format is not None and tool_format.shows_special:
        sampling["skip_special_tokens"] = False
    params = make_params(
        {
            **sampling, **structure, "logprobs": _logprobs(fields),
            "max_tokens": read_max_tokens(fields, "max_completion_tokens", "max_tokens"),
        },
        names,
    )  # fmt: skip
    priority = fields.integer("priority", -(1 << 31), 1 << 31) or 0
    try:
        submission = service.submit(model, engine, [prompt], params, priority)
    except ClosedError:
        raise
    except UntorchError as error:
        raise from_exception(error, names) from None
    return _Chat(
        model, engine, params, stream, tools, tool_format, thoughts, submission, new_id("chatcmpl"), int(time.time())
    )  # fmt: skip


def _tool_format(service: Service, model: str, engine: Engine) -> ToolFormat:
    template, tokenizer = engine.chat_template, engine.tokenizer
    assert template is not None
    assert tokenizer is not None
    if "tools" not in template:
        raise not_served("tools", "the model's chat template has no tools")
    name = service.options.tool_format_of(model) or find_format(
        template, lambda text: tokenizer.added_id(text) is not None
    )
    if name is None:
        raise not_served(
            "tools", f"the format of the model's calls is not known: start the server with one of {', '.join(FORMATS)}"
        )
    return FORMATS[name]


def _variables(fields: Fields) -> dict[str, Any]:
    inner = fields.object("chat_template_kwargs")
    if inner is None:
        return {}
    for name in ("messages", "tools"):
        if name in inner:
            raise invalid(inner.param(name), f"expected {name} in the request itself")
    return dict(inner.values)


def _effort(fields: Fields, template: str) -> dict[str, Any]:
    """As the template has it: a word, or a switch."""
    if "reasoning_effort" not in fields:
        return {}
    effort = fields.choice("reasoning_effort", EFFORTS, "")
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"}
    raise not_served("reasoning_effort", "the model's chat template has no such setting")


def _thoughts(engine: Engine, prompt: list[int]) -> Thoughts:
    assert engine.tokenizer is not None
    end = engine.tokenizer.decode(prompt[-16:], skip_special_tokens=False).rstrip()
    if end.endswith(THINK):
        return "open"
    return "none" if end.endswith("</think>") else "possible"


def _logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if not fields.boolean("logprobs"):
        if top:
            raise invalid("top_logprobs", "expected logprobs to be true with it")
        return None
    return top or 0


def _answer(chat: _Chat, output: RequestOutput) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for completion in output.completions:
        choice = chat.choice()
        deltas = choice.append(completion.text) + choice.finish()
        choices.append({
            "index": completion.index, "message": message_of(deltas), "logprobs": _shown(chat, completion),
            "finish_reason": choice.reason(completion.finish_reason),
        })  # fmt: skip
    usage = UsageSum()
    usage.add(0, output.usage)
    choices.sort(key=lambda one: one["index"])
    return {**chat.head("chat.completion"), "choices": choices, "usage": usage.json()}


def _shown(chat: _Chat, part: Any) -> dict[str, Any] | None:
    """The logprobs of a completion or a chunk."""
    if chat.params.logprobs is None:
        return None
    _, logprobs = shown_tokens(
        part.token_ids, part.logprobs or (), part.finish_reason, part.stop_reason, chat.engine.settings.stop_ids
    )
    return {"content": chat_logprobs(chat.engine.tokenizer, logprobs), "refusal": None}


async def _events(chat: _Chat) -> AsyncGenerator[bytes, None]:
    head = chat.head("chat.completion.chunk")
    if chat.stream.usage:
        head["usage"] = None
    choices: dict[int, ChatChoice] = {}
    waiting: dict[int, list[Any]] = {}  # logprobs of text that is held back
    usage = UsageSum()

    def make(index: int, delta: dict[str, Any], reason: str | None = None) -> bytes:
        logprobs = waiting.pop(index, None)
        shown = {"content": logprobs, "refusal": None} if logprobs else None
        one = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return event({**head, "choices": [one]})

    async for _, chunk in merge(chat.submission.generations):
        data, index = b"", chunk.index
        if index not in choices:
            choices[index] = chat.choice()
            data = make(index, {"role": "assistant", "content": ""})
        choice = choices[index]
        if (logprobs := _shown(chat, chunk)) is not None:
            waiting.setdefault(index, []).extend(logprobs["content"])
        for delta in _deltas(choice, chunk):
            data += make(index, delta)
        if chunk.finish_reason is not None:
            data += make(index, {}, choice.reason(chunk.finish_reason))
            usage.add(0, chunk.usage)
        if data:
            yield data
    last = b""
    if chat.stream.usage:
        last = event({**head, "choices": [], "usage": usage.json()})
    yield last + DONE


def _deltas(choice: ChatChoice, chunk: Chunk) -> list[dict[str, Any]]:
    deltas = choice.append(chunk.text) if chunk.text else []
    return deltas if chunk.finish_reason is None else deltas + choice.finish()
