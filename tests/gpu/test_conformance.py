"""The conformance models on CUDA, exported by untorch and by PyTorch's packager, equal eager on the GPU.

Compiling takes most of the time, so a pool of processes compiles; each then runs the model in a process without torch.
The tests only compare.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from tests.conformance.test_conformance import ALL, assert_equal
from untorch.runtime.coverage import has_kernel

from .conformance_worker import EXPORTERS, prepare

# What eager computes with other algorithms, and partly in TensorFloat-32, agrees to this.
_TOLERANCE = 2e-3


class Outcomes:
    """What became of the models: all that were named from the start, others when they are asked for."""

    def __init__(self, pool: ProcessPoolExecutor, place: str, at_once: list[tuple[str, str]]) -> None:
        self._pool, self._place = pool, place
        self._futures = {key: pool.submit(prepare, *key, place) for key in at_once}

    def __getitem__(self, key: tuple[str, str]) -> Any:
        if key not in self._futures:
            self._futures[key] = self._pool.submit(prepare, *key, self._place)
        try:
            return self._futures[key].result(timeout=900)
        except Exception as error:
            return {"stage": "process", "error": f"{type(error).__name__}: {error}"}


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Made by a process for each processor; by one where pytest-xdist has several processes ask."""
    wanted = dict.fromkeys(
        (item.callspec.params["name"], item.callspec.params["exporter"])
        for item in request.session.items
        if "outcomes" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec")
    )
    shared = "PYTEST_XDIST_WORKER" in os.environ
    workers = 1 if shared else max(1, min(len(wanted), len(os.sched_getaffinity(0))))
    place = str(tmp_path_factory.mktemp("conformance"))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield Outcomes(pool, place, [] if shared else list(wanted))
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", list(ALL))
def test_conforms(name: str, exporter: str, outcomes: Outcomes) -> None:
    outcome = outcomes[name, exporter]
    # Too many processes share the GPU, or something filled it: that says nothing of the model.
    assert "out of memory" not in outcome.get("error", ""), f"{outcome['stage']}: {outcome['error']}"
    if outcome.get("stage") == "eager":
        pytest.skip(f"PyTorch itself does not run it on CUDA: {outcome['error']}")
    missing = re.findall(
        r"operator (\S+?)(?: \(.*\))?: it has no C shim and no kernel for CUDA", outcome.get("error", "")
    )
    if missing and all(has_kernel(name, "cpu") for name in missing):
        pytest.skip(f"only the CPU has kernels for {', '.join(missing)}")
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
