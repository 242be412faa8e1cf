"""Which parts of untorch pass their tests with which PyTorch, each version in a virtual environment of its own.

    python scripts/torch_matrix.py 2.11.0 2.12.1 2.13.0 [--folder build/matrix] [--parts export conformance]

Downloads missing versions, several gigabytes each, unless pip finds a CPU build (PIP_EXTRA_INDEX_URL). The native
library is that of this checkout: UNTORCH_LIBRARY, or the one in src/untorch, built for the same Python. Results go into
benchmarks/results/torch_matrix.json, which benchmarks/render.py puts into docs/limits.md; a version or a part that was
not run keeps what it had.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import RESULTS, Report, Table  # noqa: E402 - from beside this folder

_UNIT = "tests/unit/export"
PARTS = {
    "export": [f"{_UNIT}/test_{name}.py" for name in ("compile", "signature", "weights", "mutations", "methods")],
    "passes": [f"{_UNIT}/passes"],
    "operators and coverage": [f"{_UNIT}/test_coverage.py", f"{_UNIT}/test_fallbacks.py"],
    "sessions": [f"{_UNIT}/test_mutable_buffers.py", "tests/unit/test_session.py"],
    "int4": [f"{_UNIT}/test_quantize.py", "tests/unit/ops/test_int4_linear.py", "tests/unit/quant/test_apply.py"],
    "cross-compilation for GPUs": [f"{_UNIT}/test_cross_compile.py"],
    "attention": ["tests/unit/ops/test_attention_kernels.py"],
    "conformance": ["tests/conformance/test_conformance.py", "-k", " or ".join((
        "mlp_static", "mlp_dynamic_batch", "mlp_bfloat16", "conv2d_net", "attention_causal", "transformer_encoder",
        "lstm_bidirectional", "embeddings", "key_value_cache", "control_flow_cond", "sorting_integers",
    ))],
}  # fmt: skip
_TOOLS = (
    "numpy", "ml_dtypes", "pytest", "hypothesis", "pytest-timeout", "rich", "typer", "safetensors", "transformers",
    "nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-runtime",
)  # fmt: skip


def environment(folder: Path, version: str) -> Path:
    """The interpreter of an environment with this torch."""
    place = folder / version
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", f"torch=={version}", *_TOOLS], check=True)
        # A CPU build brings no Triton. The one that torch.compile of this version was made for:
        wanted = subprocess.run(
            [str(python), "-c", "import importlib.util as u; print(u.find_spec('triton') is None)"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        if wanted.strip() == "True":
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", "triton==3.6.0"], check=True)
        (place / "ready").touch()
    return python


def run_part(python: Path, arguments: list[str], log: Path) -> dict[str, int]:
    """pytest's counts; an interrupted run counts as an error."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    log.write_text(done.stdout + done.stderr)
    summary = done.stdout.strip().rpartition("\n")[2]
    counts = {
        word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", summary)
    }
    if done.returncode not in (0, 1):
        counts["error"] = counts.get("error", 0) + 1
    return counts


def cell(counts: dict[str, int] | None) -> str:
    """ "31 passed", or what is not so good."""
    if counts is None:
        return "–"
    bad = counts.get("failed", 0) + counts.get("error", 0)
    skipped = f", {counts['skipped']} skipped" if counts.get("skipped") else ""
    return (
        f"{counts.get('passed', 0)} passed{skipped}"
        if not bad
        else f"**{bad} failed**, {counts.get('passed', 0)} passed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="of torch, such as 2.13.0")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix", help="where the environments are")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    options = parser.parse_args()
    path = RESULTS / "torch_matrix.json"
    found: dict[str, Any] = json.loads(path.read_text())["values"] if path.exists() else {}
    for version in options.versions:
        report = Report("torch_matrix", quick=False, script="scripts/torch_matrix.py")
        python = environment(options.folder, version)
        text = subprocess.run(
            [str(python), "-c", "import torch; print(torch.__version__)"], check=True, capture_output=True, text=True
        ).stdout.strip()
        results = found.setdefault(text, {})
        for part in options.parts:
            results[part] = run_part(python, PARTS[part], options.folder / version / f"{part.replace(' ', '_')}.log")
            print(f"torch {text}, {part}: {cell(results[part])}", flush=True)
        report.values = dict(sorted(found.items()))
        rows = [[part, *(cell(values.get(part)) for values in report.values.values())] for part in PARTS]
        note = "Tests of each part, by the version of torch that exports; – was not run."
        report.tables["torch_matrix"] = Table(["", *report.values], rows, note)
        report.write(RESULTS)  # after each version: a later one may fail to install


if __name__ == "__main__":
    main()
