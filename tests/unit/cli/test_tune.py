"""untorch tune. What it writes is made on a GPU; tests/unit/export/test_kernel_choice.py has the files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]

SCRIPT = """
import torch

class Turned(torch.nn.Module):
    def forward(self, x, y):
        return x.t() * y

def build():
    return Turned(), (torch.zeros(64, 128), torch.zeros(128, 64))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "model_to_tune.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_what_was_timed_is_counted(
    script: Path, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import untorch.export

    compile_it = untorch.export.export

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        """The GPU that this machine may not have: configurations are estimated instead of timed."""
        assert kwargs["device"] == "cuda:1"
        return compile_it(*args, **{**kwargs, "device": "cuda", "arch": "sm_90"})

    monkeypatch.setattr(untorch.export, "export", elsewhere)
    output = tmp_path / "gpu.json"
    for new in (1, 0):
        done = cli("tune", f"{script}:build", "-o", output, "--device", "cuda:1", "--json")
        assert done.code == 0, done.err
        assert done.document() == {
            "source": f"{script}:build", "file": str(output),
            "architectures": [{"architecture": "sm_90", "kernels": 1, "new": new}],
        }  # fmt: skip
    done = cli("tune", f"{script}:build", "-o", output, "--device", "cuda:1")
    assert done.code == 0 and "sm_90" in done.out and str(output) in done.out.replace("\n", "")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["gpu.json", "model_to_tune.py"]


def test_errors(script: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    import torch

    output = tmp_path / "gpu.json"
    assert "--output" in cli("tune", f"{script}:build").err
    output.write_text("[]")
    done = cli("tune", f"{script}:build", "-o", output)
    assert done.code == 1 and "expected a file that `untorch tune` wrote" in done.err
    assert output.read_text() == "[]"
    output.unlink()
    done = cli("tune", f"{script}:build", "-o", output, "--option", "tunning=x")
    assert done.code == 1 and "did you mean 'tuning'?" in done.err
    if not torch.cuda.is_available():
        done = cli("tune", f"{script}:build", "-o", output)
        assert done.code == 1 and "export: device='cuda'" in done.err
    assert not output.exists()


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_errors_of_files(script: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    import torch

    from untorch.export import export

    output, model, args = tmp_path / "gpu.json", torch.nn.Linear(2, 2), (torch.zeros(1, 2),)
    for_cpu, without = tmp_path / "cpu.pt2", tmp_path / "without.pt2"
    export(model, args, for_cpu, progress=False)
    export(model, args, without, device="cuda", arch="sm_90", progress=False)
    for file, more, expected in (
        (tmp_path / "no.pt2", (), "cannot open "),
        (script.rename(tmp_path / "text.pt2"), (), "text.pt2"),
        (for_cpu, (), "has no kernels for a GPU"),
        (without, (), "has no sources of its kernels: export it with keep_sources=True, or give SCRIPT:FUNCTION"),
        (without, ("--device", "cuda:1"), "name another one by CUDA_VISIBLE_DEVICES"),
        (without, ("--option", "fold_limit=1"), "a file is compiled already, got fold_limit=1"),
    ):
        done = cli("tune", file, "-o", output, *more)
        assert done.code == 1
        assert expected in " ".join(done.err.split())
    assert not output.exists()
