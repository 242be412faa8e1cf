"""JSON schemas of the API's requests, by what the code that reads them asks for, and of its answers."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from typing import Any

from untorch.serve.openai.answers import read_stream
from untorch.serve.openai.chat import EFFORTS
from untorch.serve.openai.fields import Fields
from untorch.serve.openai.parameters import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    Parameter,
)
from untorch.serve.openai.sampling import MOST_LOGPROBS, read_max_tokens, read_sampling, read_structure
from untorch.serve.openai.tools.choice import read_tools
from untorch.serve.openai.transcriptions import FORMATS, GRANULARITIES

__all__ = ["ANSWERS", "REQUESTS", "request_schema"]

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_OBJECT: Schema = {"type": "object"}
_PROMPTS: Schema = {"type": ["string", "array"], "minItems": 1, "items": {"type": ["string", "integer", "array"]}}
# What is read by other code than the methods of Fields that are recorded.
_OTHERS: dict[str, Schema] = {
    "model": _STRING, "messages": {"type": "array", "minItems": 1, "items": _OBJECT}, "prompt": _PROMPTS,
    "input": _PROMPTS, "stop": {"type": ["string", "array", "null"], "items": _STRING},
    "priority": {"type": ["integer", "null"], "minimum": -(1 << 31), "maximum": 1 << 31},
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MOST_LOGPROBS},
    "tool_choice": {"type": ["string", "object", "null"]},
    "response_format": {
        "type": ["object", "null"], "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
        "required": ["type"],
    },
    "reasoning_effort": {"enum": [*EFFORTS, None]}, "chat_template_kwargs": {"type": ["object", "null"]},
    "echo": {"type": ["boolean", "null"]}, "best_of": {"type": ["integer", "null"], "minimum": 1, "maximum": 128},
    "encoding_format": {"enum": ["float", "base64", None]}, "dimensions": {"type": ["integer", "null"], "minimum": 1},
}  # fmt: skip
_LOGPROBS: dict[str, Schema] = {
    "chat": {"type": ["boolean", "null"]},
    "completions": {"type": ["integer", "null"], "minimum": 0, "maximum": MOST_LOGPROBS},
}
_FORM: dict[str, Schema] = {
    "file": {"type": "string", "contentMediaType": "application/octet-stream"}, "model": _STRING, "prompt": _STRING,
    "language": _STRING, "response_format": {"enum": list(FORMATS), "default": "json"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1}, "stream": {"type": "boolean", "default": False},
    "timestamp_granularities": {"type": "array", "items": {"enum": list(GRANULARITIES)}},
}  # fmt: skip
_REPEATED = ("timestamp_granularities",)  # in a form, as OpenAI's client writes it
_TABLES: dict[str, tuple[dict[str, Parameter], list[str]]] = {
    "chat": (CHAT, ["model", "messages"]), "completions": (COMPLETIONS, ["model", "prompt"]),
    "embeddings": (EMBEDDINGS, ["model", "input"]), "transcriptions": (TRANSCRIPTIONS, ["file", "model"]),
    "translations": (TRANSLATIONS, ["file", "model"]),
}  # fmt: skip
REQUESTS = tuple(_TABLES)


class _Recorder(Fields):
    """A request that has nothing, and notes the type and range that it is asked for."""

    def __init__(self) -> None:
        super().__init__({})
        self.found: dict[str, Schema] = {}

    def boolean(self, name: str, default: bool = False) -> bool:
        self.found[name] = {"type": ["boolean", "null"], "default": default}
        return default

    def integer(self, name: str, least: int, most: int | None = None) -> int | None:
        self.found[name] = {
            "type": ["integer", "null"],
            "minimum": least,
            **({} if most is None else {"maximum": most}),
        }
        return None

    def number(self, name: str, least: float, most: float, above: bool = False) -> float | None:
        bounds: Schema = {"exclusiveMinimum" if above else "minimum": least}
        self.found[name] = {"type": ["number", "null"], **bounds, **({"maximum": most} if math.isfinite(most) else {})}
        return None

    def string(self, name: str) -> str | None:
        self.found[name] = {"type": ["string", "null"]}
        return None

    def choice(self, name: str, values: Iterable[str], default: str) -> str:
        self.found[name] = {"enum": [*values, None]}
        return default

    def object(self, name: str) -> Fields | None:
        self.found[name] = {"type": ["object", "null"]}
        return None

    def array(self, name: str) -> list[Any] | None:
        self.found[name] = {"type": ["array", "null"]}
        return None


def _recorded(kind: str) -> dict[str, Schema]:
    fields = _Recorder()
    engine: Any = types.SimpleNamespace(settings=types.SimpleNamespace(generation={}, vocabulary=1))
    read_sampling(fields, engine)
    read_stream(fields)
    read_structure(fields)
    if kind == "chat":
        read_max_tokens(fields, "max_completion_tokens", "max_tokens")
        read_tools(fields)
    else:
        read_max_tokens(fields, "max_tokens", least=0)
    return fields.found


def request_schema(kind: str) -> Schema:
    """Of "chat", "completions", "embeddings", "transcriptions" or "translations".

    Parameters that are refused are there with the values that ask for nothing. Of others than those that are listed, a
    value may be anything: they are accepted without effect.
    """
    table, required = _TABLES[kind]
    is_form = "file" in table
    known = {**_OTHERS, **(_recorded(kind) if kind in _LOGPROBS else {})}
    if kind in _LOGPROBS:
        known["logprobs"] = _LOGPROBS[kind]
    properties: dict[str, Schema] = {}
    for name, one in table.items():
        if one.how == "served":
            properties[f"{name}[]" if name in _REPEATED else name] = (_FORM if is_form else known)[name]
        elif one.how == "accepted":
            properties[name] = {"description": "accepted without effect"}
        else:
            values = [value for value in one.neutral if not (is_form and value == [])]
            if not is_form:
                properties[name] = {"enum": [*values, None], "description": f"not served: {one.reason}"}
            elif values:
                properties[name] = {"enum": values, "description": f"not served: {one.reason}"}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _answer(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _list(items: Schema) -> Schema:
    return _answer({"object": {"const": "list"}, "data": {"type": "array", "items": items}})


def _completion(kind: str, choice: dict[str, Schema]) -> Schema:
    choices = _answer({
        "index": _INTEGER, **choice, "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"type": ["string", "null"]},
    })  # fmt: skip
    return _answer({
        "id": _STRING, "object": {"const": kind}, "created": _INTEGER, "model": _STRING,
        "choices": {"type": "array", "items": choices}, "usage": {"$ref": "#/components/schemas/Usage"},
    }, system_fingerprint={"type": "null"})  # fmt: skip


# By their names in the components of an OpenAPI document.
ANSWERS: dict[str, Schema] = {
    "ApiError": _answer({
        "error": _answer({
            "message": _STRING, "type": _STRING, "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]},
        })
    }),
    "Usage": _answer(
        {"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}, completion_tokens=_INTEGER,
        prompt_tokens_details=_answer({"cached_tokens": _INTEGER}), completion_tokens_details=_OBJECT,
    ),
    "Model": _answer(
        {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING},
        max_model_len=_INTEGER, parent=_STRING,
    ),
    "Models": _list({"$ref": "#/components/schemas/Model"}),
    "ChatCompletion": _completion("chat.completion", {"message": _answer({"role": {"const": "assistant"}})}),
    "Completion": _completion("text_completion", {"text": _STRING}),
    "Embeddings": {
        "type": "object", "required": ["object", "data", "model", "usage"],
        "properties": {
            "object": {"const": "list"}, "model": _STRING, "usage": {"$ref": "#/components/schemas/Usage"},
            "data": {"type": "array", "items": _answer({
                "object": {"const": "embedding"}, "index": _INTEGER,
                "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
            })},
        },
    },
    "Transcription": _answer(
        {"text": _STRING, "usage": _OBJECT}, task=_STRING, language=_STRING, duration={"type": "number"},
        segments={"type": "array", "items": _OBJECT}, words={"type": "array", "items": _OBJECT},
    ),
}  # fmt: skip
