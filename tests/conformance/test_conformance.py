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
from .runner import flatten, strided
from .transformers_models import TRANSFORMERS

HERE = pathlib.Path(__file__).parent
# The interpreter of an environment that has untorch and no torch; here, torch is blocked anyway.
RUN_PYTHON = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
ALL = {**CASES, **TRANSFORMERS}
# Halves the time of a small model.
FAST_BUILD = {"aot_inductor.compile_wrapper_opt_level": "O0"}


def to_job(value: Any) -> Any:
    """Arguments as a job holds them: tensors as arrays in their own memory layout, channels_last for one."""
    if isinstance(value, torch.Tensor):
        reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        elements = value.detach().as_strided((reach + 1 if value.numel() else 0,), (1,)).clone()
        return strided(to_numpy(elements), tuple(value.shape), value.stride())
    if isinstance(value, dict):
        return {key: to_job(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_job(item) for item in value)
    return value


def to_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def eager(case: Case) -> tuple[list[list[Any]], list[list[Any]]]:
    """Flattened outputs of each sample, and its flattened inputs as they were after the call.

    A stateful module carries its buffers from one sample to the next.
    """
    module = copy.deepcopy(case.module)
    results, arguments = [], []
    with torch.no_grad():
        for args, kwargs in copy.deepcopy([(case.args, case.kwargs), *case.samples]):
            results.append(copies(flatten(module(*args, **kwargs))))
            arguments.append(copies(flatten((args, kwargs))))
    return results, arguments


def copies(leaves: list[Any]) -> list[Any]:
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def export_untorch(case: Case, path: pathlib.Path) -> None:
    from untorch.export import export

    export(
        case.module,
        case.args,
        path,
        kwargs=case.kwargs,
        dynamic_shapes=case.dynamic_shapes,
        progress=False,
        inductor=FAST_BUILD,
    )


def export_stock(case: Case, path: pathlib.Path) -> None:
    with torch.no_grad():
        program = torch.export.export(case.module, case.args, case.kwargs, dynamic_shapes=case.dynamic_shapes)
        # The library's own check has a lower bound of 2 even where the program allows 1.
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(path),
            inductor_configs={
                "aot_inductor.check_lowerbound": False,
                "aot_inductor.precompile_headers": False,  # tests/kept_compiles has more of them
                **FAST_BUILD,
            },
        )


def run_without_torch(
    case: Case, package: pathlib.Path, directory: pathlib.Path
) -> tuple[list[list[Any]], list[list[Any]]]:
    samples = [(case.args, case.kwargs), *case.samples]
    job = directory / "job.pickle"
    job.write_bytes(pickle.dumps({"package": str(package), "samples": to_job(samples)}))
    process = subprocess.run(
        [RUN_PYTHON, str(HERE / "runner.py"), str(job)], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, f"the process died with {process.returncode}:\n{process.stderr[-3000:]}"
    outcome = pickle.loads((directory / "job.pickle.out").read_bytes())
    assert "error" not in outcome, outcome["error"]
    return outcome["results"], outcome["arguments"]


def assert_equal(case: Case, got: list[list[Any]], expected: list[list[Any]], what: str = "output") -> None:
    assert len(got) == len(expected)
    for sample, (leaves, references) in enumerate(zip(got, expected, strict=True)):
        assert len(leaves) == len(references)
        for i, (leaf, reference) in enumerate(zip(leaves, references, strict=True)):
            where = f"sample {sample}, {what} {i}"
            if not isinstance(reference, torch.Tensor):
                assert leaf == reference, where
                continue
            assert list(leaf.shape) == list(reference.shape), where
            assert str(leaf.dtype) == str(reference.dtype).removeprefix("torch."), where
            if case.random and what == "output":
                continue
            if reference.dtype == torch.bfloat16:
                leaf, reference = leaf.astype(numpy.float32), reference.float()
            torch.testing.assert_close(
                torch.from_numpy(numpy.array(leaf)),
                reference,
                rtol=case.rtol,
                atol=case.atol,
                equal_nan=True,
                msg=lambda text, where=where: f"{where}: {text}",
            )


def conform(name: str, exporter: str, directory: pathlib.Path) -> None:
    """One case from the module to the comparison."""
    torch.manual_seed(0)
    case = ALL[name]()
    results, arguments = eager(case)
    package = directory / f"{name}.pt2"
    EXPORTERS[exporter](case, package)
    got, got_arguments = run_without_torch(case, package, directory)
    assert_equal(case, got, results)
    # Inputs are changed in place where eager changes them, and nowhere else.
    assert_equal(case, got_arguments, arguments, "argument")
    if case.check is not None:
        for outputs in got:
            case.check(outputs)


EXPORTERS: dict[str, Callable[[Case, pathlib.Path], None]] = {"untorch": export_untorch, "stock": export_stock}


# Every fourth as torch packages it, the others exhaustively.
MODELS = [
    pytest.param(name, exporter, marks=pytest.mark.exhaustive if exporter == "stock" and index % 4 else ())
    for index, name in enumerate(ALL)
    for exporter in EXPORTERS
]


@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
@pytest.mark.parametrize(("name", "exporter"), MODELS)
def test_conformance(name: str, exporter: str, tmp_path: pathlib.Path) -> None:
    conform(name, exporter, tmp_path)


def test_number_of_models() -> None:
    assert len(CASES) >= 40
    assert len(TRANSFORMERS) >= 12
