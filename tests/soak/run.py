"""Exports the soak's models and soaks them: ``python tests/soak/run.py --minutes 60``. The exit status is 1 for a leak,
a wrong result, or an end of the process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.warm_process import run_warm  # noqa: E402

# Two rounds to settle: arenas of the allocator, stacks that are kept for later threads.
SETTLED = 2
LIMITS = {"resident": 24 << 20, "mappings": 60, "files": 0, "tensors": 0}


def packages() -> pathlib.Path:
    """A folder with the models; exported once for a version of the sources."""
    sources = [
        HERE / "models.py",
        *sorted((ROOT / "src/untorch/export").rglob("*.py")),
        ROOT / "src/untorch/archive.py",
    ]
    key = hashlib.blake2b("".join(path.read_text() for path in sources).encode(), digest_size=8).hexdigest()
    folder = ROOT / "build" / "test-cache" / f"soak-{key}"
    if not (folder / "pairs.pickle").exists():
        folder.mkdir(parents=True, exist_ok=True)
        done = run_warm([HERE / "models.py", folder])
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


def soak(seconds: float, memory: bool = True) -> tuple[dict[str, Any], list[str]]:
    """What the worker saw, and what is wrong with it."""
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    command = [python, str(HERE / "worker.py"), str(packages()), "--seconds", str(seconds)]
    process = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False,
        timeout=2 * seconds + 300,
    )  # fmt: skip
    if process.returncode != 0:
        return {}, [f"the process ended with {process.returncode}"]
    seen: dict[str, Any] = json.loads(process.stdout)
    problems = list(seen["wrong"])
    settled, last = seen["rounds"][SETTLED - 1], seen["rounds"][-1]
    for name, limit in LIMITS.items():
        if (memory or name == "tensors") and last[name] - settled[name] > limit:
            problems.append(f"{name} grew from {settled[name]:,} to {last[name]:,}, allowed are {limit:,} more")
    for name in ("call_shared", "call_own", "sessions", "wrong_calls", "exchange"):
        if not seen["steps"].get(name):
            problems.append(f"no {name} was done")
    return seen, problems


def main() -> None:
    """Soak and print what happened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    seen, problems = soak(60 * options.minutes)
    print(json.dumps(seen, indent=1))
    print("\n".join(problems) or "soak: all results right, nothing stays behind")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
