"""Whisper and Voxtral from a folder to text on a GPU, by the example's two halves: the text is the CPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import speech_models
from tests.conformance.test_speech_example import EXAMPLE, RUN, make_folder

soundfile = pytest.importorskip("soundfile")


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["whisper", "voxtral"])
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_text_is_the_cpus(kind: str, quantize: str | None, tmp_path: Path) -> None:
    audio, folder = tmp_path / "speech.wav", make_folder(kind, tmp_path / kind)
    soundfile.write(audio, speech_models.speech(1.5), 16000)
    texts = {}
    for device in ("cpu", "cuda"):
        package = tmp_path / f"{device}.pt2"
        options = [] if quantize is None else ["--quantize", quantize]
        run(sys.executable, EXAMPLE / "build.py", folder, "-o", package, "--device", device, *options)
        python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
        texts[device] = run(python, "-c", RUN, EXAMPLE / "run.py", package, audio)
    assert texts["cpu"].strip()
    if quantize is None:  # in int4 CPUs multiply in integers
        assert texts["cuda"] == texts["cpu"]
    else:
        assert texts["cuda"].strip()
