"""CUDA tensors over addresses that no GPU has: enough to test what a shim checks before it touches the driver."""

from __future__ import annotations

import torch


class MadeUp(torch.Tensor):
    """A CPU tensor whose handle says cuda:0."""

    is_cuda = True
    device = torch.device("cuda", 0)


def made_up(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.Tensor._make_subclass(MadeUp, torch.zeros(shape, dtype=dtype))


def on_device_1(*shape: int) -> torch.Tensor:
    class Other(MadeUp):
        device = torch.device("cuda", 1)

    return torch.Tensor._make_subclass(Other, torch.zeros(shape))
