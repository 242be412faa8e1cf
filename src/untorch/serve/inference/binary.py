"""Bodies of the binary tensor extension: a JSON header, then the tensors' bytes, in the order of the header."""

from __future__ import annotations

import json
import zlib
from typing import Any

from untorch.runtime.errors import InvalidArgumentError, UnsupportedError
from untorch.serve.errors import BodyTooLargeError

__all__ = ["HEADER_LENGTH", "Reader", "decompress", "parse_json", "split"]

HEADER_LENGTH = "inference-header-content-length"


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """A body behind ``Content-Encoding``. Stops at ``limit`` bytes. Raises InvalidArgumentError."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise UnsupportedError(f"Content-Encoding: expected gzip or deflate, got {encoding!r:.40}")
    stream = zlib.decompressobj(wbits=31 if encoding == "gzip" else 15)
    try:
        result = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidArgumentError(f"Content-Encoding {encoding}: the body is damaged: {error}") from None
    if len(result) > limit:
        raise BodyTooLargeError(f"the body has more than {limit} bytes when it is decompressed")
    if not stream.eof:
        raise InvalidArgumentError(f"Content-Encoding {encoding}: the body ends too early")
    return result


def parse_json(data: bytes | memoryview) -> dict[str, Any]:
    """A JSON object. Raises InvalidArgumentError."""
    try:
        document = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgumentError(f"the request is no JSON: {text}") from None
    if not isinstance(document, dict):
        raise InvalidArgumentError(f"the request: expected a JSON object, got {type(document).__name__}")
    return document


def split(body: bytes, header_length: str | None) -> tuple[memoryview, Reader]:
    """The JSON header, and what reads the bytes behind it. Raises InvalidArgumentError."""
    view = memoryview(body)
    if header_length is None:
        return view, Reader(view[:0])
    if not header_length.isascii() or not header_length.isdecimal() or int(header_length[:20]) > len(body):
        raise InvalidArgumentError(
            f"Inference-Header-Content-Length: expected at most {len(body)}, the length of the body, "
            f"got {header_length!r:.40}"
        )
    length = int(header_length)
    return view[:length], Reader(view[length:])


class Reader:
    """Takes one tensor after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def take(self, count: Any, what: str) -> memoryview:
        """The next bytes. Raises InvalidArgumentError."""
        rest = len(self._data) - self._position
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= rest:
            raise InvalidArgumentError(
                f"{what}: binary_data_size: expected at most the {rest} bytes that are left behind the JSON header, "
                f"got {count!r:.40}"
            )
        part = self._data[self._position : self._position + count]
        self._position += count
        return part

    def finish(self) -> None:
        """Raises InvalidArgumentError if there is more."""
        if self._position != len(self._data):
            raise InvalidArgumentError(
                f"{len(self._data) - self._position} bytes behind the JSON header belong to no input: check "
                "Inference-Header-Content-Length and binary_data_size"
            )
