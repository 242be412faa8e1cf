"""A request's tools and tool_choice: which functions are shown, which may be called, and whether one must be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from untorch.serve.openai.errors import expected, invalid, not_served
from untorch.serve.openai.fields import Fields
from untorch.serve.openai.tools.base import Tool

__all__ = ["ToolChoice", "read_tools"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST = 128
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolChoice:
    """shown: to the model. callable: those it may call; none: what looks like a call is text."""

    shown: Sequence[Tool] = ()
    callable: Sequence[Tool] = ()
    required: bool = False
    many: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether arguments must follow a schema even where no call is required."""
        return any(tool.strict for tool in self.callable)


def read_tools(fields: Fields) -> ToolChoice:
    """Of ``tools``, ``tool_choice`` and ``parallel_tool_calls``. Raises ApiError."""
    tools = _tools(fields)
    many = fields.boolean("parallel_tool_calls", True)
    choice = fields.get("tool_choice")
    if choice is None:
        choice = "auto"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise expected("tool_choice", '"none", "auto", "required" or an object', choice)
        if choice == "required" and not tools:
            raise invalid("tool_choice", "expected tools with it, got none")
        if choice == "none":
            return ToolChoice()
        return ToolChoice(tools, tools, choice == "required", many)
    inner = fields.object("tool_choice")
    assert inner is not None
    if inner.get("type") == "custom":
        raise not_served("tool_choice", "there are no custom tools")
    kind = inner.choice("type", ("function", "allowed_tools"), "")
    inner.only(("type", kind))
    inner.required(kind)
    if kind == "function":
        tool = _find(_object(inner, kind), tools)
        return ToolChoice(tools, [tool], True, False)
    allowed = _object(inner, kind)
    allowed.only(("mode", "tools"))
    mode = allowed.choice("mode", ("auto", "required"), "auto")
    few = []
    for one in allowed.objects("tools"):
        if one.get("type") != "function":
            raise not_served(one.path, "tools are functions")
        one.only(("type", "function"))
        one.required("function")
        few.append(_find(_object(one, "function"), tools))
    if not few:
        raise expected(allowed.param("tools"), "at least one tool", [])
    return ToolChoice(few, few, mode == "required", many)


def _object(fields: Fields, name: str) -> Fields:
    found = fields.object(name)
    assert found is not None
    return found


def _find(function: Fields, tools: Sequence[Tool]) -> Tool:
    name = function.required("name")
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(tool.name for tool in tools) or "none"
    raise expected(function.param("name"), f"one of the tools ({known})", name)


def _tools(fields: Fields) -> list[Tool]:
    tools: list[Tool] = []
    given = fields.objects("tools")
    if len(given) > _MOST:
        raise invalid("tools", f"expected at most {_MOST}, got {len(given)}")
    for one in given:
        kind = one.required("type")
        if kind == "custom":
            raise not_served(one.path, "tools are functions")
        one.choice("type", ("function",), "")
        one.only(("type", "function"))
        one.required("function")
        tools.append(_function(_object(one, "function")))
        if tools[-1].name in [tool.name for tool in tools[:-1]]:
            raise invalid(f"{one.path}.function.name", f"expected another name, as {tools[-1].name} is there already")
    return tools


def _function(function: Fields) -> Tool:
    function.only(("name", "description", "parameters", "strict"))
    name = function.required("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise expected(function.param("name"), "up to 64 letters, digits, underscores and dashes", name)
    function.string("description")
    parameters = function.object("parameters")
    strict = function.boolean("strict")
    if parameters is not None and parameters.get("type") not in (None, "object"):
        raise expected(parameters.param("type"), '"object"', parameters.get("type"))
    schema = _NOTHING if parameters is None else parameters.values
    # Some templates fail without a description or parameters.
    given = {key: value for key, value in function.values.items() if key != "strict" and value is not None}
    definition = {
        "type": "function",
        "function": {**given, "description": given.get("description", ""), "parameters": schema},
    }
    return Tool(name, schema, strict, definition)
