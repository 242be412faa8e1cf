"""Models for CUDA that call operators without a C function; for the fake driver and for GPUs."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import torch

LIBRARIES: list[torch.library.Library] = []


def define(name: str, schema: str, fake: Any) -> None:
    """The operator, for tracing alone; nothing where it is there already."""
    namespace, _, base = name.partition("::")
    if hasattr(getattr(torch.ops, namespace), base):
        return
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(base + schema)
    LIBRARIES.append(library)
    torch.library.register_fake(name, fake)


def define_all() -> None:
    # Its library aborts the process when an operator of its own is there already.
    with contextlib.suppress(ImportError, RuntimeError):
        importlib.import_module("torchvision")
    define("proxy::scale", "(Tensor x, float factor) -> Tensor", lambda x, factor: torch.empty_like(x))
    define("proxy::pair", "(Tensor x) -> (Tensor, Tensor)", lambda x: (torch.empty_like(x), x.new_empty(x.shape[0])))
    define(
        "torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        lambda dets, scores, iou_threshold: dets.new_empty(
            torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64
        ),
    )  # fmt: skip


class Scale(torch.nn.Module):
    """The kernel's own result, and its input; no generated kernel in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.proxy.scale(x, 3.0)


class Around(torch.nn.Module):
    """Generated kernels before and after."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.proxy.scale(x * 2, 3.0).sin() + 1


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = torch.ops.proxy.pair(x)
        return a, b


class Detect(torch.nn.Module):
    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        return kept, boxes[kept] + 1


class Both(torch.nn.Module):
    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        return kept, torch.ops.proxy.scale(boxes * 2, 3.0).sin() + 1


def export_models(path: Path) -> None:
    """All of them, for sm_90."""
    import untorch
    from untorch.export import export

    define_all()
    for name in ("proxy::scale", "proxy::pair"):
        untorch.register_kernel(name, lambda *a, **k: None, device="cuda")  # so that the exporter lets them pass
    x = (torch.ones(3, 4),)
    methods = {
        "scale": {"model": Scale(), "args": x},
        "around": {"model": Around(), "args": x},
        "pair": {"model": Pair(), "args": x},
        "detect": {"model": Detect(), "args": (torch.rand(6, 4), torch.rand(6))},
    }
    export(methods=methods, path=path, device="cuda", arch="sm_90", progress=False)


if __name__ == "__main__":
    import sys

    export_models(Path(sys.argv[1]))
