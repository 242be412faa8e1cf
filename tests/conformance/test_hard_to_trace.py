"""Models that torch.export or Inductor do not take as they are: exported, run without torch, compared with eager."""

from __future__ import annotations

import os
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy
import pytest

from tests.warm_process import run_warm

HERE = pathlib.Path(__file__).parent
RUN_PYTHON = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
MISSING = 77
MODELS = ("forms", "flex", "complex_numbers", "regions", "ssdlite", "conformer", "emformer")
EXHAUSTIVE = ("faster_rcnn", "ssd300", "retinanet")


def run(name: str, folder: pathlib.Path) -> tuple[list[list[Any]], list[list[Any]]]:
    """The results of the file and of eager; nothing but our own words on stderr."""
    done = run_warm(["-m", "tests.conformance.exporting", name, folder], timeout=900)
    if done.returncode == MISSING:
        pytest.skip("needs torchvision in build/torchvision, or torchaudio in build/torchaudio")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "def forward" not in done.stderr
    job = folder / "job.pickle"
    done = subprocess.run(
        [RUN_PYTHON, str(HERE / "runner.py"), str(job)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = pickle.loads((folder / "job.pickle.out").read_bytes())
    assert "error" not in outcome, outcome["error"]
    return outcome["results"], pickle.loads((folder / "expected.pickle").read_bytes())


def check(name: str, folder: pathlib.Path) -> None:
    results, expected = run(name, folder)
    assert len(results) == len(expected)
    for got, wanted in zip(results, expected, strict=True):
        assert len(got) == len(wanted)
        for i, (value, reference) in enumerate(zip(got, wanted, strict=True)):
            if not isinstance(reference, numpy.ndarray):
                assert value == reference
                assert type(value) is type(reference)
                continue
            assert (value.dtype, value.shape) == (reference.dtype, reference.shape), i
            numpy.testing.assert_allclose(value, reference, rtol=2e-4, atol=2e-4, err_msg=f"output {i}")


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in EXHAUSTIVE)])
def test_equal_to_eager(name: str, tmp_path: pathlib.Path) -> None:
    check(name, tmp_path)
