"""Reads the JSON objects of a request: every value has its type and range checked, and errors name where it is."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request

from untorch.serve.inference.binary import decompress
from untorch.serve.openai.errors import ApiError, expected, invalid

__all__ = ["Fields", "parse_body", "read_body"]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body, of at most ``limit`` bytes when it is decompressed.

    Raises:
        BodyTooLargeError: It has more.
        InvalidArgumentError, UnsupportedError: Its Content-Encoding is not what it is, or not gzip or deflate.
    """
    return decompress(await request.body(), request.headers.get("content-encoding", "").lower(), limit)


def parse_body(body: bytes) -> Fields:
    """The request's JSON object. Raises ApiError."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_number)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the request's text has half of a surrogate pair", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request is no JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the request: expected a JSON object", code="invalid_json")
    return Fields(value)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


class Fields:
    """An object of the request. A value that is null counts as absent. All methods raise ApiError.

    path: where the object is, such as ``messages[0]``; empty for the request itself.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values, self.path = values, path

    def param(self, name: str) -> str:
        """The name with the object's path."""
        return f"{self.path}.{name}" if self.path else name

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value as it is."""
        return self.values.get(name)

    def only(self, known: Iterable[str]) -> None:
        """Refuse other names, with the nearest one."""
        names = list(known)
        for name, value in self.values.items():
            if name in names or value is None:
                continue
            near = difflib.get_close_matches(name, names, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise invalid(self.param(name), f"unknown parameter{hint}", "unknown_parameter")

    def required(self, name: str) -> Any:
        """The value, which must be there."""
        value = self.get(name)
        if value is None:
            raise invalid(self.param(name), "required, and missing", "missing_required_parameter")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise expected(self.param(name), "true or false", value, "invalid_type")
        return value

    def integer(self, name: str, least: int, most: int | None = None) -> int | None:
        """An integer in a range."""
        value = self.get(name)
        if value is None:
            return None
        what = f"an integer of {least} or more" if most is None else f"an integer from {least} to {most}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise expected(self.param(name), what, value, "invalid_type")
        if value < least or (most is not None and value > most):
            raise expected(self.param(name), what, value)
        return value

    def number(self, name: str, least: float, most: float, above: bool = False) -> float | None:
        """A number in a range; above: without its lower end."""
        value = self.get(name)
        if value is None:
            return None
        to = f" to {most:g}" if math.isfinite(most) else ""
        what = f"a number above {least:g}{',' if to else ''}{to}" if above else f"a number from {least:g}{to}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise expected(self.param(name), what, value, "invalid_type")
        if not (least < value if above else least <= value) or not value <= min(most, 1e300):
            raise expected(self.param(name), what, value)
        return float(value)

    def string(self, name: str) -> str | None:
        """A string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise expected(self.param(name), "a string", value, "invalid_type")
        return value

    def choice(self, name: str, values: Iterable[str], default: str) -> str:
        """One of some strings."""
        value = self.get(name)
        if value is None:
            return default
        known = list(values)
        if not isinstance(value, str) or value not in known:
            raise expected(self.param(name), " or ".join(f'"{one}"' for one in known), value)
        return value

    def object(self, name: str) -> Fields | None:
        """An object."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise expected(self.param(name), "an object", value, "invalid_type")
        return Fields(value, self.param(name))

    def array(self, name: str) -> list[Any] | None:
        """An array."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise expected(self.param(name), "an array", value, "invalid_type")
        return value

    def objects(self, name: str) -> list[Fields]:
        """An array of objects; empty if it is absent."""
        found = []
        for at, value in enumerate(self.array(name) or ()):
            path = f"{self.param(name)}[{at}]"
            if not isinstance(value, dict):
                raise expected(path, "an object", value, "invalid_type")
            found.append(Fields(value, path))
        return found
