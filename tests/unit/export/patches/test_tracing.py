"""Patches of tracing: graphs on the terminal, results of unknown size, torchvision's branches on the number of boxes."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import pytest
import torch

from untorch.export.patches import (
    no_graph_dump,
    pooling_of_any_length,
    results_of_any_size,
    traceable_torchvision,
    undetected_causal_masks,
)
from untorch.export.patches.tracing import _batched_nms, _decode, _length


class Branch(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("traced", file=sys.stderr)
        return x + 1 if x.sum() > 0 else x


def export_branch() -> None:
    with contextlib.suppress(Exception):
        torch.export.export(Branch(), (torch.ones(2),))


def test_torch_still_prints_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    export_branch()
    assert "def forward(" in capsys.readouterr().err


def test_no_graph_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with no_graph_dump():
        export_branch()
    err = capsys.readouterr().err
    assert "traced" in err
    assert "def forward(" not in err


def sizes_of_results() -> Any:
    class Keep(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept: torch.Tensor = torch.ops.untorch_tests.keep(x)
            return kept * 2

    program = torch.export.export(Keep(), (torch.ones(3),))
    (bounds,) = program.range_constraints.values()
    return bounds.lower


@pytest.fixture(scope="module")
def _operator() -> None:
    torch.library.define("untorch_tests::keep", "(Tensor x) -> Tensor")
    torch.library.impl("untorch_tests::keep", "CPU", lambda x: x[x > 0].clone())

    def fake(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(torch.library.get_ctx().create_unbacked_symint())

    torch.library.register_fake("untorch_tests::keep", fake)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_operator")
def test_torch_still_assumes_two_results() -> None:
    assert sizes_of_results() == 2
    with results_of_any_size():
        assert sizes_of_results() == 0


def make_modules() -> dict[str, types.ModuleType]:
    """What the patch changes of torchvision, with its branches."""
    boxes = types.ModuleType("torchvision.ops.boxes")
    exec(
        "import torch\n"
        "def nms(boxes, scores, iou_threshold):\n    return scores.argsort(descending=True)\n"
        "def batched_nms(boxes, scores, idxs, iou_threshold):\n"
        "    if boxes.numel() == 0:\n        return idxs\n"
        "    return nms(boxes, scores, iou_threshold)\n",
        vars(boxes),
    )
    return {"torchvision.ops.boxes": boxes, "torchvision.ops.poolers": types.ModuleType("torchvision.ops.poolers")}


def test_torchvision_still_needs_the_number_of_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.torchvision_ops import FOLDER

    if not FOLDER.is_dir():
        pytest.skip("torchvision is not in build/torchvision")
    root = FOLDER / "torchvision"
    assert "if boxes.numel() == 0:" in (root / "ops" / "boxes.py").read_text()
    assert "num_rois = len(rois)" in (root / "ops" / "poolers.py").read_text()
    assert "if box_sum > 0:" in (root / "models" / "detection" / "_utils.py").read_text()


def test_batched_nms_keeps_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = make_modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    boxes, poolers = modules.values()
    imported = boxes.batched_nms  # as users have it
    code = imported.__code__

    class Module(torch.nn.Module):
        def forward(self, box: torch.Tensor, score: torch.Tensor, group: torch.Tensor) -> Any:
            some = score > 0.5
            return imported(box[some], score[some], group[some], 0.5)

    args = (torch.rand(6, 4), torch.rand(6), torch.arange(6) % 2)
    with no_graph_dump(), pytest.raises(Exception, match="Could not guard on data-dependent expression"):
        torch.export.export(Module(), args)
    with traceable_torchvision():
        torch.export.export(Module(), args)
        assert imported.__code__ is _batched_nms.__code__
        assert poolers.len(torch.ones(3, 2)) == 3
    assert imported.__code__ is code
    assert not hasattr(poolers, "len")
    assert _length([1, 2]) == 2


def test_no_torchvision_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.ops.boxes", None)
    with traceable_torchvision():
        pass


def test_decode() -> None:
    class Coder:
        def decode_single(self, codes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
            return codes + boxes.repeat(1, 2)

    codes, boxes = torch.rand(3, 8), [torch.rand(2, 4), torch.rand(1, 4)]
    assert torch.equal(_decode(Coder(), codes, boxes), (codes + torch.cat(boxes).repeat(1, 2)).view(3, 2, 4))


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        result: torch.Tensor = self.model(source, target, tgt_mask=mask)
        return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_still_compares_masks() -> None:
    model, args = Masked(), (torch.randn(2, 5, 8), torch.randn(2, 4, 8))
    with no_graph_dump(), pytest.raises(Exception, match="Could not guard on data-dependent expression"):
        torch.export.export(model, args)
    with undetected_causal_masks():
        program = torch.export.export(model, args)
    torch.testing.assert_close(program.module()(*args), model(*args))


@pytest.mark.filterwarnings("ignore")
def test_torch_still_fixes_the_length_of_max_pool1d() -> None:
    model = torch.nn.Sequential(torch.nn.MaxPool1d(2), torch.nn.MaxPool1d(3, 2, 1, ceil_mode=True))
    shapes = ({2: torch.export.Dim("n", min=4, max=64)},)
    with pytest.raises(Exception, match="Constraints violated"):
        torch.export.export(model, (torch.ones(2, 3, 20),), dynamic_shapes=shapes)
    with pooling_of_any_length():
        module = torch.export.export(
            model, (torch.ones(2, 3, 20),), dynamic_shapes=({2: torch.export.Dim.DYNAMIC},)
        ).module(check_guards=False)
        fixed = torch.export.export(model, (torch.ones(3, 20),)).module()
    for length in (20, 31):
        x = torch.randn(2, 3, length)
        assert torch.equal(module(x), model(x))
    assert torch.equal(fixed(x[0, :, :20]), model(x[0, :, :20]))
