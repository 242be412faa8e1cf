"""Exports one of MODELS in a process of its own, with eager's results beside it: ``python -m … NAME FOLDER``.

FOLDER gets model.pt2, job.pickle for runner.py, and expected.pickle: for each sample the flat results.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pathlib
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from tests.conformance.runner import strided
from tests.torchvision_ops import import_torchvision

AUDIO = pathlib.Path(__file__).resolve().parents[2] / "build" / "torchaudio"
MODELS: dict[str, Callable[[], dict[str, Any]]] = {}
MISSING = 77  # the status of a process whose package is not installed


def model(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Registers what gives export()'s arguments, and more samples."""
    MODELS[make.__name__] = make
    return make


class Fn(nn.Module):
    def __init__(self, fn: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        self.parts = nn.ModuleList(modules)

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


@dataclasses.dataclass
class Inner:
    score: torch.Tensor
    note: str = "mean"


@dataclasses.dataclass
class Outputs:
    logits: torch.Tensor
    inner: Inner
    head: torch.Tensor
    width: int
    scale: float = 0.5
    flag: bool = True
    missing: torch.Tensor | None = None


class Forms(nn.Module):
    """Dataclasses with constants as a result, a number that varies, and a batch whose example is one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, n: int) -> Outputs:
        y = self.linear(x)
        return Outputs(y, Inner(y.sum(1) * n), y[:, :n], x.shape[1])


@model
def forms() -> dict[str, Any]:
    shapes = {"x": {0: Dim.DYNAMIC}, "n": Dim.DYNAMIC}
    samples = [(torch.randn(1, 8), 2), (torch.randn(5, 8), 3), (torch.randn(2, 8), 0), (torch.randn(3, 8), 4)]
    return {"model": Forms(), "samples": samples, "dynamic_shapes": shapes}


@model
def flex() -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slope = nn.Parameter(torch.tensor([0.1, 0.4]))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        mask = create_block_mask(lambda b, h, i, j: (i >= j) | (j < 3), None, None, 20, 20, device="cpu")
        one = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slope[h] * (j - i), block_mask=mask)
        return flex_attention(one, k[:, :1], v[:, :1], block_mask=mask, enable_gqa=True), one

    return {"model": Fn(attend), "samples": [tuple(torch.randn(1, 2, 20, 8) for _ in range(3)) for _ in range(2)]}


@model
def complex_numbers() -> dict[str, Any]:
    """A Fourier layer, a state-space kernel, and algebra that Inductor has no code for."""
    weight = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.complex64))
    rate = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def compute(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros(x.shape[0], 4, spectrum.shape[-1], dtype=torch.complex64)
        out[:, :, :5] = torch.einsum("bix,iox->box", spectrum[:, :, :5], weight)
        powers = torch.exp(rate[:, None] * torch.arange(7))
        product = a @ b
        return (
            torch.fft.irfft(out, n=x.shape[-1]), powers.sum(0).real, product, torch.exp(product) / (product + 2j),
            (1 - product).conj().mH @ a, torch.where(product.real > 0, product, 0), product.mean(0), product.sgn(),
            torch.addmm(b[:1], a, b.mH.mH), (product.tril(), product.abs().softmax(-1) * product),
        )  # fmt: skip

    def sample() -> tuple[torch.Tensor, ...]:
        square = [torch.randn(4, 4, dtype=torch.complex64) for _ in range(2)]
        return (torch.randn(2, 3, 16), *square)

    return {"model": Fn(compute), "samples": [sample(), sample()]}


@model
def regions() -> dict[str, Any]:
    """YOLO's post-processing, deformable convolution and the poolings of regions."""
    ops = _torchvision().ops
    convolution, moves, scales = (
        ops.DeformConv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 18, 3, padding=1),
        nn.Conv2d(4, 9, 1),
    )

    def detect(image: torch.Tensor, rois: torch.Tensor, predictions: torch.Tensor) -> Any:
        features = nn.functional.pad(image, (0, 0, 0, 0, 0, 0))
        moved = convolution(features, moves(features), torch.sigmoid(nn.functional.pad(scales(features), (0, 0, 0, 0))))
        pooled = (
            ops.roi_align(image, rois, (3, 2), 0.5, 2, True), ops.roi_pool(image, rois, (3, 2), 0.5),
            ops.ps_roi_align(image, rois, (2, 2), 0.5), ops.ps_roi_pool(image, rois, (2, 2), 0.5),
        )  # fmt: skip
        scores, classes = (predictions[:, 5:] * predictions[:, 4:5]).max(1)
        sure = scores > 0.3
        centre, size = predictions[sure, :2] * 50, predictions[sure, 2:4] * 20
        boxes = torch.cat([centre - size / 2, centre + size / 2], 1)
        scores, classes = scores[sure], classes[sure]
        kept = ops.batched_nms(boxes, scores, classes, 0.4)[:30]
        return moved, pooled, {"boxes": boxes[kept], "scores": scores[kept], "labels": classes[kept]}

    def sample(sure: float) -> tuple[torch.Tensor, ...]:
        corners = torch.rand(5, 2) * 12
        rois = torch.cat([torch.randint(0, 2, (5, 1)).float(), corners, corners + torch.rand(5, 2) * 8], 1)
        return torch.randn(2, 4, 9, 8), rois, torch.rand(80, 8) * sure

    # Many boxes, one or none of them sure enough.
    module = Fn(detect, convolution, moves, scales)
    return {"model": module, "samples": [sample(1.0), sample(0.56), sample(0.1)]}


