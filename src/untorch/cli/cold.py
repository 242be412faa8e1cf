"""Measures a cold start: a new process loads a file, calls it once and prints the times of its stages.

The parent notes the clock before it starts the process. CLOCK_MONOTONIC is one clock for the whole machine, so the
child's readings continue the parent's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

__all__ = ["child", "measure_cold"]

# The first reading comes before anything of untorch is imported.
_CODE = (
    "import sys, time; started = time.clock_gettime(time.CLOCK_MONOTONIC); "
    "from untorch.cli.cold import child; child(sys.argv[1], started)"
)
_STAGES = ("interpreter", "import", "inputs", "load", "first_call")


def measure_cold(request: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Run ``repeats`` new processes. Returns seconds of each stage in the fastest one, and all totals.

    A total goes from the process's start to its first output, less the making of the inputs. The file is in the page
    cache after the first process. Raises ModelError when a process fails.
    """
    from untorch.runtime.errors import ModelError

    runs = []
    for _ in range(repeats):
        # Where this package was found, also when the parent got it through a changed sys.path.
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        start = time.clock_gettime(time.CLOCK_MONOTONIC)
        done = subprocess.run(
            [sys.executable, "-c", _CODE, json.dumps(request)],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ModelError(f"the cold start's process failed: {last}")
        clocks = json.loads(done.stdout)
        marks = [start, *clocks]
        stages = {name: marks[i + 1] - marks[i] for i, name in enumerate(_STAGES)}
        runs.append({"total": sum(stages.values()) - stages["inputs"], **stages})
    best = min(runs, key=lambda run: run["total"])
    return {
        "runs": repeats,
        "total_s": best["total"],
        "first_total_s": runs[0]["total"],
        "stages_s": {name: best[name] for name in _STAGES if name != "inputs"},
        "totals_s": [run["total"] for run in runs],
    }


def child(text: str, started: float) -> None:
    """The new process: prints the clock at its start and after each stage as a JSON list."""
    request = json.loads(text)
    clocks = [started]

    def mark() -> None:
        clocks.append(time.clock_gettime(time.CLOCK_MONOTONIC))

    import untorch

    mark()
    from untorch.cli.inputs import make_inputs
    from untorch.runtime.spec import parse_specs

    specs = [spec for spec in parse_specs(request["inputs"]) if spec is not None]
    arrays = make_inputs(specs, request["count"], request["texts"], request["dims"], request["seed"], bool(specs))
    mark()
    program = untorch.load(
        request["file"],
        num_threads=request["threads"],
        spin_us=request["spin_us"],
        dequantize_weights=request["dequantize_weights"],
        tf32=request["tf32"],
        weights=request["weights"],
        trust=request["trust"],
    )
    method = program[request["method"]]
    method.open()
    mark()
    method.run(arrays)
    mark()
    print(json.dumps(clocks))
