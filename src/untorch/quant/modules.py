"""Modules as quantising sees them: their bytes, where they lie, and replacing parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

__all__ = ["device_type", "module_nbytes", "replace_modules"]


def replace_modules(module: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Puts the replacements in, everywhere below ``module``; they are by the id of what they replace."""
    for owner in list(module.modules()):
        for name, part in list(owner._modules.items()):
            if part is not None and id(part) in replacements:
                owner._modules[name] = replacements[id(part)]


def device_type(module: nn.Module) -> Literal["cpu", "cuda"]:
    """ "cuda" where weights of the module lie on a GPU, else "cpu"."""
    on_gpu = any(tensor.device.type == "cuda" for tensor in (*module.parameters(), *module.buffers()))
    return "cuda" if on_gpu else "cpu"


def module_nbytes(module: nn.Module) -> int:
    """The bytes of all parameters and buffers, what is shared once."""
    storages = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
