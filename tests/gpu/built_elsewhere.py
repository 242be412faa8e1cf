"""Cross-compiles files for a GPU, with eager PyTorch's results on the CPU as the reference.

    python -m tests.gpu.built_elsewhere FOLDER [--arch sm_90]

tests/gpu/test_built_elsewhere.py runs them where the GPU is: it builds some itself, and takes those of a folder that
UNTORCH_BUILT_ELSEWHERE names.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from untorch.export import export

__all__ = ["MODELS", "build"]


class Block(nn.Module):
    """A transformer layer; causal attention with shared keys."""

    def __init__(self, width: int = 256, heads: int = 4, heads_kv: int = 2) -> None:
        super().__init__()
        self.heads, self.heads_kv, size = heads, heads_kv, width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.keys, self.values = nn.Linear(width, heads_kv * size), nn.Linear(width, heads_kv * size)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        y = self.before(x)
        q = self.queries(y).view(b, n, self.heads, -1).transpose(1, 2)
        k, v = (p(y).view(b, n, self.heads_kv, -1).transpose(1, 2) for p in (self.keys, self.values))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, -1))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.head(self.layers(x).mean((2, 3)))
        return y, torch.sort(y, 1)[0], torch.cumsum(y, 1)


class Steps(nn.Module):
    """Counts its calls; has constants of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("two", torch.tensor(2.0))
        self.register_buffer("table", torch.arange(64.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.two + self.table + torch.arange(64, device=x.device) + torch.tensor(3) + self.calls


class Gemms(nn.Module):
    """GEMMs with pointwise epilogues, which Triton templates fuse.

    What goes into tanh is small: where it is steep, a sum of bfloat16 would differ by more than the tolerance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(F.gelu(self.up(x)))
        return y.softmax(-1), torch.bmm(y.view(4, -1, 512), x.view(4, -1, 512).mT).div(32).tanh()


def _half(module: nn.Module) -> nn.Module:
    return module.to(torch.bfloat16)


def _models() -> dict[str, dict[str, Any]]:
    mlp = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128))
    length = {1: Dim("length", min=1, max=1024)}
    return {
        "mlp": {"model": mlp, "args": (torch.randn(8, 256),)},
        "block": {"model": Block(), "args": (torch.randn(2, 100, 256),)},
        "block_bfloat16": {
            "model": _half(Block()), "args": (torch.randn(2, 100, 256).bfloat16(),), "dynamic_shapes": (length,),
        },
        "convolutions": {"model": Convolutions(), "args": (torch.randn(4, 3, 32, 32),)},
        "steps": {"model": Steps(), "args": (torch.randn(3, 64),)},
        "int4": {"model": _half(nn.Sequential(nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 256))),
                 "args": (torch.randn(5, 512).bfloat16(),)},
        "templates": {"model": _half(Gemms()), "args": (torch.randn(128, 512).bfloat16(),),
                      "options": {"matmul": "auto"}},
    }  # fmt: skip


MODELS = tuple(_models())


def build(folder: Path, arch: str, names: tuple[str, ...] = MODELS) -> None:
    """``folder/name.pt2`` for each, and ``name.pt`` with (inputs, what eager gives on the CPU)."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for name, entry in _models().items():
        if name not in names:
            continue
        model, args = entry["model"].eval(), entry["args"]
        quantize = "int4" if name == "int4" else None
        # The file for several architectures has the GPU's own code behind that of another.
        archs = ["sm_120", arch] if name == "steps" else arch
        export(
            model, args, folder / f"{name}.pt2", dynamic_shapes=entry.get("dynamic_shapes"), device="cuda", arch=archs,
            quantize=quantize, progress=False, **entry.get("options", {}),
        )  # fmt: skip
        if quantize is not None:
            from untorch.quant import quantize as quantize_module

            quantize_module(model, quantize, progress=False)
        with torch.no_grad():
            results = model(*args)
        torch.save((args, results if isinstance(results, tuple) else (results,)), folder / f"{name}.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90")
    options = parser.parse_args()
    build(options.folder, options.arch)
