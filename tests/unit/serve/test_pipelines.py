"""/v1/pipeline: what it takes, gives and refuses, with front ends whose methods are functions behind real batchers."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import types
import wave
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from tests.unit.llm.fake import byte_tokenizer
from untorch import ClosedError, UnsupportedError
from untorch.pipeline.load import PIPELINES
from untorch.pipeline.settings import Settings
from untorch.pipeline.speech import SpeechRecognition
from untorch.serve.app import build_app
from untorch.serve.batching import Batcher, Call
from untorch.serve.front_end import INPUTS, FrontEnd
from untorch.serve.model import Port
from untorch.serve.options import ServeOptions
from untorch.serve.repository import Package
from untorch.serve.state import ServerState
from untorch.speech import Segment, Transcription

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("soundfile")


class Method:
    """A function of named arrays, whose calls are joined."""

    max_batch_size = 4

    def __init__(self, function: Callable[..., Any], names: list[str]) -> None:
        self.names, self.shapes = names, list[tuple[int, ...]]()
        self.inputs = tuple(Port(name, "FP32", (-1, -1)) for name in names)

        def run(arrays: Any) -> list[Any]:
            self.shapes.append(arrays[0].shape)
            return list(function(*arrays))

        self.batcher = Batcher(run, joins=True, max_batch_size=4)

    def submit(self, inputs: Mapping[str, Any], done: Callable[[Call], None], timeout: float | None) -> Call:
        return self.batcher.submit([inputs[name] for name in self.names], done, timeout)


A = 64  # the token of "a": tokens are those of ``byte_tokenizer``, whose alphabet begins with "!"
TEXT = {"text_inputs": ["input_ids", "attention_mask"], "max_length": 40, "pad_id": 0, "padding_side": "right"}
IMAGE = {"image_steps": [["resize", 4, 4, 2], ["rescale", 1 / 255]], "labels": ["red", "green", "blue"]}


def pixels(function: Callable[..., Any], name: str = "forward") -> dict[str, Method]:
    return {name: Method(function, ["pixel_values"])}


def texts(function: Callable[..., Any], name: str = "forward") -> dict[str, Method]:
    return {name: Method(function, TEXT["text_inputs"])}  # type: ignore[arg-type]


def colours(x: Any) -> list[Any]:
    return [x.mean((2, 3)) * 9]


def boxes(x: Any) -> list[Any]:
    """One object, as red as the picture, in the left half."""
    logits = np.array([[[9, 0, 0, 0], [0, 0, 0, 9]]], np.float32)
    return [logits, np.array([[[0.25, 0.5, 0.5, 1], [0.5, 0.5, 1, 1]]], np.float32)]


def lengths(ids: Any, mask: Any) -> list[Any]:
    """Scores: 1 for the last of two labels if the text has more than 4 bytes."""
    return [np.stack([4 - mask.sum(1), mask.sum(1) - 4], 1).astype(np.float32)]


def vowels(ids: Any, mask: Any) -> list[Any]:
    return [np.stack([ids != A, ids == A], 2).astype(np.float32) * 9]


KINDS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Method]]]] = {
    "vit": ("image-classification", {**IMAGE, "activation": "softmax"}, lambda: pixels(colours)),
    "detr": ("object-detection", IMAGE, lambda: pixels(boxes)),
    "seg": ("image-segmentation", IMAGE, lambda: pixels(lambda x: [x])),
    "clip": (
        "zero-shot-image-classification",
        {**IMAGE, **TEXT, "logit_scale": 1.0, "logit_bias": 0.0, "activation": "softmax"},
        lambda: {
            **pixels(lambda x: [x.mean((2, 3))], "encode_image"),
            **texts(lambda ids, mask: [np.eye(3, dtype=np.float32)[mask.sum(1) % 3] * 9], "encode_text"),
        },
    ),
    "bert": ("text-classification", {**TEXT, "labels": ["short", "long"], "activation": "softmax"}, lambda: texts(lengths)),
    "ner": ("token-classification", {**TEXT, "labels": ["O", "A"]}, lambda: texts(vowels)),
    "sbert": ("text-embedding", TEXT, lambda: texts(lambda ids, mask: [np.stack([mask.sum(1), ids.max(1)], 1)])),
    "rank": (
        "reranking", {**TEXT, "labels": ["x"], "activation": "none"}, lambda: texts(lambda ids, mask: [mask.sum(1)[:, None]]),
    ),
    "sound": (
        "audio-classification",
        {
            "labels": ["quiet", "loud"], "sampling_rate": 8000, "min_samples": 10, "max_samples": 8000,
            "normalize": False, "activation": "softmax",
        },
        lambda: {"forward": Method(lambda x: [np.stack([0.5 - abs(x).mean(1), abs(x).mean(1)], 1) * 9], ["input_values"])},
    ),
}  # fmt: skip


class Handle:
    def __init__(self, found: Transcription) -> None:
        self.found = found

    def result(self) -> Transcription:
        return self.found

    def cancel(self) -> None:
        pass


class Transcriber:
    """Says how many samples there are."""

    settings = types.SimpleNamespace(sampling_rate=8000, architecture="A")
    has_words, has_times = False, True

    def __init__(self) -> None:
        self.closed = 0  # submissions that find it closed

    def submit(self, source: Any, timeout: float | None, **given: Any) -> Handle:
        if self.closed:
            self.closed -= 1
            raise ClosedError("closed")
        text = f" {len(source)}"
        reason: Any = "timeout" if given.get("prompt") == "slow" else "stop"
        segments = (Segment(text, 0.0, 1.0),)
        return Handle(Transcription(text, 1.0, given.get("language"), segments, finish_reason=reason))


def front_end(name: str, **limits: Any) -> FrontEnd:
    task, values, methods = KINDS[name]
    program: Any = types.SimpleNamespace(path="a.pt2")
    program._program = types.SimpleNamespace(entry=lambda entry: byte_tokenizer())
    made = PIPELINES[task](program, Settings({"task": task, "architecture": "A", **values}, "a.pt2"), False)
    return FrontEnd(name, made, methods(), **{"max_pixels": 10_000, "max_batch_size": 4, "timeout": 20.0, **limits})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    """A package of each kind; "plain" has no front end."""
    state = ServerState(ServeOptions(repository="/nowhere", max_queue=8, page=False, max_body=2**20))
    speech = SpeechRecognition.__new__(SpeechRecognition)
    speech.settings, speech.task, speech.architecture = Settings({}, "a.pt2"), "automatic-speech-recognition", "A"
    speech.transcriber, speech._owned, speech._owns_transcriber = Transcriber(), False, False  # type: ignore[assignment]
    ends: dict[str, Any] = {name: front_end(name) for name in KINDS}
    for name, end in {**ends, "asr": FrontEnd("asr", speech, {}, max_pixels=1, timeout=20), "plain": None}.items():
        entry: Any = types.SimpleNamespace(path="a.pt2", package=None, state="", reason="", lock=None)
        state.repository._entries[name] = entry
        state.repository._exchange(entry, Package(name, "a.pt2", {}, front_end=end))
    state.repository._entries["gone"] = types.SimpleNamespace(path="", package=None, state="", reason="unloaded")  # type: ignore[assignment]
    state.loaded = True
    yield state
    for end in ends.values():
        end.close()
        for method in end._methods.values():
            method.batcher.close()


def front_end_of(state: ServerState, name: str) -> Any:
    return next(package.front_end for package in state.repository.packages if package.name == name)


def ask(state: ServerState, *requests: Mapping[str, Any]) -> list[httpx.Response]:
    """All at once: keyword arguments of a client's ``request``."""

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=build_app(state.options, state))
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=30) as client:
            calls = [client.request(**{"method": "POST", **one}) for one in requests]  # type: ignore[arg-type]
            return await asyncio.gather(*calls)

    return asyncio.run(main())


