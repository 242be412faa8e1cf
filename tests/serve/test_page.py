"""The page at /: its files, its arithmetic in node, and the whole of it in headless Chromium, where those are."""

from __future__ import annotations

import io
import json
import pathlib
import re
import shutil
import subprocess
import wave
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import untorch.serve
from tests.serve.process import Server, linear, serve

FOLDER = pathlib.Path(untorch.serve.__path__[0]) / "page"


def test_files(server: Server) -> None:
    for path, kind in (
        ("/", "text/html"), ("/page/app.js", "javascript"), ("/page/tensors.js", "javascript"), ("/page/style.css", "text/css"),
        ("/page/front_ends.js", "javascript"),
    ):  # fmt: skip
        status, headers, body = server.request("GET", path)
        assert status == 200
        assert kind in headers["content-type"]
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert body == (FOLDER / (path.rpartition("/")[2] or "index.html")).read_bytes()
    assert server.request("GET", "/page/../app.py")[0] == 404


def test_the_page_needs_no_network() -> None:
    for path in FOLDER.iterdir():
        found = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", path.read_text())
        assert set(found) <= {"http://www.w3.org/2000/svg"}, path


NODE = """
import fs from "node:fs";
import * as tensors from %s;
const job = JSON.parse(fs.readFileSync(0));
const npy = job.npy.map((text) => { const file = Buffer.from(text, "base64");
  return tensors.parseNpy(file.buffer.slice(file.byteOffset, file.byteOffset + file.length)); });
const encoded = Object.fromEntries(Object.entries(job.encode).map(([datatype, values]) =>
  [datatype, Buffer.from(tensors.encode(values, datatype)).toString("hex")]));
const decoded = Object.fromEntries(Object.entries(encoded).map(([datatype, hex]) =>
  [datatype, tensors.decode(new Uint8Array(Buffer.from(hex, "hex")), datatype)]));
const failed = job.wrong.map((text) => { try { tensors.parseNumbers(text); return ""; } catch (error) { return error.message; } });
console.log(JSON.stringify({ npy, encoded, decoded, failed, parsed: tensors.parseNumbers("[[1,2,3],[4,5,6.5]]"),
  pixels: [...tensors.pixelsToNumbers([255, 0, 51, 255, 0, 255, 102, 255], { channels: 3, first: true }, false, false)],
  cosines: tensors.cosines([3, 4, 0, 2, -3, -4, 0, 0], 2),
  layouts: [[1, 3, 8, 9], [-1, 8, 9, 3], [8, 9], [1, 8, 8, 8]].map(tensors.imageLayout) }));
"""


def test_numbers(tmp_path: pathlib.Path) -> None:
    """Bytes, halves and .npy files as numpy has them."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    import base64

    halves = [0.0, -1.5, 65504.0, 70000.0, 6e-8, 3e-5, 0.1, 1 / 3, 2049.0, 2051.0]
    encode = {
        "FP16": halves, "BF16": [0.0, 1.0, -3.14159, 1e38, 1.00390625, 1.01171875], "FP32": [0.1, -5.0], "FP64": [0.1],
        "INT8": [-128, 127], "INT64": [-(2**53), 7], "UINT64": [2**53], "UINT16": [65535], "BOOL": [0, 1], "INT32": [-2, 5],
    }  # fmt: skip
    arrays = [np.arange(6, dtype=kind).reshape(2, 3) for kind in ("<f4", "<f8", "<i8", "u1", "<f2")]
    files = []
    for array in arrays:
        file = io.BytesIO()
        np.save(file, array)
        files.append(base64.b64encode(file.getvalue()).decode())
    job = {"npy": files, "encode": encode, "wrong": ["[[1],[2,3]]", '["a"]', "[1"]}
    script = tmp_path / "test.mjs"
    module = tmp_path / "tensors.mjs"
    shutil.copy(FOLDER / "tensors.js", module)
    script.write_text(NODE % json.dumps(str(module)))
    done = subprocess.run([node, str(script)], input=json.dumps(job), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for array, got in zip(arrays, result["npy"], strict=True):
        assert (got["shape"], got["values"]) == ([2, 3], array.ravel().tolist())
    names = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BOOL": "?", "BF16": ml_dtypes.bfloat16}
    for datatype, values in encode.items():
        kind: Any = (
            names.get(datatype) or f"<{'u' if datatype[0] == 'U' else 'i'}{int(re.sub('[A-Z]', '', datatype)) // 8}"
        )
        with np.errstate(over="ignore"):
            expected = np.array(values).astype(kind)
        assert result["encoded"][datatype] == expected.tobytes().hex(), datatype
        shown = [value if value is not None else float("inf") for value in result["decoded"][datatype]]
        assert shown == expected.astype(float).tolist(), datatype
    assert result["parsed"] == {"shape": [2, 3], "values": [1, 2, 3, 4, 5, 6.5]}
    assert result["failed"][:2] == ["the lists have different lengths", "expected numbers"]
    assert result["failed"][2]
    expected = [[1, 0.8, -1, 0], [0.8, 1, -0.8, 0], [-1, -0.8, 1, 0], [0, 0, 0, 0]]
    assert np.allclose(result["cosines"], expected)
    assert np.allclose(result["pixels"], [1, 0, 0, 1, 0.2, 0.4])
    assert [layout and (layout["channels"], layout["first"]) for layout in result["layouts"]] == [
        (3, True),
        (3, False),
        None,
        None,
    ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    with sync_api.sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab; errors of its scripts are the test's."""
    one = browser.new_page()
    errors: list[str] = []
    one.on("pageerror", lambda error: errors.append(str(error)))
    one.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield one
    one.close()
    assert [error for error in errors if "status of 4" not in error] == []


