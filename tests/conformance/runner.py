"""Runs a package in a process without torch: ``python runner.py JOB`` with a pickled job; pickles the results beside it.

``python runner.py`` runs the jobs whose paths it reads, one a line, and prints each when it is done.

A job is {"package": path, "samples": [(args, kwargs), …]} with numpy arrays, those with strides of their own as
``strided`` makes them: pickle does not keep strides. The outcome is {"results", "arguments"}: the flattened outputs of
each sample, and its flattened inputs as they were after the call; or {"error": text}.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy

STRIDED = "__strided__"


def flatten(value: Any) -> list[Any]:
    """Leaves in the order of torch's pytrees: dicts by insertion, None kept."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in flatten(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


def strided(elements: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, Any]:
    """An array for a job: a vector of elements, the shape, and the strides in elements."""
    return {STRIDED: (elements, tuple(shape), tuple(strides))}


def build(value: Any) -> Any:
    """The arguments of a job with real arrays."""
    if isinstance(value, dict):
        if STRIDED in value:
            elements, shape, strides = value[STRIDED]
            return numpy.lib.stride_tricks.as_strided(elements, shape, [s * elements.itemsize for s in strides])
        return {key: build(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(build(item) for item in value)
    return value


def copies(leaves: list[Any]) -> list[Any]:
    # Later calls may change buffers that an output looks at.
    return [leaf.copy() if hasattr(leaf, "copy") else leaf for leaf in leaves]


def run(job: dict[str, Any]) -> dict[str, Any]:
    import untorch

    results, arguments = [], []
    with untorch.load(job["package"]) as program:
        for args, kwargs in build(job["samples"]):
            results.append(copies(flatten(program(*args, **kwargs))))
            arguments.append(copies(flatten((args, kwargs))))
    return {"results": results, "arguments": arguments}


def run_job(path: str) -> None:
    with open(path, "rb") as file:
        job = pickle.load(file)
    try:
        outcome = run(job)
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    assert not any(name == "torch" or name.startswith("torch.") for name, m in sys.modules.items() if m is not None)
    with open(path + ".out", "wb") as file:
        pickle.dump(outcome, file)


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]
    if len(sys.argv) > 1:
        run_job(sys.argv[1])
        return
    for line in sys.stdin:
        run_job(line.rstrip("\n"))
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
