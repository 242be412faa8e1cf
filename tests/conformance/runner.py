"""Runs packages in a process without torch: ``python runner.py JOB`` with a pickled list of jobs; pickles the results.

A job is {"package": path, "samples": [(args, kwargs), …]} with numpy arrays; a result is the list of flattened outputs
of each sample, or the text of the error.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]


def flatten(value: Any) -> list[Any]:
    """Leaves in the order of torch's pytrees: dicts by insertion, None kept."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in flatten(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


def run(job: dict[str, Any]) -> list[Any]:
    import untorch

    results = []
    with untorch.load(job["package"]) as program:
        for args, kwargs in job["samples"]:
            outputs = program(*args, **kwargs)
            # Copies: later calls may change buffers that an output looks at.
            results.append([None if leaf is None else leaf.copy() for leaf in flatten(outputs)])
            del outputs
    return results


def main() -> None:
    with open(sys.argv[1], "rb") as file:
        job = pickle.load(file)
    try:
        outcome: dict[str, Any] = {"results": run(job)}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    assert not any(name == "torch" or name.startswith("torch.") for name, m in sys.modules.items() if m is not None)
    with open(sys.argv[1] + ".out", "wb") as file:
        pickle.dump(outcome, file)


if __name__ == "__main__":
    main()
