"""The conformance models on CUDA, exported by untorch and by PyTorch's packager, equal eager on the GPU.

Compiling takes most of the time, so everything is compiled first, by a pool of processes; each then runs the model in
a process without torch. The tests only compare.
"""

from __future__ import annotations

import dataclasses
import fcntl
import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.test_conformance import ALL, assert_equal

from .conformance_worker import EXPORTERS, prepare

# What eager computes with other algorithms, and partly in TensorFloat-32, agrees to this.
_TOLERANCE = 2e-3


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> dict[tuple[str, str], Any]:
    """What became of every model that a selected test asks for."""
    wanted = dict.fromkeys(
        (item.callspec.params["name"], item.callspec.params["exporter"])
        for item in request.session.items
        if "outcomes" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    )
    place = str(tmp_path_factory.mktemp("conformance"))
    workers = max(1, min(len(wanted), len(os.sched_getaffinity(0))))
    context = multiprocessing.get_context("spawn")
    # Not while a test of another process fills the memory.
    with open(folder / "gpu.lock", "w") as lock, ProcessPoolExecutor(workers, mp_context=context) as pool:
        fcntl.flock(lock, fcntl.LOCK_SH)
        futures = {key: pool.submit(prepare, *key, place) for key in wanted}
        results = {}
        for key, future in futures.items():
            try:
                results[key] = future.result(timeout=900)
            except Exception as error:
                results[key] = {"stage": "process", "error": f"{type(error).__name__}: {error}"}
    return results


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", list(ALL))
def test_conforms(name: str, exporter: str, outcomes: dict[tuple[str, str], Any]) -> None:
    outcome = outcomes[name, exporter]
    if outcome.get("stage") == "eager":
        pytest.skip(f"PyTorch itself does not run it on CUDA: {outcome['error']}")
    if "Python kernels work on the CPU's memory only" in outcome.get("error", ""):
        pytest.skip("its operator has a Python kernel only, which CUDA models are refused")
    if outcome.get("stage") == "torch.export":
        pytest.skip(f"torch.export refuses it on CUDA: {outcome['error']}")
    if outcome.get("stage") == "export" and exporter == "stock":
        pytest.skip(f"PyTorch itself does not compile it for CUDA: {outcome['error']}")
    assert "error" not in outcome, f"{outcome['stage']}: {outcome['error']}"
    with open(outcome["results"], "rb") as file:
        got = pickle.load(file)["results"]
    expected = torch.load(outcome["expected"], weights_only=True)
    case = ALL[name]()
    case = dataclasses.replace(case, rtol=max(case.rtol, _TOLERANCE), atol=max(case.atol, _TOLERANCE))
    if exporter == "stock":
        theirs = torch.load(outcome["theirs"], weights_only=True)
        assert_equal(case, got, theirs)
        try:
            assert_equal(case, got, expected)
        except AssertionError as error:
            pytest.skip(f"PyTorch's own loader gives the same, and eager something else: {str(error).splitlines()[0]}")
    else:
        assert_equal(case, got, expected)
    if case.check is not None:
        for leaves in got:
            case.check(leaves)
