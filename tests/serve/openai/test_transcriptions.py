"""Transcriptions with the unmodified ``openai`` client, against ``untorch serve`` in a process without torch."""

from __future__ import annotations

import inspect
import io
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests import packages, speech_models
from tests.serve.process import Server, eventually, serve
from untorch.serve.openai.parameters import TRANSCRIPTIONS, TRANSLATIONS

openai = pytest.importorskip("openai")
soundfile = pytest.importorskip("soundfile")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the client's types

MODELS = pathlib.Path(speech_models.__file__)


def wav(seconds: float, rate: int = 16000, kind: str = "WAV", channels: int = 1, seed: int = 0) -> bytes:
    data = io.BytesIO()
    sound = speech_models.speech(seconds, rate, seed)
    soundfile.write(data, np.stack([sound] * channels, 1), rate, format=kind)
    return data.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    served = [f"{kind}={packages.compiled(MODELS, kind)}" for kind in ("ctc", "voxtral", "whisper")]
    folder = tmp_path_factory.mktemp("speech")
    with serve(folder, *served, "--kv-memory", "8MiB", "--max-audio", "60") as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def create(client: Any, model: str = "ctc", file: Any = None, **fields: Any) -> Any:
    return client.audio.transcriptions.create(model=model, file=("a.wav", file or wav(1.0)), **fields)


def refused(client: Any, **fields: Any) -> Any:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **fields)
    return caught.value


def test_json(client: Any) -> None:
    found = create(client)
    assert found.text
    assert found.usage.type == "duration"
    assert found.usage.seconds == 1
    assert create(client, file=wav(1.0, seed=1)).text != found.text


def test_formats_of_files(client: Any) -> None:
    """FLAC has the same samples; two channels and other rates sound the same."""
    text = create(client).text
    assert create(client, file=wav(1.0, kind="FLAC")).text == text
    assert create(client, file=wav(1.0, channels=2)).text == text
    assert create(client, file=wav(1.0, kind="OGG", rate=48000)).text
    assert create(client, file=wav(1.0, rate=44100)).text


def test_text_and_times(client: Any) -> None:
    text = create(client).text
    assert create(client, response_format="text") == text + "\n"
    found = create(client, response_format="verbose_json", timestamp_granularities=["segment", "word"], language="en")
    assert (found.text, found.language, found.duration) == (text, "en", 1.0)
    assert [word.word for word in found.words] == text.split()
    assert " ".join(segment.text for segment in found.segments) == " ".join(text.split())
    for before, after in zip(found.words, found.words[1:], strict=False):
        assert 0 <= before.start < before.end <= after.start
    assert found.segments[0].avg_logprob < 0
    assert found.segments[0].tokens
    assert create(client, response_format="verbose_json").words is None
    srt = create(client, response_format="srt")
    assert srt.startswith("1\n00:00:00,")
    assert srt.count(" --> ") == len(found.segments)
    assert create(client, response_format="vtt").startswith("WEBVTT\n\n00:00:00.")


