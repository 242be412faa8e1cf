"""A tiny Voxtral: three methods in one file, generating from audio and text token for token like eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

ROOT = Path(__file__).parents[2]
NEW = 8

# Two conversations in turns on one program, as JSON. No torch.
RUN = """
import json, sys
sys.modules["torch"] = None
import numpy, untorch
inputs = numpy.load(sys.argv[2])
new = int(sys.argv[3])

def talk(program, features, before, after):
    session = program.session()
    embed = lambda tokens: program.token_embedding(numpy.array([tokens]))
    audio = program.audio_encoder(features)
    x = numpy.concatenate([embed(before), audio[None], embed(after)], 1)
    for _ in range(new):
        token = int(session.text_decoder(x)[0].argmax())
        x = embed([token])
        yield token

with untorch.load(sys.argv[1]) as program:
    talks = [talk(program, inputs[f"features_{i}"], inputs[f"before_{i}"].tolist(), inputs[f"after_{i}"].tolist())
             for i in range(2)]
    print(json.dumps([list(tokens) for tokens in zip(*zip(*talks))]))
"""


def talks(model: torch.nn.Module, path: Path, folder: Path) -> None:
    """Two conversations by the file's three methods are token for token those of ``model`` in eager PyTorch."""
    generator = numpy.random.default_rng(0)
    config = model.config
    inputs, expected = {}, []
    for i in range(2):
        features = generator.standard_normal((1, config.audio_config.num_mel_bins, 64)).astype(numpy.float32)
        before, after = generator.integers(30, 99, 3 + i), generator.integers(30, 99, 4)
        inputs |= {f"features_{i}": features, f"before_{i}": before, f"after_{i}": after}
        expected.append(_eager(model, torch.from_numpy(features), before.tolist(), after.tolist()))
    assert expected[0] != expected[1], "the audio matters"
    numpy.savez(folder / "inputs.npz", **inputs)
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    command = [python, "-c", RUN, str(path), str(folder / "inputs.npz"), str(NEW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@pytest.mark.filterwarnings("ignore")
def test_generates_like_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from voxtral_model import build_model, methods

    from untorch.export import export

    model = build_model(tiny=True, dtype="float32")
    export(methods=methods(model, 64), path=tmp_path / "voxtral.pt2", progress=False)
    talks(model, tmp_path / "voxtral.pt2", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_int4_by_hqq_generates_like_the_quantised_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoder, projector and decoder in int4; the embedding stays in float32."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from voxtral_model import build_model, methods

    from untorch.archive import MANIFEST, ArchiveReader
    from untorch.export import export
    from untorch.quant import Int4Linear, quantize

    # include: layers of 16 and 32 inputs grow by their padding, and would be left alone.
    options = {"dtype": "int4", "method": "hqq", "group_size": 32, "include": "*"}
    wanted = {"audio_encoder": options, "text_decoder": {**options, "exclude": "*audio_tower*"}}
    model = build_model(tiny=True, dtype="float32")
    path = tmp_path / "voxtral.pt2"
    export(methods=methods(model, 64), path=path, quantize=wanted, progress=False)
    with ArchiveReader(path) as archive:
        entries = json.loads(archive.read(MANIFEST))["methods"]
    layers = {name: len(entry.get("quantization", [])) for name, entry in entries.items()}
    # Two layers of attention (4) and feed-forward (2 and 3); two of the projector; the decoder's last one.
    assert layers == {"audio_encoder": 2 * 6 + 2, "token_embedding": 0, "text_decoder": 2 * 7 + 1}

    found = methods(model, 64)
    for name in ("audio_encoder", "text_decoder"):
        module = found[name][0] if isinstance(found[name], tuple) else found[name]["model"]
        quantize(module, **options, progress=False)  # the encoder's layers are no nn.Linear any more the second time
    kinds = {type(part).__name__ for part in model.modules() if isinstance(part, (torch.nn.Linear, Int4Linear))}
    assert kinds == {"Int4Linear"}
    talks(model, path, tmp_path)


@pytest.mark.exhaustive  # language models' steps and attention for GPUs have tests of their own
@pytest.mark.filterwarnings("ignore")
def test_cross_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from voxtral_model import build_model, methods

    from untorch.export import check, export

    found = methods(build_model(tiny=True), 64)
    report = export(methods=found, path=tmp_path / "voxtral.pt2", device="cuda", arch="sm_90", progress=False)
    assert all(item.served for item in check(tmp_path / "voxtral.pt2"))
    for name, calls in (("audio_encoder", 2), ("token_embedding", 0), ("text_decoder", 2)):
        method = report.methods[name]
        [done] = [p for p in method.passes if p.name == "choose_attention"]
        assert [": triton: " in text for text in done.changed] == [True] * calls and not done.skipped
        assert "aoti_torch_create_cuda_stream_guard" in method.operators


def _eager(model: torch.nn.Module, features: torch.Tensor, before: list[int], after: list[int]) -> list[int]:
    found: list[int] = []
    with torch.no_grad():
        audio = model.get_audio_features(features, return_dict=True).pooler_output
        placeholders = [model.config.audio_token_id] * audio.shape[0]
        for _ in range(NEW):
            tokens = torch.tensor([before + placeholders + after + found])
            logits = model(input_ids=tokens, input_features=features, use_cache=False).logits
            found.append(int(logits[0, -1].argmax()))
    return found
