"""Every conformance model, exported by untorch and by PyTorch's packager, equals eager in a process without torch."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
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


class Runner:
    """A process without torch, which runs one package after the other; the next job after its death starts another."""

    def __init__(self, errors: pathlib.Path) -> None:
        self.errors = errors
        self.process: subprocess.Popen[str] | None = None

    def run(self, job: pathlib.Path) -> dict[str, Any]:
        """The outcome of a job (runner.py)."""
        if self.process is None:
            with open(self.errors, "w") as errors:
                command = [RUN_PYTHON, str(HERE / "runner.py")]
                pipe = subprocess.PIPE
                self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{job}\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != f"{job}\n":
            status = self.close()
            pytest.fail(f"the process died with {status}:\n{self.errors.read_text()[-3000:]}")
        outcome: dict[str, Any] = pickle.loads(job.with_name(f"{job.name}.out").read_bytes())
        return outcome

    def close(self) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.communicate(timeout=60)
        return process.returncode


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    made = Runner(tmp_path_factory.mktemp("runner") / "errors.txt")
    yield made
    assert made.close() == 0


def run_without_torch(
    case: Case, package: pathlib.Path, directory: pathlib.Path, runner: Runner
) -> tuple[list[list[Any]], list[list[Any]]]:
    samples = [(case.args, case.kwargs), *case.samples]
    job = directory / "job.pickle"
    job.write_bytes(pickle.dumps({"package": str(package), "samples": to_job(samples)}))
    outcome = runner.run(job)
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


def conform(name: str, exporter: str, directory: pathlib.Path, runner: Runner) -> None:
    """One case from the module to the comparison."""
    torch.manual_seed(0)
    case = ALL[name]()
    results, arguments = eager(case)
    package = directory / f"{name}.pt2"
    EXPORTERS[exporter](case, package)
    got, got_arguments = run_without_torch(case, package, directory, runner)
    assert_equal(case, got, results)
    # Inputs are changed in place where eager changes them, and nowhere else.
    assert_equal(case, got_arguments, arguments, "argument")
    if case.check is not None:
        for outputs in got:
            case.check(outputs)


EXPORTERS: dict[str, Callable[[Case, pathlib.Path], None]] = {"untorch": export_untorch, "stock": export_stock}


# Siblings of models that stay: the LSTM, sorting, T5's encoder, GPT-2, gpt-oss, CLIP. Recipes' tests have BERT and ViT,
# those of the engine Llama and Qwen3-MoE, those of speech wav2vec2 and Whisper.
SIBLINGS = (
    "lstm_bidirectional", "sorting_integers", "pointwise_functions_float64", "bert", "roberta", "distilbert", "qwen2",
    "qwen3", "llama", "mixtral", "qwen3_moe", "vit", "wav2vec2", "whisper_encoder",
)  # fmt: skip
# As torch packages them: one of a kind.
STOCK = (
    "mlp_static", "conv2d_net", "attention_causal", "lstm", "control_flow_cond", "mutated_input", "pointwise_functions",
    "aliased_outputs", "distilbert",
)  # fmt: skip


def is_exhaustive(name: str, exporter: str) -> bool:
    """Whether make test leaves the case to make exhaustive."""
    return name in SIBLINGS if exporter == "untorch" else name not in STOCK


MODELS = [
    pytest.param(name, exporter, marks=pytest.mark.exhaustive if is_exhaustive(name, exporter) else ())
    for name in ALL
    for exporter in EXPORTERS
]


@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
@pytest.mark.parametrize(("name", "exporter"), MODELS)
@pytest.mark.timeout(600)
def test_conformance(name: str, exporter: str, tmp_path: pathlib.Path, runner: Runner) -> None:
    conform(name, exporter, tmp_path, runner)


@pytest.mark.filterwarnings("ignore")
def test_the_next_job_after_a_death_has_a_process(tmp_path: pathlib.Path, runner: Runner) -> None:
    with pytest.raises(pytest.fail.Exception, match="the process died with 1:(.|\n)*FileNotFoundError"):
        runner.run(tmp_path / "none.pickle")
    (tmp_path / "job.pickle").write_bytes(pickle.dumps({"package": str(tmp_path / "none.pt2"), "samples": []}))
    assert "none.pt2" in runner.run(tmp_path / "job.pickle")["error"]


def test_number_of_models() -> None:
    assert len(CASES) >= 40
    assert len(TRANSFORMERS) >= 12
