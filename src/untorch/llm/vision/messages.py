"""Images among the parts of a conversation's messages, in the forms of transformers and of OpenAI's API."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from untorch.runtime.errors import InvalidArgumentError

__all__ = ["decode_data_url", "refuse_files", "take_images"]

_SOURCES = ("image", "path", "url")


def take_images(messages: Any) -> tuple[Any, list[Any]]:
    """The messages with ``{"type": "image"}`` where they have images, and the images. Raises InvalidArgumentError.

    Images are {"type": "image", "image": …} (also "path" or "url") and {"type": "image_url", "image_url": {"url": …}}
    with a data: URL. What is no list of dictionaries is returned as it is.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages, []
    found, images = [], []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            found.append(message)
            continue
        parts = []
        for part in content:
            if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
                images.append(_source(part))
                part = {"type": "image"}
            parts.append(part)
        found.append({**message, "content": parts})
    return found, images


def _source(part: Mapping[str, Any]) -> Any:
    if part["type"] == "image_url":
        given = part.get("image_url")
        source = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(source, str) or not source.startswith("data:"):
            raise InvalidArgumentError(
                f"chat: image_url: expected data:image/…;base64,…, got {source!r:.60}: nothing is fetched; a file is "
                '{"type": "image", "image": "photo.jpg"}'
            )
    else:
        source = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
        if source is None:
            raise InvalidArgumentError('chat: expected an image, {"type": "image", "image": …}, got none')
    return decode_data_url(source) if isinstance(source, str) and source.startswith("data:") else source


def refuse_files(messages: Any) -> None:
    """For messages that came over a network. Raises InvalidArgumentError for an image that is no data: URL."""
    _, images = take_images(messages)
    if any(not isinstance(image, bytes) for image in images):
        raise InvalidArgumentError("chat: expected images as data:image/…;base64,…, as no file is read for a request")


def decode_data_url(url: str) -> bytes:
    """ "data:image/png;base64,…" → the bytes of the file. Raises InvalidArgumentError."""
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidArgumentError(f"an image's URL: expected data:image/…;base64,…, got {url:.60}")
    try:
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InvalidArgumentError(f"an image's URL: its base64 is damaged: {error}") from None
