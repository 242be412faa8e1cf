"""``Target``: what each implementation answers, and that nothing beside them asks which one it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from untorch.export import ExportOptions, target
from untorch.export.gpus import find_gpu
from untorch.export.host_cpu import HostCpu, resolve_host_cpu
from untorch.export.inductor import _inductor_options
from untorch.export.method import Method
from untorch.export.target import CpuTarget, CrossCompileTarget, CudaTarget, InductorRun, Target, resolve_targets
from untorch.runtime.errors import InvalidArgumentError

H200 = find_gpu("H200")
CROSS, HERE = CrossCompileTarget("sm_90", H200), CudaTarget("sm_90", "cuda:1")
SOURCE = Path(target.__file__).parents[1]


@pytest.mark.parametrize(
    ("made", "device", "architecture", "home"),
    [(CpuTarget(), "cpu", None, "cpu"), (HERE, "cuda", "sm_90", "cuda:1"), (CROSS, "cuda", "sm_90", "cpu")],
)
def test_where_code_and_tensors_are(made: Target, device: str, architecture: str | None, home: str) -> None:
    assert (made.device, made.architecture, made.tensor_home) == (device, architecture, home)
    assert made.tensor_device == home.partition(":")[0]
    assert ("gpu_architecture" in made.manifest_fields()) is (architecture is not None)
    assert made.host == resolve_host_cpu("native")


def test_inductors_settings() -> None:
    options = ExportOptions()
    assert CpuTarget().inductor_config(options) == {}
    assert HERE.inductor_config(options) == {"aot_inductor.embed_kernel_binary": True, "compile_threads": None}
    assert CROSS.inductor_config(options) == {
        "aot_inductor.embed_kernel_binary": True, "shape_padding": False, "always_keep_tensor_constants": True,
    }  # fmt: skip
    for made in (HERE, CROSS):
        assert made.inductor_config(ExportOptions(matmul="auto"))["max_autotune_gemm"]


def test_a_setting_of_none_is_left_to_torch(tmp_path: Path) -> None:
    for made, threads in ((CpuTarget(), 1), (CROSS, 1), (HERE, None)):
        values = _inductor_options(Method("forward", nn.Linear(2, 2), target=made), tmp_path)
        assert values.get("compile_threads") == threads
        assert values.get("aot_inductor.embed_kernel_binary", False) is (made.device == "cuda")
        assert None not in values.values()
    own = ExportOptions(inductor={"compile_threads": 3})
    assert _inductor_options(Method("forward", nn.Linear(2, 2), options=own), tmp_path)["compile_threads"] == 3


@pytest.mark.parametrize(
    ("made", "fields", "text"),
    [
        (
            CpuTarget(),
            {"tuning": "t.json"},
            "a tuning file is for a cross-compilation target, arch='sm_90': a CPU has no",
        ),
        (HERE, {"tuning": "t.json"}, "a tuning file is for a cross-compilation target, arch='sm_90': on a GPU kernels"),
        (CpuTarget(), {"record_tuning": "t.json"}, "option record_tuning: a CPU has no kernels to choose, so there is"),
        (
            CROSS,
            {"verify": True},
            r"verify=True runs the file, and arch cross-compiles it for a GPU \(H200\) that this",
        ),
    ],
)
def test_requests_that_do_not_fit(
    made: Target, fields: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.json").write_text('{"format": "untorch tuning", "version": 1, "choices": {}}')
    method = Method("forward", nn.Linear(2, 2), options=ExportOptions(**fields), target=made)
    with pytest.raises(InvalidArgumentError, match=text):
        made.check_request(method)


@dataclass(frozen=True)
class Fourth(Target):
    """A target of its own: one class."""

    device = "npu"

    @classmethod
    def resolve(cls, device: object, arch: object, host: HostCpu) -> Fourth | None:
        return cls(host=host) if device == "npu" else None

    def begin_inductor(self, method: Method, aot_compile: Any, example: Any) -> InductorRun:
        raise NotImplementedError


@pytest.fixture
def fourth(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(target, "TARGETS", (*target.TARGETS, Fourth))
    [made] = resolve_targets("npu")
    return made


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of an import of torch's
def test_a_fourth_target_is_one_class(fourth: Target) -> None:
    assert (fourth.device, fourth.tensor_home, fourth.architecture, fourth.inductor_config(ExportOptions())) == (
        "npu", "cpu", None, {},
    )  # fmt: skip
    fourth.check_request(Method("forward", nn.Linear(2, 2), target=fourth))
    with fourth.compile_context():
        assert not torch.is_grad_enabled()


def test_nothing_asks_which_target_it_is() -> None:
    """Export goes through the target's methods: no module outside the package tells the classes apart."""
    pattern = re.compile(r"isinstance\([^)]*Target|\bgpu is (not )?None|is_cross\b|\.absent\b")
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if pattern.search(line)
    ]
    assert found == []
