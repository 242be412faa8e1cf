"""Speech models, torch-free: texts, times and tokens equal to those of transformers' front ends and models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests import packages, speech_models

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "speech_models.py"

RUN = """
import json, sys
sys.modules["torch"] = None
import dataclasses, untorch.speech
job = json.load(open(sys.argv[1]))
found = []
with untorch.speech.Transcriber(job["package"]) as transcriber:
    for path, arguments in job["calls"]:
        handle = transcriber.submit(path, **arguments)
        pieces = list(handle)
        result = handle.result()
        assert "".join(pieces) == result.text, (pieces, result.text)
        tokens = getattr(handle, "_generation", None)
        found.append({**dataclasses.asdict(result), "pieces": len(pieces),
                      "tokens": tokens.result().token_ids if tokens else None})
modules = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})
print(json.dumps({"found": found, "modules": modules}))
"""


def transcribe(folder: Path, package: Path, calls: list[tuple[Path, dict[str, Any]]]) -> list[dict[str, Any]]:
    job = folder / "job.json"
    job.write_text(json.dumps({"package": str(package), "calls": [[str(path), given] for path, given in calls]}))
    done = subprocess.run(
        [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN, str(job)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert not {"torch", "transformers", "scipy", "librosa", "torchaudio"} & set(out["modules"])
    found: list[dict[str, Any]] = out["found"]
    return found


def test_ctc(tmp_path: Path) -> None:
    """Of one chunk: the text and the words' times are transformers'. Of several: those of windows of the logits."""
    model, extractor = speech_models.make_ctc(), speech_models.ctc_extractor()
    tokenizer = speech_models.ctc_tokenizer()
    sounds = [speech_models.speech(seconds, seed=seed) for seed, seconds in enumerate((1.0, 2.5, 0.1, 3.0))]
    calls = []
    for i, sound in enumerate(sounds):
        path = tmp_path / f"{i}.wav"
        soundfile.write(path, sound, 16000, subtype="FLOAT")
        calls.append((path, {}))
    long = speech_models.speech(10.0, seed=7)
    soundfile.write(tmp_path / "long.wav", long, 16000, subtype="FLOAT")
    calls.append((tmp_path / "long.wav", {"language": "en"}))
    *found, of_long = transcribe(tmp_path, packages.compiled(MODELS, "ctc"), calls)

    texts = set()
    for sound, result in zip(sounds, found, strict=True):
        given = extractor(sound, sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            labels = model(given.input_values).logits[0].argmax(-1)
        wanted = tokenizer.decode(labels, output_word_offsets=True)
        assert result["text"] == wanted.text
        words = [word for segment in result["segments"] for word in segment["words"]]
        assert [word["text"] for word in words] == [word["word"] for word in wanted.word_offsets]
        for word, offsets in zip(words, wanted.word_offsets, strict=True):
            assert word["start"] == pytest.approx(offsets["start_offset"] * 0.02)
            assert word["end"] == pytest.approx(min(offsets["end_offset"] * 0.02, len(sound) / 16000))
        assert result["duration"] == pytest.approx(len(sound) / 16000)
        assert result["language"] == "en"
        texts.add(result["text"])
    assert len(texts) == len(sounds), "what is heard matters"
    assert any(len(segment["words"]) > 1 for result in found for segment in result["segments"])

    # Ten seconds are more than the three that the model sees at a time: windows with half a second of context.
    samples = torch.from_numpy(extractor(long, sampling_rate=16000).input_values[0])
    size, overlap, begin, logits = 48000, 8000, 0, []
    while begin + size - overlap < len(samples):
        with torch.no_grad():
            start = max(0, begin - overlap)
            frames = model(samples[None, start : begin + size - overlap]).logits[0]
        logits.append(frames[(begin - start) // 320 :][: (size - 2 * overlap) // 320])
        begin += size - 2 * overlap
    with torch.no_grad():
        logits.append(model(samples[None, begin - overlap :]).logits[0][overlap // 320 :])
    assert of_long["text"] == tokenizer.decode(torch.cat(logits).argmax(-1))
    assert of_long["pieces"] == len(logits) > 3
    assert len(of_long["segments"]) > 1


def voxtral_tokens(model: Any, extractor: Any, sound: np.ndarray, language: str | None) -> tuple[list[int], int]:
    """What ``generate`` says after the prompt that Voxtral's processor makes; and the tokens of the prompt."""
    frames = 2 * model.config.audio_config.max_source_positions
    features = extractor(
        sound, sampling_rate=16000, padding=True, truncation=False, pad_to_multiple_of=frames * 160,
        return_tensors="pt",
    ).input_features  # fmt: skip
    features = features.reshape(extractor.feature_size, -1, frames).transpose(0, 1)
    count = 8 * len(features)
    tokenizer = speech_models.voxtral_tokenizer()
    words = [] if language is None else tokenizer.encode(f"lang:{language}", add_special_tokens=False)
    ids = [1, 3, 25, *[24] * count, 4, *words, 34]
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            input_features=features, do_sample=False, pad_token_id=0, max_length=512,
        )  # fmt: skip
    return out[0, len(ids) :].tolist(), len(ids)


def test_voxtral(tmp_path: Path) -> None:
    model = speech_models.make_voxtral()
    extractor = speech_models.voxtral_extractor(model)
    tokenizer = speech_models.voxtral_tokenizer()
    cases: list[tuple[float, str | None]] = [(0.5, None), (0.5, "en"), (1.7, "fr"), (0.64, None)]
    calls, wanted = [], []
    for i, (seconds, language) in enumerate(cases):
        sound = speech_models.speech(seconds, seed=i % 3)
        soundfile.write(tmp_path / f"{i}.flac", sound, 16000)  # 16 bits
        read, _ = soundfile.read(tmp_path / f"{i}.flac", dtype="float32")
        calls.append((tmp_path / f"{i}.flac", {"language": language}))
        wanted.append(voxtral_tokens(model, extractor, read, language))
    found = transcribe(tmp_path, packages.compiled(MODELS, "voxtral"), calls)
    assert [result["tokens"] for result in found] == [tokens for tokens, _ in wanted]
    assert len({tuple(tokens) for tokens, _ in wanted}) == len(cases), "sound and language matter"
    for result, (tokens, prompt), (seconds, language) in zip(found, wanted, cases, strict=True):
        assert tokens[-1] in model.generation_config.eos_token_id
        assert result["text"] == tokenizer.decode(tokens[:-1], skip_special_tokens=True)
        usage = result["usage"]
        assert usage["audio_tokens"] + usage["text_tokens"] == prompt
        assert usage["output_tokens"] == len(tokens)
        assert result["duration"] == pytest.approx(seconds)
        assert result["language"] == language
        assert result["segments"] is None
