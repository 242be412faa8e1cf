"""examples/speech: folders of tiny models with random weights, compiled by build.py, run by run.py without torch."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import untorch
from tests import speech_models

soundfile = pytest.importorskip("soundfile")

EXAMPLE = Path(__file__).parents[2] / "examples" / "speech"
# The same as run.py in an environment that has no torch.
RUN = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def make_folder(kind: str, folder: Path) -> Path:
    model = getattr(speech_models, f"make_{kind}")()
    model.save_pretrained(folder)
    extractor = speech_models.whisper_extractor() if kind == "whisper" else speech_models.voxtral_extractor(model)
    extractor.save_pretrained(folder)
    getattr(speech_models, f"{kind}_tokenizer")().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["whisper", "voxtral"])
def test_from_a_folder_to_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, audio = tmp_path / f"{kind}.pt2", tmp_path / "speech.wav"
    folder = make_folder(kind, tmp_path / kind)
    monkeypatch.setattr(sys, "argv", ["build.py", str(folder), "-o", str(package)])
    runpy.run_path(str(EXAMPLE / "build.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"{package}: ")

    soundfile.write(audio, speech_models.speech(1.5), 16000)
    command: list[Any] = [
        os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), "-c", RUN, EXAMPLE / "run.py", package, audio,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with untorch.pipeline(package) as pipeline:
        text = pipeline(audio)["text"]
    assert text and done.stdout == f"{text}\n"
    assert done.stderr.startswith("1.5 s of audio in ")
    if kind == "whisper":
        done = subprocess.run([*command, "--times"], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "00:00:0" in done.stdout and " --> " in done.stdout
