"""What a chat's answer must look like, by response_format, structured_outputs and tools, as the engine's fields."""

from __future__ import annotations

from typing import Any

from untorch.llm import Engine
from untorch.serve.openai.errors import expected, invalid
from untorch.serve.openai.fields import Fields
from untorch.serve.openai.sampling import read_structure
from untorch.serve.openai.tools import ToolFormat
from untorch.serve.openai.tools.choice import ToolChoice
from untorch.serve.openai.tools.grammar import Thoughts, build_grammar

__all__ = ["read_answer_format"]


def read_answer_format(
    fields: Fields, tools: ToolChoice, tool_format: ToolFormat | None, thoughts: Thoughts, engine: Engine
) -> tuple[dict[str, Any], str]:
    """SamplingParams' fields, and the request's parameter that they come from. Raises ApiError."""
    structure, source = read_structure(fields), "structured_outputs"
    schema = _response_format(fields)
    if schema is not None:
        if structure:
            raise invalid("structured_outputs", "expected response_format or this, got both")
        structure, source = {"json_schema": schema}, "response_format"
    content = structure.get("json_schema")
    if tool_format is not None:
        if structure and (content is None or isinstance(content, str)):
            raise invalid(source, "expected a JSON schema as an object beside tools")
        if not (tools.required or tools.is_strict or content is not None):
            return {}, "tools"
    elif content is None or isinstance(content, str) or thoughts == "none":
        return structure, source

    def token(text: str) -> str | None:
        found = None if engine.tokenizer is None else engine.tokenizer.added_id(text)
        return None if found is None else f"<[{found}]>"

    grammar = build_grammar(
        None if tool_format is None else tool_format.grammar(token), tools.callable,
        required=tools.required, many=tools.many, content=content, thoughts=thoughts, token=token,
    )  # fmt: skip
    return {"grammar": grammar}, "tools" if tool_format is not None else source


def _response_format(fields: Fields) -> dict[str, Any] | None:
    """A JSON schema; None: any text."""
    inner = fields.object("response_format")
    if inner is None:
        return None
    inner.required("type")
    kind = inner.choice("type", ("text", "json_object", "json_schema"), "text")
    inner.only(("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner.required("json_schema")
    about = inner.object("json_schema")
    assert about is not None
    about.only(("name", "description", "schema", "strict"))
    about.required("name")
    about.string("name")
    about.string("description")
    about.boolean("strict")
    schema = about.get("schema")
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, dict):
        raise expected(about.param("schema"), "a JSON schema as an object", schema, "invalid_type")
    return schema
