"""Images in a chat's messages."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.unit.llm.vision.encoders import settings
from tests.unit.serve.openai.api import ScriptRunner, chat, serve
from untorch.llm import Prompt
from untorch.llm.vision.encoder import ImageEncoder

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<pad>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)


def url(width: int = 16, form: str = "png") -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, 8), (200, 10, 10)).save(file, form)
    return f"data:image/{form};base64," + base64.b64encode(file.getvalue()).decode()


def runner() -> ScriptRunner:
    """Units of 8 × 8 pixels are tokens with embeddings of 4 values."""
    made = ScriptRunner("A cat.", TEMPLATE, ("<pad>",), hidden=4, embeds=((16, "embeds"),))
    made.vision = ImageEncoder(
        settings(placeholder=258), lambda patches, *_: np.ones((len(patches), 4), np.float32), 1
    )  # fmt: skip
    return made


def look(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image(source: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source, **fields}}


def test_images_between_texts() -> None:
    seen: list[Any] = []
    with serve(runner=runner()) as client:
        engine = client.app.state.engine  # type: ignore[attr-defined]
        submit = engine.submit
        engine.submit = lambda prompt, *args, **options: (seen.append(prompt), submit(prompt, *args, **options))[1]
        parts = ({"type": "text", "text": "a"}, image(url(), detail="high"), {"type": "text", "text": "b"})
        found = chat(client, messages=look(*parts, image(url(24, "jpeg"))))
        assert found["choices"][0]["message"]["content"] == "A cat."
        assert found["usage"]["prompt_tokens"] == 1 + 2 + 1 + 3
        # Texts alone are one text, whether or not the model takes images.
        chat(client, messages=look({"type": "text", "text": "a"}, {"type": "text", "text": "b"}))
        assert engine.tokenizer.decode(seen[1]) == "a\nb"
    prompt = seen[0]
    assert isinstance(prompt, Prompt)
    assert [(place, array.shape) for place, array in prompt.embeddings.items()] == [(1, (2, 4)), (4, (3, 4))]


@pytest.mark.parametrize(
    ("part", "param", "text"),
    [
        (image("https://example.com/a.png"), "messages[0].content[0].image_url.url",
         "expected the image itself as data:image/…;base64,…, as the server fetches nothing, got "),
        (image("/etc/secret.png"), "messages[0].content[0].image_url.url", "expected the image itself"),
        (image(5), "messages[0].content[0].image_url.url", "expected the image itself"),
        (image("data:image/png;base64,%"), "messages[0].content[0].image_url.url", "its base64 is damaged"),
        (image("data:image/png;base64,AAAA"), "messages", "images: expected an image that Pillow reads"),
        (image(url(), detail="most"), "messages[0].content[0].image_url.detail", 'expected "auto" or "low" or "high"'),
        (image(url(), size=3), "messages[0].content[0].image_url.size", "unknown parameter"),
        ({"type": "image_url"}, "messages[0].content[0].image_url", "required, and missing"),
        ({"type": "image", "image": "/etc/secret.png"}, "messages[0].content[0].type", "expected "),
        (image(url(8 * 2000)), "messages", "images: expected sides of a ratio up to 200"),
    ],
)  # fmt: skip
def test_refused_images(part: dict[str, Any], param: str, text: str) -> None:
    with serve(runner=runner()) as client:
        answer = client.post("/v1/chat/completions", json={"model": "m", "messages": look(part)})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert text in error["message"]


def test_images_of_others_than_the_user() -> None:
    with serve(runner=runner()) as client:
        messages = [{"role": "system", "content": [image(url())]}, {"role": "user", "content": "x"}]
        answer = client.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0]"
