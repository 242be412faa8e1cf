"""Images among the parts of messages."""

from __future__ import annotations

import base64

import pytest

from untorch.llm.vision.messages import refuse_files, take_images
from untorch.runtime.errors import InvalidArgumentError

URL = "data:image/png;base64," + base64.b64encode(b"bytes").decode()


def test_both_forms() -> None:
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [
            {"type": "image", "image": "a.png"},
            {"type": "text", "text": "and"},
            {"type": "image_url", "image_url": {"url": URL}},
            {"type": "image", "path": "b.png"},
        ]},
    ]  # fmt: skip
    found, images = take_images(messages)
    assert images == ["a.png", b"bytes", "b.png"]
    assert found[0] is messages[0]
    assert found[1] == {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "image"}],
    }
    assert messages[1]["content"][0] == {"type": "image", "image": "a.png"}, "what was given stays"


def test_what_is_no_list_of_messages() -> None:
    for given in ("text", [1, 2], 5):
        assert take_images(given) == (given, [])


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "image"}, 'chat: expected an image, {"type": "image", "image": …}, got none'),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
         "chat: image_url: expected data:image/…;base64,…, got 'https://example.com/a.png': nothing is fetched; a file "
         'is {"type": "image", "image": "photo.jpg"}'),
        ({"type": "image_url", "image_url": {"url": "data:image/png,raw"}},
         "an image's URL: expected data:image/…;base64,…, got data:image/png,raw"),
    ],
)  # fmt: skip
def test_wrong_parts(part: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        take_images([{"role": "user", "content": [part]}])
    assert str(caught.value) == text


def test_files_of_a_request() -> None:
    refuse_files("text")
    refuse_files([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}])
    with pytest.raises(InvalidArgumentError) as caught:
        refuse_files([{"role": "user", "content": [{"type": "image", "image": "/etc/secret.png"}]}])
    assert str(caught.value) == (
        "chat: expected images as data:image/…;base64,…, as no file is read for a request"
    )  # fmt: skip