def test_stream(client: Any) -> None:
    for model, fields in (("ctc", {"file": wav(8.0)}), ("voxtral", {"file": wav(1.0), "language": "en"})):
        text = create(client, model, **fields).text
        events = list(create(client, model, stream=True, **fields))
        assert [one.type for one in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
        assert "".join(one.delta for one in events[:-1]) == text == events[-1].text
        assert events[-1].type == "transcript.text.done"
        assert len(events) > 3


def test_speech_language_model(client: Any) -> None:
    found = create(client, "voxtral", file=wav(1.0))
    assert found.usage.type == "tokens"
    assert found.usage.input_token_details.audio_tokens == 16
    assert found.usage.input_token_details.text_tokens == 5
    assert create(client, "voxtral", file=wav(1.0), language="fr").text != found.text
    assert create(client, "voxtral", file=wav(1.0), temperature=0).text == found.text
    assert create(client, "voxtral", file=wav(1.0), temperature=1).text != found.text
    # Its text model serves completions meanwhile.
    assert client.completions.create(model="voxtral", prompt="abc", max_tokens=4).usage.completion_tokens <= 4


def test_whisper(client: Any) -> None:
    found = create(client, "whisper")
    assert found.text
    assert found.usage.type == "duration"
    assert create(client, "whisper", response_format="text") == found.text + "\n"
    assert create(client, "whisper", language="de", prompt="AB").text != found.text
    assert create(client, "whisper", temperature=1).text != found.text
    # More than a window of two seconds; the times are its own.
    timed = create(client, "whisper", file=wav(5.0), response_format="verbose_json", language="fr")
    assert (timed.language, timed.duration) == ("fr", 5.0)
    assert len(timed.segments) > 2
    assert "".join(one.text for one in timed.segments).strip() == timed.text.strip()
    assert [one.start for one in timed.segments] == sorted(one.start for one in timed.segments)
    assert all(0 < one.no_speech_prob < 1 for one in timed.segments)
    assert create(client, "whisper", response_format="srt").startswith("1\n00:00:0")
    events = list(create(client, "whisper", file=wav(5.0), language="fr", stream=True))
    assert "".join(one.delta for one in events[:-1]) == events[-1].text == timed.text
    assert len(events) > 3
    translated = client.audio.translations.create(model="whisper", file=("a.wav", wav(1.0)))
    assert translated.text != found.text


def test_models(client: Any, server: Server) -> None:
    assert {model.id for model in client.models.list()} == {"ctc", "voxtral", "whisper"}
    assert client.models.retrieve("ctc").id == "ctc"
    with pytest.raises(openai.NotFoundError, match=r"expected one that is served \(voxtral, ctc, whisper\)"):
        create(client, "nobody")
    with pytest.raises(openai.BadRequestError, match="it transcribes speech: use /v1/audio/transcriptions"):
        client.completions.create(model="ctc", prompt="a")
    status, found = server.json("GET", "/v1/audio/transcriptions")
    assert (status, found["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"prompt": "hello"}, "prompt", "not served: Wav2Vec2ForCTC has no such setting"),
        ({"temperature": 0.5}, "temperature", "not served"),
        ({"language": "fr"}, "language", "expected one of en, got 'fr'"),
        ({"model": "voxtral", "language": "french"}, "language", 'expected a code of ISO 639-1 such as "en"'),
        ({"model": "voxtral", "prompt": "hello"}, "prompt", "VoxtralForConditionalGeneration has no such setting"),
        ({"model": "voxtral", "temperature": 1.5}, "temperature", "expected a number from 0 to 1, got 1.5"),
        ({"model": "voxtral", "response_format": "srt"}, "response_format", "does not know when words were said"),
        ({"response_format": "diarized_json"}, "response_format", 'expected "json" or "text"'),
        ({"response_format": "srt", "stream": True}, "stream", 'expected response_format "json" or "text" with it'),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", 'expected response_format "verbose_json"'),
        ({"include": ["logprobs"]}, "include", "not served"),
        ({"model": "whisper", "language": "es"}, "language", "expected one of en, de, fr, got 'es'"),
        ({"model": "whisper", "prompt": "<|transcribe|>"}, "prompt", "expected text without special tokens"),
        (
            {"model": "whisper", "timestamp_granularities": ["word"], "response_format": "verbose_json"},
            "timestamp_granularities",
            "not served: the model knows the times of segments alone",
        ),
        ({"extra_body": {"beam": 5}}, "beam", "unknown parameter"),
        ({"file": b"RIFF no sound"}, "file", "expected a file that libsndfile reads"),
        ({"file": wav(0.0)}, "file", "expected samples, got none"),
        ({"file": wav(0.01)}, "file", "expected at least 690 samples at 16000 Hz, got 160"),
        ({"file": wav(60.5)}, "file", "expected at most 60 seconds"),
    ],
)
def test_refusals(client: Any, fields: dict[str, Any], param: str, text: str) -> None:
    error = refused(client, **fields)
    assert error.param == param
    assert text in error.message
    assert error.message.count(f"{param}:") == 1


def test_too_long_for_the_model(client: Any) -> None:
    """512 positions, 8 tokens for 0.64 seconds."""
    error = refused(client, model="voxtral", file=wav(45.0))
    assert error.param == "file"
    assert "expected at most 511 tokens" in error.message
    assert "got 573 for 45.0 seconds: cut it into parts" in error.message


def test_the_clients_parameters_are_known() -> None:
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for resource, table in (("Transcriptions", TRANSCRIPTIONS), ("Translations", TRANSLATIONS)):
        create = getattr(openai.resources.audio, resource).create
        assert set(inspect.signature(create).parameters) - own == set(table)


def test_translations(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="it does not translate: use /v1/audio/transcriptions"):
        client.audio.translations.create(model="ctc", file=("a.wav", wav(1.0)))


def test_forms(server: Server) -> None:
    def post(body: bytes, kind: str) -> tuple[int, Any]:
        return server.json("POST", "/v1/audio/transcriptions", body, {"content-type": kind})

    assert post(b"{}", "application/json")[1]["error"]["message"] == (
        "the request: expected multipart/form-data, got application/json"
    )
    assert post(b"--x\r\nnonsense", "multipart/form-data; boundary=x")[0] == 400
    part = '--x\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    end = "--x--\r\n"

    def form(**fields: str) -> str:
        status, found = post(
            ("".join(part.format(*item) for item in fields.items()) + end).encode(), "multipart/form-data; boundary=x"
        )
        assert status == 400
        message: str = found["error"]["message"]
        return message

    assert form(model="ctc") == "file: required, and missing"
    assert form(file="a", model="ctc") == 'file: expected a file, got "a"'
    assert form(model="ctc", temperature="warm") == 'temperature: expected a number, got "warm"'
    assert form(model="ctc", stream="perhaps") == 'stream: expected true or false, got "perhaps"'
    twice = (part.format("model", "ctc") * 2 + end).encode()
    assert post(twice, "multipart/form-data; boundary=x")[1]["error"]["message"] == (
        "model: expected it once, got several"
    )


def test_a_client_that_leaves_ends_its_request(client: Any, server: Server) -> None:
    events = create(client, "voxtral", file=wav(1.0), stream=True)
    next(iter(events))
    events.close()

    def idle() -> bool:
        text = server.request("GET", "/metrics")[2].decode()
        return 'untorch_llm_running{model="voxtral"} 0.0' in text

    eventually(idle)
    assert create(client, "voxtral", file=wav(1.0)).text
