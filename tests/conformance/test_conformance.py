"""Every conformance model, exported by untorch and by PyTorch's packager, equals eager in a process without torch."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from .models import CASES, Case
from .runner import flatten
from .transformers_models import TRANSFORMERS

HERE = pathlib.Path(__file__).parent
# The interpreter of an environment that has untorch and no torch; here, torch is blocked anyway.
RUN_PYTHON = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
ALL = {**CASES, **TRANSFORMERS}
# Cases that PyTorch's packager itself cannot make: name -> why.
STOCK_CANNOT: dict[str, str] = {}


def to_numpy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.dtype == torch.bfloat16:
            import ml_dtypes

            return tensor.contiguous().view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
        array = tensor.numpy()
        # A copy in the tensor's own memory layout: channels_last inputs must stay so.
        result = numpy.lib.stride_tricks.as_strided(
            numpy.empty(max(tensor.untyped_storage().nbytes() // array.itemsize, 1), array.dtype),
            array.shape,
            array.strides,
        )
        result[...] = array
        return result
    if isinstance(value, dict):
        return {key: to_numpy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_numpy(item) for item in value)
    return value


def eager(case: Case) -> list[list[Any]]:
    """Flattened outputs of each sample; a stateful module carries its buffers from one to the next."""
    module = copy.deepcopy(case.module)
    results = []
    with torch.no_grad():
        for args, kwargs in [(case.args, case.kwargs), *case.samples]:
            outputs = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            results.append([leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(outputs)])
    return results


def export_untorch(case: Case, path: pathlib.Path) -> None:
    from untorch.export import export

    export(case.module, case.args, path, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes, progress=False)


def export_stock(case: Case, path: pathlib.Path) -> None:
    with torch.no_grad():
        program = torch.export.export(case.module, case.args, case.kwargs, dynamic_shapes=case.dynamic_shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def run_without_torch(case: Case, package: pathlib.Path, directory: pathlib.Path) -> list[list[Any]]:
    samples = [(case.args, case.kwargs), *case.samples]
    job = directory / "job.pickle"
    job.write_bytes(pickle.dumps({"package": str(package), "samples": to_numpy(samples)}))
    process = subprocess.run(
        [RUN_PYTHON, str(HERE / "runner.py"), str(job)], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, f"the process died with {process.returncode}:\n{process.stderr[-3000:]}"
    outcome = pickle.loads((directory / "job.pickle.out").read_bytes())
    assert "error" not in outcome, outcome["error"]
    return outcome["results"]


def assert_equal(case: Case, got: list[list[Any]], expected: list[list[Any]]) -> None:
    assert len(got) == len(expected)
    for sample, (outputs, references) in enumerate(zip(got, expected, strict=True)):
        if case.check is not None:
            case.check(outputs)
        assert len(outputs) == len(references)
        for i, (output, reference) in enumerate(zip(outputs, references, strict=True)):
            where = f"sample {sample}, output {i}"
            if reference is None:
                assert output is None, where
                continue
            assert list(output.shape) == list(reference.shape), where
            assert str(output.dtype) == str(reference.dtype).removeprefix("torch."), where
            if case.random:
                continue
            if reference.dtype == torch.bfloat16:
                output, reference = output.astype(numpy.float32), reference.float()
            torch.testing.assert_close(
                torch.from_numpy(numpy.array(output)),
                reference,
                rtol=case.rtol,
                atol=case.atol,
                equal_nan=True,
                msg=lambda text, where=where: f"{where}: {text}",
            )


EXPORTERS: dict[str, Callable[[Case, pathlib.Path], None]] = {"untorch": export_untorch, "stock": export_stock}


@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", ALL)
def test_conformance(name: str, exporter: str, tmp_path: pathlib.Path) -> None:
    if exporter == "stock" and name in STOCK_CANNOT:
        pytest.skip(STOCK_CANNOT[name])
    torch.manual_seed(0)
    case = ALL[name]()
    expected = eager(case)
    package = tmp_path / f"{name}.pt2"
    EXPORTERS[exporter](case, package)
    assert_equal(case, run_without_torch(case, package, tmp_path), expected)


def test_there_are_enough_models() -> None:
    assert len(CASES) >= 40
    assert len(TRANSFORMERS) >= 12