def post(state: ServerState, name: str, **request: Any) -> httpx.Response:
    query = request.pop("query", "")
    return ask(state, {"url": f"/v1/pipeline/{name}{query}", **request})[0]


def picture(colour: str = "red", size: tuple[int, int] = (20, 10), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def sound(value: int, rate: int = 8000, seconds: float = 0.5) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as one:
        one.setnchannels(1)
        one.setsampwidth(2)
        one.setframerate(rate)
        one.writeframes(np.full(int(rate * seconds), value, "<i2").tobytes())
    return file.getvalue()


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_an_image_in_every_form(state: ServerState) -> None:
    png, jpeg = picture(), picture(kind="JPEG")
    forms: list[dict[str, Any]] = [
        {"content": png, "headers": {"content-type": "image/png"}},
        {"content": jpeg, "headers": {"content-type": "image/png"}},  # the file itself says what it is
        {"content": jpeg},
        {"content": jpeg, "headers": {"content-type": "application/x-www-form-urlencoded"}},  # curl --data-binary
        {"content": jpeg, "headers": {"content-type": "application/octet-stream"}},
        {"files": {"file": ("a.png", png)}},
        {"files": {"inputs": ("a.png", png)}},
        {"json": {"inputs": text_of(png)}},
        {"json": {"inputs": f"data:image/png;base64,{text_of(png)}", "parameters": None}},
        {"data": {"inputs": text_of(png)}, "files": {"file": ("", b"")}},
    ]
    for one in forms[:-1]:
        answer = post(state, "vit", query="?top_k=2", **one)
        assert answer.status_code == 200, answer.text
        assert [row["label"] for row in answer.json()] == ["red", "green"], one
        assert answer.json()[0]["score"] > 0.99
    assert answer.headers["content-type"] == "application/json"
    # In a form a picture that is no file is base64, and options are fields.
    boundary = "x"
    fields = {"inputs": text_of(png), "top_k": "1"}
    body = "".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'
        for key, value in fields.items()
    )
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    answer = post(state, "vit", content=f"{body}--{boundary}--\r\n".encode(), headers=headers)
    assert [row["label"] for row in answer.json()] == ["red"]


