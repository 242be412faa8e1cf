"""Front ends over HTTP with clients as they come: huggingface_hub's, curl, Python's own."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.serve.process import Server

Image = pytest.importorskip("PIL.Image")

COLOURS = [("red", "red"), ("lime", "green"), ("blue", "blue")]


def picture(colour: str, size: tuple[int, int] = (60, 40)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def url(front_ends: Server) -> str:
    return f"http://{front_ends.http}/v1/pipeline/colours"


HUGGING_FACE = """
import json, sys
from huggingface_hub import InferenceClient, errors

url, red, blue = sys.argv[1:]
client = InferenceClient(model=url, token="none")
found = {"red": client.image_classification(red), "blue": client.image_classification(open(blue, "rb").read(), top_k=1)}
try:
    client.image_classification(b"no picture")
except errors.HfHubHTTPError as error:
    refused = str(error)
print(json.dumps({"refused": refused, **{name: [one.label for one in labels] for name, labels in found.items()}}))
"""


def test_the_client_of_hugging_face(url: str, tmp_path: pathlib.Path) -> None:
    """In a process of its own: it reads HF_HUB_OFFLINE once, at import, and tests of models set it."""
    if importlib.util.find_spec("huggingface_hub") is None:
        pytest.skip("needs huggingface_hub")
    files = [tmp_path / "red.jpg", tmp_path / "blue.jpg"]
    for file in files:
        file.write_bytes(picture(file.stem))
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run([sys.executable, "-c", HUGGING_FACE, url, *map(str, files)], capture_output=True, text=True,
                          timeout=120, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["red"] == ["red", "green", "blue"]
    assert found["blue"] == ["blue"]
    assert "expected an image that Pillow reads: JPEG, PNG" in found["refused"]


def test_curl(url: str, tmp_path: pathlib.Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    file = tmp_path / "lime.jpg"
    file.write_bytes(picture("lime"))
    for options in (["--data-binary", f"@{file}"], ["-F", f"file=@{file}"], ["-T", str(file), "-X", "POST"],
                    ["-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue", "--data-binary", f"@{file}"],
                    ["--http1.0", "--data-binary", f"@{file}"]):  # fmt: skip
        done = subprocess.run([curl, "-sS", f"{url}?top_k=1", *options], capture_output=True, text=True, timeout=30)
        assert [one["label"] for one in json.loads(done.stdout)] == ["green"], (options, done.stdout, done.stderr)


def test_requests_of_many_clients(front_ends: Server, url: str) -> None:
    """They are joined, and no result is another one's."""
    pictures = [picture(colour) for colour, _ in COLOURS]

    def ask(at: int) -> Any:
        status, answer = front_ends.json("POST", "/v1/pipeline/colours?top_k=1", pictures[at % 3])
        assert status == 200, answer
        return answer[0]["label"]

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        found = list(threads.map(ask, range(150)))
    assert found == [COLOURS[at % 3][1] for at in range(150)]
    metrics = front_ends.request("GET", "/metrics")[2].decode()
    assert 'untorch_requests_total{code="ok",model="colours",protocol="pipeline"}' in metrics


def test_an_image_that_would_be_too_large(front_ends: Server, url: str) -> None:
    """Its pixels are not decoded."""
    file = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(file, "PNG")
    status, answer = front_ends.json("POST", "/v1/pipeline/colours", file.getvalue())
    assert (status, answer["error"]["message"]) == (
        400, "inputs: expected an image of at most 10000 pixels, got 12000 × 12000",
    )  # fmt: skip
    assert front_ends.json("GET", "/v1/pipeline/colours")[1]["labels"] == ["red", "green", "blue"]
