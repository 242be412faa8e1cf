"""`make test-gpu` and .github/workflows/gpu.yml: absolute paths, and parts that are all of tests/gpu."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def commands(*arguments: str) -> str:
    """What ``make`` would run."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    done = subprocess.run([make, "-n", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.mark.parametrize("target", ["test-gpu", "test-gpu-llm", "bench-gpu", "sanitize-gpu"])
def test_paths_in_the_environment_are_absolute(target: str) -> None:
    lines = [line for line in commands(target, "GPU_PYTHON=/usr/bin/python3").splitlines() if "PYTHONPATH=" in line]
    assert lines
    for line in lines:
        settings = dict(word.split("=", 1) for word in shlex.split(line) if re.match(r"[A-Z_]+=", word))
        assert settings["PYTHONPATH"] == str(ROOT / "src")
        assert settings["UNTORCH_LIBRARY"] == str(ROOT / "build/gpu/native/libuntorch.so")


def test_the_parts_of_the_workflow_are_all_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text())
    steps = workflow["jobs"]["gpu"]["steps"]
    parts = [match[1].split() for step in steps if (match := re.search(r'TESTS="?([^"]*)"?', step.get("run", "")))]
    assert len(parts) == 3
    everything = sorted(path.relative_to(ROOT) for path in (ROOT / "tests/gpu").rglob("test_*.py"))
    taken: list[Path] = []
    for part in parts:
        ignored = [Path(word.removeprefix("--ignore=")) for word in part if word.startswith("--ignore=")]
        named = [Path(word) for word in part if not word.startswith("--")]
        for path in ignored + named:
            assert (ROOT / path).exists(), f"{path} does not exist"
        taken += [
            path
            for path in everything
            if any(path.is_relative_to(n) for n in named) and not any(path.is_relative_to(i) for i in ignored)
        ]
    assert sorted(taken) == everything, "each test belongs to one part"


def test_the_workflow_runs_targets_that_exist() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text())["jobs"]["gpu"]["steps"]
    targets = {match[1] for step in steps if (match := re.match(r"make ([a-z-]+)", step.get("run", "")))}
    assert targets == {"build-gpu", "test-gpu", "test-gpu-llm", "bench-gpu"}
    for target in targets:
        commands(target, "GPU_PYTHON=/usr/bin/python3")


def test_a_pull_request_runs_by_label_only() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text())
    events = workflow[True]  # YAML 1.1 reads the key `on` so
    assert events["pull_request"] == {"types": ["labeled"]}
    assert set(events) == {"pull_request", "workflow_dispatch"}
    condition = workflow["jobs"]["gpu"]["if"]
    assert "github.event.label.name == 'gpu'" in condition