def test_several_images_are_a_list(state: ServerState) -> None:
    colours = ["red", "lime", "blue", "lime", "red", "blue"]
    files = [("file", (f"{colour}.png", picture(colour))) for colour in colours]
    expected = ["red", "green", "blue", "green", "red", "blue"]
    answer = post(state, "vit", files=files, data={"top_k": "1"})
    assert [rows[0]["label"] for rows in answer.json()] == expected
    answer = post(state, "vit", json={"inputs": [text_of(picture(colour)) for colour in colours]})
    assert [rows[0]["label"] for rows in answer.json()] == expected
    answer = post(state, "vit", json={"inputs": [text_of(picture())], "parameters": {"top_k": 1}})
    assert [[row["label"] for row in rows] for rows in answer.json()] == [["red"]]
    assert post(state, "vit", json={"inputs": []}).json() == []


def test_tasks_on_images(state: ServerState) -> None:
    (found,) = post(state, "detr", content=picture(size=(40, 10))).json()
    assert found["label"] == "red"
    assert found["box"] == {"xmin": 0, "ymin": 0, "xmax": 20, "ymax": 10}
    assert post(state, "detr", query="?threshold=1", content=picture()).json() == []
    (found,) = post(state, "seg", content=picture("lime")).json()
    assert found["label"] == "green"
    mask = Image.open(io.BytesIO(base64.b64decode(found["mask"])))
    assert (mask.size, np.asarray(mask).min()) == ((20, 10), 255)
    labels = ["a", "ab", "abc"]
    ranked = post(
        state, "clip", query="?candidate_labels=a,ab,abc&hypothesis_template={}", content=picture("lime")
    ).json()
    again = post(
        state, "clip", json={
            "inputs": text_of(picture("lime")),
            "parameters": {"candidate_labels": labels, "hypothesis_template": "{}"},
        },
    ).json()  # fmt: skip
    assert ranked == again
    assert ranked[0]["label"] == "a"