@model
def faster_rcnn() -> dict[str, Any]:
    """All of Faster R-CNN behind a backbone of one convolution."""
    detection = _torchvision().models.detection
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8, padding=1), nn.ReLU())
    backbone.out_channels = 8  # type: ignore[assignment]
    anchors = detection.anchor_utils.AnchorGenerator(((8, 16, 32),), ((0.5, 1.0),))
    pooler = _torchvision().ops.MultiScaleRoIAlign(["0"], 3, 2)
    made = detection.FasterRCNN(
        backbone, min_size=64, max_size=64, rpn_anchor_generator=anchors, box_roi_pool=pooler,
        box_score_thresh=0.3, rpn_pre_nms_top_n_test=60, rpn_post_nms_top_n_test=20, box_detections_per_img=10,
        box_head=detection.faster_rcnn.TwoMLPHead(72, 16), box_predictor=detection.faster_rcnn.FastRCNNPredictor(16, 3),
    )  # fmt: skip
    with torch.no_grad():  # scores of weights that nobody trained lie close together
        for part in (made.rpn.head.cls_logits, made.roi_heads.box_predictor.cls_score):
            part.weight *= 30
        made.roi_heads.box_predictor.bbox_pred.weight *= 3
    return {"model": made, "samples": [([torch.rand(3, 48, 64)],), ([torch.rand(3, 48, 64)],)]}


def _detector(name: str, size: int, **options: Any) -> dict[str, Any]:
    """One of torchvision's detectors for images of size × size."""
    detection = _torchvision().models.detection
    made = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=4, **options).eval()
    samples = [([torch.rand(3, size, size)],) for _ in range(2)]

    def spread(part: nn.Conv2d, _: Any, output: torch.Tensor) -> torch.Tensor:
        hooks.pop(part).remove()
        part.weight /= output.std()
        return output / output.std()

    # Scores of weights that nobody trained lie close together.
    parts = [part for part in made.head.classification_head.modules() if isinstance(part, nn.Conv2d)]
    hooks = {part: part.register_forward_hook(spread) for part in parts}
    with torch.no_grad():
        made(*samples[0])
    return {"model": made, "samples": samples}


@model
def ssdlite() -> dict[str, Any]:
    return _detector("ssdlite320_mobilenet_v3_large", 320, topk_candidates=8)


@model
def ssd300() -> dict[str, Any]:
    return _detector("ssd300_vgg16", 300, topk_candidates=8)


@model
def retinanet() -> dict[str, Any]:
    return _detector("retinanet_resnet50_fpn", 128, min_size=128, max_size=128, topk_candidates=8)


@model
def conformer() -> dict[str, Any]:
    made = _torchaudio("conformer").Conformer(
        input_dim=8, num_heads=2, ffn_dim=16, num_layers=1, depthwise_conv_kernel_size=3
    )
    samples = [(torch.rand(2, 12, 8), torch.tensor([12, n])) for n in (9, 4)]
    return {"model": made, "samples": samples}


@model
def emformer() -> dict[str, Any]:
    made = _torchaudio("emformer").Emformer(
        input_dim=8, num_heads=2, ffn_dim=16, num_layers=1, segment_length=4, left_context_length=4,
        right_context_length=1,
    )  # fmt: skip
    samples = [(torch.rand(2, 13, 8), torch.tensor([12, n])) for n in (9, 5)]
    return {"model": made, "samples": samples}


def _torchvision() -> Any:
    found = sys.modules.get("torchvision") or import_torchvision()
    if found is None:
        raise SystemExit(MISSING)
    return found


def _torchaudio(name: str) -> Any:
    """A module of torchaudio.models alone: the package itself opens a library that needs CUDA."""
    if not AUDIO.is_dir():
        raise SystemExit(MISSING)
    for package in ("torchaudio", "torchaudio.models"):
        sys.modules[package] = empty = types.ModuleType(package)
        empty.__path__ = [str(AUDIO.joinpath(*package.split(".")))]
    return importlib.import_module(f"torchaudio.models.{name}")


def flatten(value: Any) -> list[Any]:
    """Leaves in the order of the file's results."""
    if dataclasses.is_dataclass(value) and not isinstance(value, dict):
        return [leaf for field in dataclasses.fields(value) for leaf in flatten(getattr(value, field.name))]
    if isinstance(value, dict):
        return [leaf for key in value for leaf in flatten(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


def to_job(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return strided(value.detach().contiguous().numpy().reshape(-1), tuple(value.shape), value.contiguous().stride())
    if isinstance(value, list | tuple):
        return type(value)(to_job(item) for item in value)
    return value


def main(name: str, folder: pathlib.Path) -> None:
    from untorch.export import export

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    made = MODELS[name]()
    module, samples = made["model"].eval(), made["samples"]
    export(
        module, samples[0], folder / "model.pt2", dynamic_shapes=made.get("dynamic_shapes"), progress=False,
        inductor={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )  # fmt: skip
    with torch.no_grad():
        expected = [[to_plain(leaf) for leaf in flatten(module(*copy.deepcopy(sample)))] for sample in samples]
    (folder / "expected.pickle").write_bytes(pickle.dumps(expected))
    job = {"package": str(folder / "model.pt2"), "samples": [(to_job(sample), {}) for sample in samples]}
    (folder / "job.pickle").write_bytes(pickle.dumps(job))


def to_plain(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