def card(page: Any, model: str) -> Any:
    return page.locator(f'section[data-model="{model}"]')


def test_a_form_is_sent(server: Server, page: Any, tmp_path: pathlib.Path) -> None:
    page.goto(server.addresses["http"])
    one = card(page, "own.linear")
    one.locator("textarea").fill("[[1, 2, 3, 4], [5, 6, 7, 8]]")
    one.get_by_role("button", name="Run").click()
    one.locator("pre").wait_for()
    expected = ", ".join(str(int(value)) for row in linear([[1, 2, 3, 4], [5, 6, 7, 8]]) for value in row)
    assert one.locator("pre").inner_text() == f"output: FP32[2, 3]\n  {expected}"
    assert "of 1 calls p50" in one.locator("header .facts").inner_text()
    np.save(tmp_path / "x.npy", np.array([[1, 1, 1, 1]], dtype=np.float32))
    one.locator("input[type=file]").set_input_files(tmp_path / "x.npy")
    one.get_by_text("4 numbers from x.npy").wait_for()
    one.get_by_role("button", name="Run").click()
    one.get_by_text("16, 42, 68").wait_for()
    one.locator("textarea").fill("[[1, 2]]")
    one.get_by_role("button", name="Run").click()
    one.get_by_text("method 'linear', input 'x': expected").wait_for()