def test_tasks_on_text(state: ServerState) -> None:
    answer = post(state, "bert", content=b"hello there", headers={"content-type": "text/plain; charset=utf-8"})
    assert answer.json()[0]["label"] == "long"
    assert post(state, "bert", content=b"abc").json()[0]["label"] == "short"
    assert post(state, "bert", json={"inputs": ["abc", "hello"]}).json()[1]["label"] == "long"
    assert post(state, "bert", json={"inputs": {"text": "ab", "text_pair": "cdef"}}).json()[0]["label"] == "long"
    assert post(state, "bert", files={"file": ("a.txt", b"hello")}).json()[0]["label"] == "long"
    entities = post(state, "ner", json={"inputs": "bab", "parameters": {"aggregation_strategy": "simple"}}).json()
    assert [(one["entity_group"], one["start"], one["end"]) for one in entities] == [("A", 1, 2)]
    assert post(state, "sbert", json={"inputs": "abc"}).json() == [3.0, A + 2.0]
    ranked = post(
        state, "rank", json={"inputs": {"query": "a", "documents": ["b", "bcd", "bc"]}, "parameters": {"top_k": 2}}
    )
    assert [one["index"] for one in ranked.json()] == [1, 2]


def test_tasks_on_sound(state: ServerState) -> None:
    assert post(state, "sound", content=sound(30000)).json()[0]["label"] == "loud"
    for rate in (8000, 16000):
        wav = sound(100, rate)
        answer = post(state, "sound", content=wav, headers={"content-type": "audio/wav"}, query="?top_k=1")
        assert [row["label"] for row in answer.json()] == ["quiet"]
    assert post(state, "asr", files={"file": ("a.wav", sound(1))}).json() == {"text": " 4000"}
    timed = post(state, "asr", query="?return_timestamps=true&language=en", content=sound(1)).json()
    assert timed["chunks"] == [{"text": " 4000", "timestamp": [0.0, 1.0]}]


