"""One conformance model on CUDA, in a process of the pool: eager, export, and the run in a process without torch."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

EXPORTERS = ("untorch", "stock")


def prepare(name: str, exporter: str, folder: str) -> dict[str, Any]:
    """{"stage": …, "error": …} if something failed, else {"results", "expected"}: flat lists, one a sample.

    For a stock package also "theirs": what PyTorch's own loader makes of it.
    """
    warnings.simplefilter("ignore")
    # Of hardware queues, which a test's process takes many of, a GPU has not enough for all of these.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "2"  # the default, 8, is too many for a process a core
    import torch

    from tests.conformance.runner import flatten
    from tests.conformance.test_conformance import ALL, copies, to_job
    from untorch.export.move import Mover

    place = Path(folder) / f"{name}-{exporter}"
    place.mkdir()
    torch.manual_seed(0)
    case = ALL[name]()
    samples = [(case.args, case.kwargs), *case.samples]
    job = place / "job.pickle"
    package = place / "model.pt2"
    job.write_bytes(pickle.dumps({"package": str(package), "samples": to_job(samples)}))
    stage = "eager"
    try:
        mover = Mover("cuda:0")
        module = mover.module(name, case.module)
        moved = [(mover.tree(args), mover.tree(kwargs)) for args, kwargs in samples]
        expected = []
        with torch.no_grad():
            eager = copy.deepcopy(module)
            for args, kwargs in copy.deepcopy(moved):
                leaves = copies(flatten(eager(*args, **kwargs)))
                expected.append([leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        stage = "export"
        args, kwargs = moved[0]
        if exporter == "untorch":
            from untorch.export import export
            from untorch.export.errors import CompileError

            try:
                export(
                    case.module, case.args, package, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes,
                    device="cuda", progress=False, inductor={"compile_threads": 1},
                )  # fmt: skip
            except CompileError as error:
                if "torch.export failed" in str(error):
                    stage = "torch.export"
                raise
        else:
            with torch.no_grad():
                program = torch.export.export(module, args, kwargs, dynamic_shapes=case.dynamic_shapes)
                torch._inductor.aoti_compile_and_package(
                    program,
                    package_path=str(package),
                    inductor_configs={"aot_inductor.check_lowerbound": False, "compile_threads": 1},
                )
        stage = "run"
        runner = Path(__file__).parents[1] / "conformance" / "runner.py"
        done = subprocess.run(
            [os.environ.get("UNTORCH_RUN_PYTHON", sys.executable), str(runner), str(job)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return {"stage": stage, "error": f"the process died with {done.returncode}:\n{done.stderr[-3000:]}"}
        outcome = pickle.loads((place / "job.pickle.out").read_bytes())
        if "error" in outcome:
            return {"stage": stage, "error": outcome["error"]}
        # Tensors do not go through pickle cheaply; numpy has no bfloat16 everywhere.
        torch.save(expected, place / "expected.pt")
        found = {"results": str(place / "job.pickle.out"), "expected": str(place / "expected.pt")}
        if exporter == "stock":
            stage = "PyTorch's loader"
            torch.save(by_torchs_loader(package, copy.deepcopy(moved)), place / "theirs.pt")
            found["theirs"] = str(place / "theirs.pt")
        return found
    except Exception as error:
        return {"stage": stage, "error": f"{type(error).__name__}: {error}"[:4000]}
    finally:
        torch.cuda.empty_cache()


def by_torchs_loader(package: Path, samples: list[tuple[Any, Any]]) -> list[list[Any]]:
    """The same calls with PyTorch, without the search for compilers that ``aoti_load_package`` begins with."""
    import torch
    from torch._inductor.package.package import AOTICompiledModel

    from tests.conformance.runner import flatten
    from tests.conformance.test_conformance import copies

    model = AOTICompiledModel(torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1))
    results = []
    with torch.no_grad():
        for args, kwargs in samples:
            leaves = copies(flatten(model(*args, **kwargs)))
            results.append([leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    return results
