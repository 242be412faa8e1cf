"""Whisper, torch-free: texts, tokens and times equal to those of transformers' pipeline and ``generate``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from tests import packages, speech_models

pytestmark = pytest.mark.filterwarnings("ignore")

RUN = """
import json, sys
sys.modules["torch"] = None
import dataclasses, untorch
from untorch.speech import Transcriber
job = json.load(open(sys.argv[1]))
with untorch.pipeline(job["package"]) as pipeline:
    texts = [pipeline(path, **options) for path, options in job["pipeline"]]
found = []
with Transcriber(job["package"]) as transcriber:
    for path, options in job["transcribe"]:
        handle = transcriber.submit(path, **options)
        pieces = list(handle)
        assert "".join(pieces) == handle.result().text, (pieces, handle.result().text)
        found.append({**dataclasses.asdict(handle.result()), "pieces": len(pieces)})
assert not {"transformers", "scipy", "librosa"} & {name.partition(".")[0] for name in sys.modules}
print(json.dumps({"pipeline": texts, "transcribe": found}))
"""
SECONDS = (1.0, 2.0, 0.5, 1.5, 7.3)  # a window has two
LONG = 4
PROMPT = "AB <"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of a process without torch."""
    folder = tmp_path_factory.mktemp("whisper")
    paths = [str(folder / f"{i}.wav") for i in range(len(SECONDS))]
    for i, path in enumerate(paths):
        soundfile.write(path, speech_models.speech(SECONDS[i], seed=i), 16000, subtype="FLOAT")
    job = {
        "package": str(packages.compiled(Path(speech_models.__file__), "whisper")),
        "pipeline": [
            *((path, {}) for path in paths), *((path, {"return_timestamps": True}) for path in paths),
            (paths[0], {"language": "de", "task": "translate"}), (paths[0], {"prompt": PROMPT, "language": "en"}),
        ],
        "transcribe": [
            *((path, {"timestamps": True}) for path in paths), (paths[0], {"temperature": 1.0, "seed": 3}),
            (paths[0], {"temperature": 1.0, "seed": 3}), (paths[0], {"temperature": 1.0, "seed": 4}), (paths[0], {}),
            (paths[LONG], {"timeout": 1e-9}),
        ],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN, str(folder / "job.json")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def whisper() -> Any:
    import transformers

    model = speech_models.make_whisper()
    return transformers.pipeline(
        "automatic-speech-recognition", model=model, tokenizer=speech_models.whisper_tokenizer(),
        feature_extractor=speech_models.whisper_extractor(), device="cpu",
    )  # fmt: skip


def greedy(whisper: Any, start: int, with_times: bool, **fields: Any) -> dict[str, Any]:
    """Up to the decoder's last position. Times that are not asked for are suppressed, as they are here."""
    given = {"num_beams": 1, "task": "transcribe", "max_new_tokens": 40 - start, **fields}
    if not with_times:
        first = whisper.model.generation_config.no_timestamps_token_id + 1
        never = whisper.model.generation_config.suppress_tokens
        given["suppress_tokens"] = [*never, *range(first, whisper.model.config.vocab_size)]
    return given


def test_texts_equal_those_of_transformers(whisper: Any, found: dict[str, Any]) -> None:
    texts = set()
    for i, result in enumerate(found["pipeline"][:LONG]):
        sound = speech_models.speech(SECONDS[i], seed=i)
        assert result == {"text": whisper(sound, generate_kwargs=greedy(whisper, 4, False))["text"]}
        texts.add(result["text"])
    assert len(texts) == LONG, "what is heard matters"
    sound = speech_models.speech(SECONDS[0])
    given = greedy(whisper, 4, False, language="de", task="translate")
    assert found["pipeline"][-2]["text"] == whisper(sound, generate_kwargs=given)["text"]
    prompt = torch.from_numpy(whisper.tokenizer.get_prompt_ids(PROMPT))
    given = greedy(whisper, 4 + len(prompt), False, language="en", prompt_ids=prompt)
    assert found["pipeline"][-1]["text"] == whisper(sound, generate_kwargs=given)["text"]
    assert len({found["pipeline"][at]["text"] for at in (0, -2, -1)}) == 3, "task, language and prompt matter"


def test_times_equal_those_of_transformers(whisper: Any, found: dict[str, Any]) -> None:
    model, extractor = whisper.model, whisper.feature_extractor
    for i, result in enumerate(found["transcribe"][: len(SECONDS)]):
        sound = speech_models.speech(SECONDS[i], seed=i)
        # Of audio that fits, the window; of longer audio, what there is.
        padding = {"truncation": False, "padding": "longest"} if i == LONG else {}
        features = extractor(sound, sampling_rate=16000, return_tensors="pt", **padding).input_features
        given = {**greedy(whisper, 3, True), "return_timestamps": True, "return_segments": True}
        with torch.no_grad():
            wanted = model.generate(features, **given)["segments"][0]
        assert len(result["segments"]) == len(wanted)
        for segment, expected in zip(result["segments"], wanted, strict=True):
            assert segment["start"] == pytest.approx(float(expected["start"]))
            assert segment["end"] == pytest.approx(float(expected["end"]))
            tokens = expected["tokens"].tolist()  # the last one of a window may have the next one's start
            assert tokens[: len(segment["tokens"])] == segment["tokens"]
            assert len(tokens) - len(segment["tokens"]) in (0, 1)
            assert segment["avg_logprob"] < 0 < segment["no_speech_prob"] < 1
        given = greedy(whisper, 3, True)
        own = found["pipeline"][len(SECONDS) + i]
        assert own["text"] == whisper(sound, return_timestamps=True, generate_kwargs=given)["text"]
        assert [one["timestamp"] for one in own["chunks"]] == [[s["start"], s["end"]] for s in result["segments"]]
        assert "".join(one["text"] for one in own["chunks"]) == own["text"]
    assert any(len(result["segments"]) > 1 for result in found["transcribe"][:LONG])
    long = found["transcribe"][LONG]
    assert max(segment["end"] for segment in long["segments"]) > 6, "windows go on to the end"
    assert long["pieces"] >= 3
    # Audio of several windows has times whether they are asked for or not.
    assert found["pipeline"][LONG]["text"] == found["pipeline"][len(SECONDS) + LONG]["text"]


def test_sampling_languages_and_timeouts(found: dict[str, Any]) -> None:
    first, again, other, greedy, late = found["transcribe"][len(SECONDS) :]
    assert first["text"] == again["text"] != other["text"]
    assert first["text"] != greedy["text"]
    assert greedy["text"] == found["pipeline"][0]["text"].lstrip()
    assert {result["language"] for result in found["transcribe"]} - {None} <= {"en", "de", "fr"}
    assert greedy["language"] == "en"
    assert (late["text"], late["finish_reason"], late["segments"]) == ("", "timeout", [])
