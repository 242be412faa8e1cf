"""The convolutional networks of cpu_models.py, with random weights: torchvision's, and a U-Net."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from typing import Any

import torch
from torch import nn

__all__ = ["load_model"]


class UNet(nn.Module):
    """Four levels, 32 channels at the first; a pixel's class out of two."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(5)]
        inputs = [3, *widths]
        self.down = nn.ModuleList(_double(inputs[i], widths[i]) for i in range(5))
        self.up = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in range(4))
        self.merge = nn.ModuleList(_double(widths[i + 1], widths[i]) for i in range(4))
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [n, 2, h, w] of an image [n, 3, h, w]."""
        kept = []
        for level in self.down[:-1]:
            x = level(x)
            kept.append(x)
            x = torch.max_pool2d(x, 2)
        x = self.down[-1](x)
        for i in range(3, -1, -1):
            x = self.merge[i](torch.cat([self.up[i](x), kept[i]], 1))
        result: torch.Tensor = self.last(x)
        return result


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
    return nn.Sequential(*layers)


def _import_torchvision() -> Any:
    """The module, also where its C++ operators do not load: they get stand-ins, which these models never call."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed: pip install -c constraints.txt torchvision")
    try:
        import torchvision  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except RuntimeError:
        text = pathlib.Path(spec.origin).with_name("_meta_registrations.py").read_text()
        library = torch.library.Library("torchvision", "FRAGMENT")
        names = {*re.findall(r"torchvision::(\w+)", text), *re.findall(r'register_meta\("(\w+)"', text)}
        for name in sorted(names):
            library.define(f"{name}(Tensor x) -> Tensor")
        _import_torchvision.library = library  # type: ignore[attr-defined]
        import torchvision
    return torchvision


class _Scaled(nn.Module):
    """The network's outputs divided by a constant."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model = model
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x) / self.scale
        return result


def load_model(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The network in inference, with statistics of batch norm that are not trivial, and one image for it.

    The largest output is 1, so that one tolerance serves all networks.
    """
    torch.manual_seed(0)
    model = UNet() if name == "unet" else getattr(_import_torchvision().models, name)(weights=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            with torch.no_grad():
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    size = 256 if name == "unet" else 224
    image = torch.randn(1, 3, size, size)
    with torch.no_grad():
        scale = float(model.eval()(image).abs().max())
    return _Scaled(model, scale).eval(), image
