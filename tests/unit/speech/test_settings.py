"""What a manifest says of a speech model, and what is refused of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from untorch.runtime.errors import InvalidFileError, UnsupportedError
from untorch.speech.seq2seq_settings import Seq2SeqSettings
from untorch.speech.settings import SpeechSettings, read_settings

CTC = SpeechSettings(
    "ctc", "forward", 16000, 3200, min_samples=400, overlap_samples=640, frame_samples=320, languages=("en",)
)
LM = SpeechSettings(
    "causal_lm", "encode", 16000, 480000, n_fft=400, hop_length=160, n_mels=128, template=(1, "audio", "lang:{language}")
)  # fmt: skip
SEQ2SEQ = SpeechSettings(
    "seq2seq", "encode", 16000, 32000, n_fft=400, hop_length=160, n_mels=8, languages=("en", "de"),
    seq2seq=Seq2SeqSettings(
        "decode", "extra/t.json", 40, 100, start=61, end=60, no_timestamps=70, seconds_per_token=0.02, previous=68,
        transcribe=66, translate=65, languages={"en": 62, "de": 63}, suppress=(1, 2), suppress_first=(0,),
    ),
)  # fmt: skip


OWN = SEQ2SEQ.to_json()["seq2seq"]


@pytest.mark.parametrize("settings", [CTC, LM, SEQ2SEQ])
def test_what_was_written(settings: SpeechSettings) -> None:
    assert read_settings({"speech": json.loads(json.dumps(settings.to_json()))}, "m.pt2") == settings


@pytest.mark.parametrize(
    ("settings", "change", "text"),
    [
        (CTC, {"sampling_rate": 0}, "sampling_rate: 0"),
        (CTC, {"sampling_rate": "fast"}, "ValueError"),
        (CTC, {"chunk_samples": 1 << 40}, "chunk_samples"),
        (CTC, {"frame_samples": 0}, "frame_samples: 0"),
        (CTC, {"overlap_samples": 641}, "overlap_samples: 641"),
        (CTC, {"overlap_samples": 1600}, "overlap_samples: 1600"),
        (CTC, {"min_samples": 0}, "min_samples: 0"),
        (CTC, {"vocabulary": ...}, "KeyError"),
        (LM, {"n_fft": 401}, "n_fft: 401"),
        (LM, {"hop_length": 0}, "hop_length: 0"),
        (LM, {"n_mels": 0}, "n_mels: 0"),
        (LM, {"chunk_samples": 160}, "chunk_samples: 160"),
        (LM, {"template": [1, 2]}, 'template: expected one "audio"'),
        (LM, {"template": [None]}, "TypeError"),
        (SEQ2SEQ, {"seq2seq": None}, "TypeError"),
        (SEQ2SEQ, {"seq2seq": {**OWN, "end": 100}}, "token 100 of 100"),
        (SEQ2SEQ, {"seq2seq": {**OWN, "suppress": [-1]}}, "token -1 of 100"),
        (SEQ2SEQ, {"seq2seq": {**OWN, "max_tokens": 2}}, "max_tokens: 2"),
        (SEQ2SEQ, {"seq2seq": {**OWN, "vocabulary": 1 << 40}}, "vocabulary: "),
        (SEQ2SEQ, {"seq2seq": {**OWN, "seconds_per_token": 0}}, "seconds_per_token: 0"),
        (SEQ2SEQ, {"seq2seq": {**OWN, "transcribe": None}}, "languages without a token transcribe"),
        (SEQ2SEQ, {"languages": ["fr"]}, "languages: "),
    ],
)
def test_damage(settings: SpeechSettings, change: dict[str, Any], text: str) -> None:
    section = {name: value for name, value in {**settings.to_json(), **change}.items() if value is not ...}
    with pytest.raises(InvalidFileError, match=f"m.pt2: the manifest's speech model is damaged: .*{text}"):
        read_settings({"speech": section}, "m.pt2")


def test_other_packages() -> None:
    with pytest.raises(
        InvalidFileError, match=r"m\.pt2 holds no speech model: .* made by untorch.export.speech_to_text"
    ):
        read_settings({}, "m.pt2")
    for change in ({"format_version": 2}, {"decoder": "transducer"}):
        with pytest.raises(UnsupportedError, match="this untorch reads 1 with ctc, causal_lm, seq2seq"):
            read_settings({"speech": {**CTC.to_json(), **change}}, "m.pt2")
