"""Compiles a package with a front end: ``python front_end_models.py colours PATH``."""

from __future__ import annotations

import pathlib
import sys

import torch


class Colours(torch.nn.Module):
    """How red, green and blue a picture is."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values.mean((2, 3)) * 8


def main(path: str) -> None:
    """Compiles the package."""
    from untorch.export.exporter import write_package
    from untorch.export.methods import read_methods
    from untorch.export.options import resolve_options

    section = {
        "format_version": 1, "task": "image-classification", "architecture": "Colours", "activation": "softmax",
        "labels": ["red", "green", "blue"],
        "image_steps": [["resize_shortest", 8, 2], ["center_crop", 8, 8], ["rescale", 1 / 255]],
    }  # fmt: skip
    batch = torch.export.Dim("batch", min=1, max=64)
    requests = read_methods(Colours(), (torch.zeros(2, 3, 8, 8),), None, ({0: batch},), None)
    options = resolve_options(None, {"progress": False})
    write_package(requests, pathlib.Path(path), "cpu", None, options, {"pipeline": section})


if __name__ == "__main__":
    main(sys.argv[2])
