"""Adapters in PEFT's format, and models that they are merged into; made without peft."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

__all__ = ["AdapterPairs", "add_hooks", "make_pairs", "merged", "write_adapter"]

AdapterPairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # A and B by the module's name


def make_pairs(model: nn.Module, names: tuple[str, ...], rank: int, seed: int) -> dict[str, Any]:
    """A and B of the linear layers whose names end so, large enough to change what the model says."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in names:
            continue
        shape = module.weight.shape if isinstance(module, nn.Linear) else tuple(reversed(module.weight.shape))
        a = torch.randn(rank, shape[1], generator=generator) / math.sqrt(shape[1])
        b = torch.randn(shape[0], rank, generator=generator) / math.sqrt(rank)
        pairs[name] = a, b
    return pairs


def write_adapter(
    folder: Path, pairs: AdapterPairs, *, alpha: float = 8, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(pairs.values()))[0].shape[0] if pairs else 1
    document = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "use_dora": False, **config}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model: nn.Module, pairs: AdapterPairs, scale: float) -> Any:
    """A copy of the model with W + scale · B · A."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            module: Any = changed.get_submodule(name)
            delta = scale * (b @ a)
            module.weight += delta if isinstance(module, nn.Linear) else delta.T
    return changed


def add_hooks(model: nn.Module, pairs: AdapterPairs, scale: float) -> None:
    """The same of layers whose weights are packed: what the adapter gives is added to their results."""
    for name, (a, b) in pairs.items():

        def add(_: nn.Module, args: Any, out: torch.Tensor, a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
            return out + scale * (args[0] @ a.T @ b.T)

        model.get_submodule(name).register_forward_hook(add)
