"""Reads a request that is a form with a file: its fields get the types that JSON would have."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from untorch.serve.openai.errors import ApiError, expected, invalid
from untorch.serve.openai.fields import Fields
from untorch.serve.openai.parameters import Parameter

__all__ = ["parse_form", "read_form"]

_NUMBERS = ("temperature",)
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_MOST_FIELDS = 100


class _Parser(MultiPartParser):
    """In memory, where the body is already: the file system may be read-only."""

    spool_max_size = max_file_size = sys.maxsize  # max_file_size: before Starlette 0.46


async def read_form(request: Request, max_files: int) -> list[tuple[str, str | bytes]]:
    """The fields of a form in their order, files as bytes. Raises ApiError."""
    if importlib.util.find_spec("python_multipart") is None:
        raise ApiError(
            500, "the server cannot read forms: it needs the package python-multipart", kind="server_error",
            code="internal_error",
        )  # fmt: skip
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise invalid(None, f"Content-Encoding: expected none for a form, got {encoding[:40]!r}", "unsupported")
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise invalid(None, f"the request: expected multipart/form-data, got {kind[:80] or 'no content-type'}")
    parser = _Parser(request.headers, request.stream(), max_files=max_files, max_fields=_MOST_FIELDS)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise invalid(None, f"the form: {error.message}", "invalid_form") from None
    try:
        return [(key, value if isinstance(value, str) else await value.read()) for key, value in form.multi_items()]
    finally:
        await form.close()


async def parse_form(request: Request, table: Mapping[str, Parameter]) -> Fields:
    """The form's fields: the file as bytes, lists of names that end in "[]". Empty ones count as absent.

    Raises ApiError.
    """
    values: dict[str, Any] = {}
    for key, given in await read_form(request, max_files=1):
        name = key.removesuffix("[]")
        if name != key:
            values.setdefault(name, [])
            if not isinstance(values[name], list):
                raise invalid(name, "expected it once")
            values[name].append(given)
        elif name in values:
            raise invalid(name, "expected it once, got several")
        elif given != "":
            values[name] = _typed(name, given) if name in table else given
    return Fields(values)


def _typed(name: str, text: Any) -> Any:
    """Of a field that is no string in JSON. Raises ApiError."""
    if name in _NUMBERS and isinstance(text, str):
        try:
            return float(text)
        except ValueError:
            raise expected(name, "a number", text, "invalid_type") from None
    if name == "stream" and isinstance(text, str):
        found = _BOOLEANS.get(text.lower())
        if found is None:
            raise expected(name, "true or false", text, "invalid_type")
        return found
    return text