def test_requests_are_joined(state: ServerState) -> None:
    method: Any = front_end_of(state, "vit")._methods["forward"]
    del method.shapes[:]
    colours = [("red", "red"), ("lime", "green"), ("blue", "blue")]
    requests = [{"url": "/v1/pipeline/vit", "content": picture(colours[i % 3][0])} for i in range(8)]
    for _ in range(20):
        answers = ask(state, *requests)
        assert [answer.json()[0]["label"] for answer in answers] == [colours[i % 3][1] for i in range(8)]
    assert max(shape[0] for shape in method.shapes) > 1
    assert sum(shape[0] for shape in method.shapes) == 160


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("vit", {"content": b""}, 400, "inputs: expected a file, got no bytes"),
    ("vit", {"content": b"GIF"}, 400, "inputs: expected an image that Pillow reads"),
    ("vit", {"content": picture()[:50]}, 400, "inputs: expected an image that Pillow reads"),
    ("vit", {"content": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}, 400, "inputs: expected an image that Pillow"),
    ("vit", {"content": picture(size=(200, 100))}, 400, "inputs: expected an image of at most 10000 pixels, got 200 × 100"),
    ("vit", {"content": picture(size=(1, 101))}, 400, "inputs: expected an image whose sides differ by a factor of at most"),
    ("vit", {"json": {"inputs": "https://example.com/a.png"}}, 400, "inputs: URLs are not fetched"),
    ("vit", {"json": {"inputs": "file:///etc/passwd"}}, 400, "inputs: URLs are not fetched"),
    ("vit", {"json": {"inputs": "/etc/passwd"}}, 400, "inputs: expected a file as base64 or a data URL"),
    ("vit", {"json": {"inputs": "data:image/png,abc"}}, 400, "inputs: expected a data URL with ;base64"),
    ("vit", {"json": {"inputs": ["YQ==", 7]}}, 400, "inputs[1]: expected a file as base64 or a data URL, got 7"),
    ("vit", {"json": {}}, 400, "inputs: expected an input, or a list of them, got none"),
    ("vit", {"json": {"inputs": "YQ==", "input": 1}}, 400, "input: unknown: expected inputs and parameters"),
    ("vit", {"json": {"inputs": "YQ==", "parameters": [1]}}, 400, "parameters: expected an object, got [1]"),
    ("vit", {"json": {"inputs": text_of(picture()), "parameters": {"topk": 1}}}, 400, "topk: unknown option of image-classification: did you mean 'top_k'?"),
    ("vit", {"json": {"inputs": text_of(picture()), "parameters": {"batch_size": 1}}}, 400, "batch_size: unknown option"),
    ("vit", {"content": picture(), "query": "?top_k=0"}, 400, "top_k: expected a positive integer, got 0"),
    ("vit", {"content": picture(), "query": "?top_k=x"}, 400, "top_k: expected a positive integer, got 'x'"),
    ("vit", {"content": picture(), "query": "?top_k=1&top_k=2"}, 400, "top_k: expected it once, got several"),
    ("vit", {"json": {"inputs": "YQ==", "parameters": {"top_k": 1}}, "query": "?top_k=1"}, 400, "top_k: expected it once"),
    ("vit", {"content": b"{\"inputs\""}, 400, "the request is no JSON"),
    ("vit", {"content": b"a", "headers": {"content-type": "text/plain"}}, 415, "Content-Type: expected image/*, "),
    ("bert", {"content": picture(), "headers": {"content-type": "image/png"}}, 415, "Content-Type: expected text/plain, "),
    ("bert", {"content": b"\xff\xfe", "headers": {"content-type": "text/plain"}}, 400, "inputs: expected UTF-8"),
    ("bert", {"json": {"inputs": "a" * 50}}, 400, "inputs[0]: expected at most 40 tokens, got 50"),
    ("bert", {"json": {"inputs": 7}}, 400, "inputs: expected a string"),
    ("bert", {"json": {"inputs": ["a"] * 9}}, 400, "model 'bert': expected at most 8 inputs, which is the server's limit, got 9"),
    ("bert", {"files": {"picture": ("a", b"a")}}, 400, "picture: expected files in the field file"),
    ("clip", {"content": picture()}, 400, "candidate_labels: expected a list of strings"),
    ("sound", {"content": b"RIFF"}, 400, "inputs: expected a file that libsndfile reads"),
    ("sound", {"content": sound(1, seconds=1.2)}, 400, "inputs: expected at most 1.00012 seconds"),
    ("sound", {"content": sound(1, seconds=0.001)}, 400, "inputs: expected 10 to 8000 samples at 8000 Hz, got 8"),
    ("sound", {"content": sound(1), "query": "?sampling_rate=1"}, 400, "sampling_rate: unknown option"),
    ("asr", {"content": sound(1), "query": "?return_timestamps=word"}, 400, "return_timestamps: expected False or True"),
    ("asr", {"content": sound(1), "query": "?prompt=slow"}, 504, "model 'asr': the request was not computed within"),
    ("plain", {"content": b"a"}, 400, "model: 'plain' has no front end here: send tensors to /v2/models/plain/infer"),
    ("gone", {"content": b"a"}, 503, 'model "gone" is not loaded: unloaded'),
    ("nobody", {"content": b"a"}, 404, "model: expected one that is served (asr, bert, clip"),
    ("vit", {"content": b"a" * (2**20 + 1)}, 413, "expected a body of at most 1048576 bytes"),
]  # fmt: skip


def test_errors_of_lists_name_the_input(state: ServerState) -> None:
    """Also of lists that are longer than the batches in which they run."""
    images = [text_of(picture())] * 5
    for name, inputs, text in (
        ("vit", [*images, text_of(b"GIF")], "inputs[5]: expected an image that Pillow reads"),
        ("bert", [*"abcde", "a" * 50], "inputs[5]: expected at most 40 tokens, got 50"),
        ("sound", [text_of(sound(1)), text_of(sound(1, seconds=0.001))], "inputs[1]: expected 10 to 8000 samples"),
    ):
        answer = post(state, name, json={"inputs": inputs})
        assert (answer.status_code, answer.json()["error"]["message"][: len(text)]) == (400, text)


