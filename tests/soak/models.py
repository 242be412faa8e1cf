"""Exports the soak's models, with inputs and eager's outputs: ``python models.py FOLDER``."""

from __future__ import annotations

import pathlib
import pickle
import sys
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from untorch import register_kernel
from untorch.export import export

FAST_BUILD = {"aot_inductor.compile_wrapper_opt_level": "O0"}


@torch.library.custom_op("soak::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor + 1


@scaled.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


class Conv(nn.Module):
    """Two convolutions, batch norm, pooling, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, stride=2)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Total(nn.Module):
    """Adds up what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(16.0).reshape(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2


class Embedding(nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(100, 8), nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(rows))


class Kernel(nn.Module):
    """An operator that only Python has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(x.sin(), 3.0).cos()


def main(folder: pathlib.Path) -> None:
    """One package a model, and pairs of input and output."""
    register_kernel("soak::scaled", lambda x, factor: x)  # so that export lets the operator pass
    torch.manual_seed(0)
    batch, length = Dim("batch", min=1, max=256), Dim("length", min=1, max=4096)
    mlp = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 48), nn.SiLU(), nn.Linear(48, 10))
    models: dict[str, tuple[nn.Module, Any, list[torch.Tensor]]] = {
        "mlp": (mlp, ({0: batch},), [torch.randn(n, 32) for n in (4, 1, 17, 128)]),
        "conv": (Conv().eval(), ({0: batch},), [torch.randn(n, 3, 16, 16) for n in (2, 1, 5)]),
        "total": (Total(), None, [torch.ones(4, 4)]),
        "embedding": (Embedding(), ({0: length},), [torch.randint(0, 100, (n,)) for n in (8, 1, 2000)]),
        "kernel": (Kernel(), None, [torch.randn(6, 5)]),
    }
    pairs: dict[str, list[tuple[Any, Any]]] = {}
    for name, (model, shapes, inputs) in models.items():
        export(model, (inputs[0],), folder / f"{name}.pt2", dynamic_shapes=shapes, progress=False, inductor=FAST_BUILD)
        with torch.no_grad():
            pairs[name] = [(x.numpy(), model(x).numpy()) for x in inputs] if name != "total" else []
    (folder / "pairs.pickle").write_bytes(pickle.dumps(pairs))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
