"""Operators that the proxy executor serves natively: models that call them, constants from the file, precedence."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import untorch
from untorch import _core
from untorch.runtime import registry
from untorch.runtime.kernels.detection import nms as reference

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
LIBRARIES: list[torch.library.Library] = []


def define(name: str, schema: str, fake: Any) -> None:
    """The operator as its own package defines it, for tracing only."""
    namespace = name.partition("::")[0]
    if torch._C._dispatch_find_schema_or_throw is not None and hasattr(torch.ops, namespace):
        try:
            torch._C._dispatch_find_schema_or_throw(name, "")
            return
        except RuntimeError:
            pass
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(name.partition("::")[2] + schema)
    LIBRARIES.append(library)
    torch.library.register_fake(name, fake)


def define_nms() -> None:
    def fake(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
        return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)

    define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor", fake)


class Detect(torch.nn.Module):
    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.ops.torchvision.nms(boxes * 2, scores, 0.4)
        return kept, boxes[kept] + 1


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(48.0).reshape(3, 4, 4) / 48)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.ops.transformers.grouped_mm_fallback(x, self.weight, offs) + 1


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from untorch.export import export

    define_nms()
    # It defines the operator itself, and cannot behind us: other tests of the process import it.
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.integrations.moe")
    define(
        "transformers::grouped_mm_fallback", "(Tensor input, Tensor weight, Tensor offs) -> Tensor",
        lambda input, weight, offs: input.new_empty(input.size(0), weight.size(2)),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("native") / "model.pt2"
    offs = torch.tensor([2, 2, 5])
    methods = {
        "detect": {"model": Detect(), "args": (torch.rand(6, 4), torch.rand(6))},
        "experts": {"model": Experts(), "args": (torch.rand(5, 4), offs)},
    }
    export(methods=methods, path=path, progress=False, verify=False)
    return path


@pytest.fixture(scope="module")
def program(package: Path) -> Iterator[untorch.Program]:
    with untorch.load(package) as loaded:
        yield loaded


BOXES = np.array(
    [[0, 0, 2, 2], [0, 0, 2, 2.5], [5, 5, 6, 6], [5, 5, 6, 6], [0, 1, 2, 3], [9, 9, 9, 9]], np.float32
)  # fmt: skip
SCORES = np.array([0.5, 0.9, 0.7, 0.7, 0.5, 0.1], np.float32)


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may come to Python."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a native operator went to Python")

    monkeypatch.setattr("untorch.runtime.method._ProxyHandler.__call__", refuse)


@pytest.mark.slow
def test_nms(program: untorch.Program, no_python: None) -> None:
    kept, boxes = program.detect(BOXES, SCORES)
    expected = reference(BOXES * 2, SCORES, 0.4)
    assert kept.dtype == np.int64
    np.testing.assert_array_equal(kept, expected)
    assert kept[0] == 1 and 2 in kept and 3 not in kept  # the first of equal scores stays
    np.testing.assert_array_equal(boxes, BOXES[expected] + 1)


def test_nms_of_random_boxes(program: untorch.Program, no_python: None) -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        corner = random.random((6, 2)).astype(np.float32)
        boxes = np.concatenate([corner, corner + random.random((6, 2)).astype(np.float32)], axis=1)
        scores = (random.integers(0, 3, 6) / 3).astype(np.float32)
        np.testing.assert_array_equal(program.detect(boxes, scores)[0], reference(boxes * 2, scores, 0.4))


def test_grouped_mm_fallback(program: untorch.Program, no_python: None) -> None:
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    weight = np.arange(48, dtype=np.float32).reshape(3, 4, 4) / 48
    expected = np.concatenate([x[:2] @ weight[0], x[2:] @ weight[2]]) + 1
    np.testing.assert_allclose(program.experts(x, np.array([2, 2, 5])), expected, rtol=1e-6)
    with pytest.raises(untorch.ModelError, match="grouped_mm.*'offs' must not decrease and stay within 5, got 9 at 2"):
        program.experts(x, np.array([2, 2, 9]))


def test_a_registered_kernel_comes_first(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    seen: list[float] = []

    def kernel(dets: Any, scores: Any, iou_threshold: float) -> Any:
        seen.append(iou_threshold)
        return np.array([3, 1])

    with untorch.load(package) as program:
        try:
            untorch.register_kernel("torchvision::nms", kernel)
            np.testing.assert_array_equal(program.detect(BOXES, SCORES)[0], [3, 1])
        finally:
            _core.use_native_operator("torchvision::nms", "cpu", True)
        assert program.detect(BOXES, SCORES)[0].tolist() != [3, 1]
    assert seen == [0.4]


def test_the_table() -> None:
    names = _core.native_operators("cpu")
    assert names == sorted(names) and {"torchvision::nms", "transformers::grouped_mm_fallback"} <= set(names)
    if _core.has_symbol("aoti_torch_cuda_mm_out"):
        assert {"torchvision::nms", "torchvision::roi_align"} <= set(_core.native_operators("cuda"))
    else:
        assert _core.native_operators("cuda") == []
