"""Compiles the models of these tests: ``python models.py served|gpu PATH``."""

from __future__ import annotations

import sys

import torch


class Scale(torch.nn.Module):
    """Each row by itself."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2 + shift[:, None], shift + 1


class Wave(torch.nn.Module):
    """One kernel, with a result as large as its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1


class Types(torch.nn.Module):
    """Arrays of all dtypes that the protocol has, given back as they came."""

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in tensors]


class Similarity(torch.nn.Module):
    """Relates rows: calls must not be joined."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.T


class Centre(torch.nn.Module):
    """Relates rows, and does not show it in its shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def main(kind: str, path: str) -> None:
    """Compiles the package."""
    from untorch.export import export

    if kind == "gpu":
        rows = torch.export.Dim("rows", min=1, max=1 << 20)
        export(
            Wave(), (torch.zeros(8, 1024),), path, dynamic_shapes=({0: rows},), device="cuda", arch="sm_90",
            progress=False,
        )  # fmt: skip
        return
    assert kind == "served"
    batch = torch.export.Dim("batch", min=1, max=1024)
    names = (
        "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool",
    )  # fmt: skip
    tensors = [torch.ones(2, 3).to(getattr(torch, name)) for name in names]
    export(
        methods={
            "forward": {
                "model": Scale(),
                "args": (torch.randn(3, 4), torch.randn(3)),
                "dynamic_shapes": ({0: batch}, {0: batch}),
            },
            "types": (Types(), (tensors,)),
            "similarity": {"model": Similarity(), "args": (torch.randn(3, 4),), "dynamic_shapes": ({0: batch},)},
            "centre": {"model": Centre(), "args": (torch.randn(3, 4),), "dynamic_shapes": ({0: batch},)},
        },
        path=path,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