def test_sound_is_sent(server: Server, page: Any, tmp_path: pathlib.Path) -> None:
    """A WAV for an input of one row: here of the counter, four numbers."""
    with wave.open(str(tmp_path / "s.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(np.full(100, 16384, dtype="<i2").tobytes())
    page.goto(server.addresses["http"])
    one = card(page, "own.counter")
    one.locator("input[type=file]").set_input_files(tmp_path / "s.wav")
    one.get_by_text("4 numbers from s.wav").wait_for()
    one.get_by_role("button", name="Run").click()
    one.locator("pre").wait_for()
    numbers = [float(text) for text in one.locator("pre").inner_text().splitlines()[1].split(",")]
    assert np.allclose(numbers, [1.5, 2, 1.5, 1.5], atol=0.01)


def test_a_picture_gets_labels(front_ends: Server, page: Any, tmp_path: pathlib.Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (40, 20), "red").save(tmp_path / "red.jpg")
    page.goto(front_ends.addresses["http"])
    one = page.locator('section[data-pipeline="colours"]')
    one.locator("input[type=file]").set_input_files(tmp_path / "red.jpg")
    one.get_by_role("button", name="Run").click()
    one.locator("table").wait_for()
    rows = one.locator("tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["red", "green", "blue"]
    assert one.locator("canvas").evaluate("canvas => [canvas.width, canvas.height]") == [40, 20]
    assert "of 1 calls p50" in one.locator("header .facts").inner_text()
    (tmp_path / "no.jpg").write_bytes(b"no picture")
    one.locator("input[type=file]").set_input_files(tmp_path / "no.jpg")
    one.get_by_role("button", name="Run").click()
    one.get_by_text("inputs: expected an image that Pillow reads").wait_for()


TASKS = {
    "text": ("text-classification", "text", [[{"label": "<b>good</b>", "score": 0.75}]], "<b>good</b> 0.7500"),
    "rank": ("reranking", "text", [{"index": 1, "score": 0.5, "document": "cats purr"}], "cats purr 0.5000"),
    "ner": ("token-classification", "text", [{"entity_group": "PER", "score": 0.5, "word": "Ann"}], "PER Ann 0.5000"),
    "sbert": ("text-embedding", "text", [0.5, 0.25], "2 numbers 0.5000, 0.2500"),
    "asr": ("automatic-speech-recognition", "audio", {"text": "hello"}, "hello"),
    "detr": (
        "object-detection", "image",
        [{"label": "cat", "score": 0.5, "box": {"xmin": 1, "ymin": 1, "xmax": 9, "ymax": 9}}], "cat 0.5000",
    ),
    "clip": ("zero-shot-image-classification", "image", [{"label": "a cat", "score": 0.5}], "a cat 0.5000"),
}  # fmt: skip


def test_results_of_each_task(server: Server, page: Any, tmp_path: pathlib.Path) -> None:
    """With answers as they would come."""
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    sent: dict[str, Any] = {}

    def answer(route: Any) -> None:
        name = route.request.url.split("/")[-1].partition("?")[0]
        sent[name] = route.request
        route.fulfill(json=TASKS[name][2])

    listed = [
        {
            "id": name, "task": task, "input": kind, "architecture": "A",
            "options": ["candidate_labels"] if name == "clip" else [],
        }
        for name, (task, kind, _, _) in TASKS.items()
    ]  # fmt: skip
    page.route("**/v1/pipeline", lambda route: route.fulfill(json={"data": listed}))
    page.route("**/v1/pipeline/**", answer)
    page.goto(server.addresses["http"])
    for name, (_, kind, _, shown) in TASKS.items():
        one = page.locator(f'section[data-pipeline="{name}"]')
        if kind == "text":
            one.locator("textarea").fill("dogs bark\ncats purr")
            if name == "rank":
                one.get_by_label("query").fill("who purrs")
        else:
            one.locator("input[type=file]").set_input_files(tmp_path / ("a.png" if kind == "image" else "a.wav"))
        if name == "clip":
            one.get_by_label("candidate labels").fill("a cat, a dog")
        one.get_by_role("button", name="Run").click()
        one.locator("pre, table").wait_for()
        assert " ".join(one.locator("pre, table").inner_text().split()) == shown, name
    assert sent["rank"].post_data_json == {"inputs": {"query": "who purrs", "documents": ["dogs bark", "cats purr"]}}
    assert sent["clip"].url.endswith("?candidate_labels=a+cat%2C+a+dog")
    assert sent["asr"].headers["content-type"].startswith("audio/")


def test_a_key_is_asked_for(package: pathlib.Path, tmp_path: pathlib.Path, page: Any) -> None:
    with serve(tmp_path, f"own={package}", UNTORCH_API_KEY="secret") as server:
        page.goto(server.addresses["http"])
        page.get_by_text("This server asks for an API key.").wait_for()
        page.locator("#key").fill("secret")
        page.locator("#key").press("Enter")
        card(page, "own.linear").wait_for()


def test_chat_streams(server: Server, page: Any) -> None:
    """With answers of the OpenAI API as they would come: the conversation is sent whole, text is no HTML."""
    sent: list[Any] = []
    answers = iter(["Hello <b>you</b>", "Again"])
    model = {
        "name": "lm", "versions": ["1"], "platform": "untorch_llm", "inputs": [], "outputs": [],
        "untorch": {"architecture": "x", "max_positions": 64},
    }  # fmt: skip

    def chat(route: Any) -> None:
        sent.append(route.request.post_data_json)
        chunks = [{"choices": [{"delta": {"content": part}}]} for part in next(answers).partition(" ")]
        chunks.insert(0, {"choices": [{"delta": {"role": "assistant"}}]})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        route.fulfill(content_type="text/event-stream", body="".join([*lines, "data: [DONE]\n\n"]))

    page.route("**/v2/repository/index", lambda route: route.fulfill(json=[{"name": "lm", "state": "READY"}]))
    page.route("**/v2/models/lm", lambda route: route.fulfill(json=model))
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "lm"}]}))
    page.route("**/v1/chat/completions", chat)
    page.goto(server.addresses["http"])
    one = card(page, "lm")
    for text, answer in (("Hi", "Hello <b>you</b>"), ("More", "Again")):
        one.locator("textarea").fill(text)
        one.get_by_role("button", name="Send").click()
        one.get_by_text(answer, exact=True).wait_for()
    assert [message["content"] for message in sent[1]["messages"]] == ["Hi", "Hello <b>you</b>", "More"]
    assert sent[0]["stream"] is True
    assert "of 2 calls" in one.locator("header .facts").inner_text()


def test_sentences_are_compared(server: Server, page: Any) -> None:
    sent: list[Any] = []

    def infer(route: Any) -> None:
        sent.append(route.request.post_data_json)
        output = {"name": "embedding", "datatype": "FP32", "shape": [2, 2], "data": [1, 0, 0.6, 0.8]}
        route.fulfill(json={"outputs": [output]})

    model = {
        "name": "em", "versions": ["1"], "platform": "untorch_llm", "inputs": [], "outputs": [],
        "untorch": {"architecture": "x", "task": "embed", "max_positions": 64},
    }  # fmt: skip
    page.route("**/v2/repository/index", lambda route: route.fulfill(json=[{"name": "em", "state": "READY"}]))
    page.route("**/v2/models/em", lambda route: route.fulfill(json=model))
    page.route("**/v2/models/em/infer", infer)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "em"}]}))
    page.goto(server.addresses["http"])
    one = card(page, "em")
    one.locator("textarea").fill("a cat\n\n a dog ")
    one.get_by_role("button", name="Compare").click()
    one.locator("table").wait_for()
    assert one.locator("td").all_inner_texts() == ["1.000", "0.600", "0.600", "1.000"]
    assert one.locator("th").all_inner_texts()[3:] == ["1 a cat", "2 a dog"]
    assert sent[0]["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["a cat", "a dog"]}]