@pytest.mark.parametrize(("name", "request_", "status", "text"), REFUSED)
def test_refusals(state: ServerState, name: str, request_: dict[str, Any], status: int, text: str) -> None:
    answer = post(state, name, **request_)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"][: len(text)]) == (status, text)
    assert error["type"] in ("invalid_request_error", "server_error")


def test_what_there_is(state: ServerState) -> None:
    listed, one = ask(state, {"method": "GET", "url": "/v1/pipeline"}, {"method": "GET", "url": "/v1/pipeline/clip"})
    found = {row["id"]: row for row in listed.json()["data"]}
    assert set(found) == {*KINDS, "asr"}
    assert found["clip"]["options"] == ["candidate_labels", "hypothesis_template"]
    assert found["asr"]["options"] == ["return_timestamps", "language", "task", "prompt", "temperature", "seed"]
    assert all(row["input"] == INPUTS[row["task"]] for row in found.values())
    assert one.json() == {**found["clip"], "labels": ["red", "green", "blue"]}
    assert set(PIPELINES) <= set(INPUTS)


def test_a_model_that_is_loaded_again_meanwhile(state: ServerState) -> None:
    transcriber: Any = front_end_of(state, "asr")._pipeline.transcriber
    transcriber.closed = 2
    assert post(state, "asr", content=sound(1)).status_code == 200
    transcriber.closed = 9
    assert post(state, "asr", content=sound(1)).status_code == 503
    transcriber.closed = 0


def test_too_many_and_too_late() -> None:
    """Requests that wait have a bound; one that is too late is answered, and the rest goes on."""
    state = ServerState(ServeOptions(repository="/nowhere", max_queue=2, page=False))
    end = front_end("vit", timeout=0.3)
    method: Any = end._methods["forward"]
    open_ = threading.Event()
    run = method.batcher._run
    method.batcher._run = lambda inputs: (open_.wait(20), run(inputs))[1]
    entry: Any = types.SimpleNamespace(path="a.pt2", package=None, state="", reason="", lock=None)
    state.repository._entries["vit"] = entry
    state.repository._exchange(entry, Package("vit", "a.pt2", {}, front_end=end))
    answers = ask(state, *[{"url": "/v1/pipeline/vit", "content": picture()}] * 4)
    assert sorted(answer.status_code for answer in answers) == [429, 429, 504, 504]
    messages = {answer.json()["error"]["message"] for answer in answers}
    assert "model 'vit': the request was not computed within 0.3 s" in messages
    assert "model 'vit': 2 of 2 inputs run and wait already: try again later" in messages
    open_.set()
    assert post(state, "vit", content=picture()).status_code == 200
    end.close()
    method.batcher.close()
    assert post(state, "vit", content=picture()).status_code == 503


def test_a_client_that_leaves_costs_no_call() -> None:
    end = front_end("vit")
    method: Any = end._methods["forward"]
    gate = threading.Event()
    run = method.batcher._run
    method.batcher._run = lambda inputs: (gate.wait(20), run(inputs))[1]

    async def main() -> None:
        first = asyncio.create_task(end.run([picture()], {}, False))
        while not method.batcher.running:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(end.run([picture("blue")], {}, False))
        while not method.batcher.waiting:
            await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.wait([second])
        gate.set()
        assert (await first)[0]["label"] == "red"

    asyncio.run(main())
    end.close()
    method.batcher.close()
    assert sum(shape[0] for shape in method.shapes) == 1


def test_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str, package: str, purpose: str) -> Any:
        raise UnsupportedError(f"pipeline: {purpose} needs the package {package}: pip install 'untorch[pipeline]'")

    monkeypatch.setattr("untorch.serve.front_end.import_extra", missing)
    with pytest.raises(UnsupportedError, match="an image needs the package pillow"):
        front_end("vit")
