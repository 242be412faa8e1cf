"""A chat's messages: checked, and brought into the form that chat templates of transformers expect."""

from __future__ import annotations

import json
from typing import Any

from untorch.llm.vision.messages import decode_data_url
from untorch.runtime.errors import InvalidArgumentError
from untorch.serve.openai.errors import expected, invalid, not_served
from untorch.serve.openai.fields import Fields

__all__ = ["read_messages"]

_FIELDS = {
    "system": ("content", "name"),
    "developer": ("content", "name"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "tool_calls", "refusal", "reasoning_content"),
    "tool": ("content", "tool_call_id", "name"),
}
# What an answer of the API has, and is sent back with it.
_EMPTY_IN_ANSWERS = ("annotations", "audio", "function_call")
_REFUSED_PARTS = {
    "image_url": "the model takes text, no images",
    "input_audio": "the model takes text, no audio",
    "file": "the model takes text, no files",
}


_DETAILS = ("auto", "low", "high")


def read_messages(fields: Fields, template: str, takes_images: bool = False) -> list[dict[str, Any]]:
    """The template's messages. A developer is the system where the template has no such role.

    takes_images: Users' messages may have images, which become {"type": "image", "image": bytes}. Raises ApiError.
    """
    fields.required("messages")
    given = fields.objects("messages")
    if not given:
        raise expected("messages", "at least one message", [])
    has_developer = "developer" in template
    calls: dict[str, str] = {}  # names of functions by the ids of calls
    found = []
    for message in given:
        role = message.required("role")
        if role == "function":
            raise not_served(message.param("role"), "use role tool")
        if not isinstance(role, str) or role not in _FIELDS:
            raise expected(message.param("role"), "system, developer, user, assistant or tool", role)
        for name in _EMPTY_IN_ANSWERS if role == "assistant" else ():
            if message.get(name):
                raise not_served(message.param(name), "the model takes text and tool calls")
        message.only(("role", *_FIELDS[role], *(_EMPTY_IN_ANSWERS if role == "assistant" else ())))
        one: dict[str, Any] = {"role": "system" if role == "developer" and not has_developer else role}
        if "name" in message:
            one["name"] = message.string("name")
        if role == "assistant":
            one.update(_assistant(message, calls))
        else:
            message.required("content")
            has_images = role == "user" and takes_images and isinstance(message.get("content"), list)
            one["content"] = _parts(message) if has_images else _text(message, "content")
        if role == "tool":
            one.update(_tool(message, calls))
        found.append(one)
    return found


def _assistant(message: Fields, calls: dict[str, str]) -> dict[str, Any]:
    tool_calls = [_call(call, calls) for call in message.objects("tool_calls")]
    content = _text(message, "content") if "content" in message else message.string("refusal")
    if content is None and not tool_calls:
        raise invalid(
            message.param("content"), "expected text, as there are no tool_calls", "missing_required_parameter"
        )
    # Templates of several families join the content, so it is no null.
    found: dict[str, Any] = {"content": content or ""}
    if tool_calls:
        found["tool_calls"] = tool_calls
    if (thought := message.string("reasoning_content")) is not None:
        found["reasoning_content"] = thought
    return found


def _call(call: Fields, calls: dict[str, str]) -> dict[str, Any]:
    """With its arguments as an object: templates write them as JSON."""
    call.only(("id", "type", "function", "index"))
    call.choice("type", ("function",), "function")
    call_id = call.required("id")
    if not isinstance(call_id, str):
        raise expected(call.param("id"), "a string", call_id, "invalid_type")
    call.required("function")
    function = call.object("function")
    assert function is not None
    function.only(("name", "arguments"))
    name = function.required("name")
    if not isinstance(name, str):
        raise expected(function.param("name"), "a string", name, "invalid_type")
    text = function.string("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise expected(function.param("arguments"), "a JSON object as a string", text)
    calls[call_id] = name
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(message: Fields, calls: dict[str, str]) -> dict[str, Any]:
    call_id = message.required("tool_call_id")
    if not isinstance(call_id, str) or call_id not in calls:
        raise expected(message.param("tool_call_id"), "the id of a call in an earlier message's tool_calls", call_id)
    return {"tool_call_id": call_id, "name": message.string("name") or calls[call_id]}


def _parts(message: Fields) -> list[dict[str, Any]] | str:
    """Texts and images in their order; without images the text."""
    parts = message.objects("content")
    if not any(part.get("type") == "image_url" for part in parts):
        return _text(message, "content")
    found: list[dict[str, Any]] = []
    for part in parts:
        if part.required("type") == "image_url":
            found.append({"type": "image", "image": _image(part)})
        else:
            found.append({"type": "text", "text": _part_text(part)})
    return found


def _image(part: Fields) -> bytes:
    part.only(("type", "image_url"))
    part.required("image_url")
    inner = part.object("image_url")
    assert inner is not None
    inner.only(("url", "detail"))
    inner.choice("detail", _DETAILS, "auto")
    url = inner.required("url")
    if not isinstance(url, str) or not url.startswith("data:"):
        what = "the image itself as data:image/…;base64,…, as the server fetches nothing"
        raise expected(inner.param("url"), what, url[:60] if isinstance(url, str) else url)
    try:
        return decode_data_url(url)
    except InvalidArgumentError as error:
        raise invalid(inner.param("url"), str(error).partition(": ")[2]) from None


def _text(message: Fields, name: str) -> str:
    """A string; of several parts, the lines."""
    content = message.get(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise expected(message.param(name), "a string or an array of text parts", content, "invalid_type")
    return "\n".join(_part_text(part) for part in message.objects(name))


def _part_text(part: Fields) -> str:
    kind = part.required("type")
    if isinstance(kind, str) and kind in _REFUSED_PARTS:
        raise not_served(part.path, _REFUSED_PARTS[kind])
    key = part.choice("type", ("text", "refusal"), "text")
    part.only(("type", key))
    text = part.required(key)
    if not isinstance(text, str):
        raise expected(part.param(key), "a string", text, "invalid_type")
    return text
