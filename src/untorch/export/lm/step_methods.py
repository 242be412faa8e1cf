"""Methods of a language model's step: their example inputs, and what the manifest says of their pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from untorch.export.lm.latent import latent_layers
from untorch.export.lm.step import Step
from untorch.export.options import ExportOptions

__all__ = ["keeps_latents", "pages_section", "step_method", "unchanged"]

_MOST = 1 << 20
_WIDEST_FLOAT32 = 256  # head of the kernels for GPUs


def keeps_latents(module: nn.Module, options: ExportOptions, device: str, dtype: torch.dtype) -> bool:
    """Whether pages of latent attention hold latents. What expands them is no linear layer then: none to quantise."""
    if options.quantize is not None:
        return False
    layers: list[Any] = list(latent_layers(module).values())
    widest = max((int(layer.kv_lora_rank + layer.qk_rope_head_dim) for layer in layers), default=0)
    return device == "cpu" or dtype != torch.float32 or widest <= _WIDEST_FLOAT32


def pages_section(step: Step) -> dict[str, Any]:
    """Of the manifest: a block of the pool."""
    return {
        "block_elements": step.elements,
        "dtype": str(step.dtype).removeprefix("torch."),
        "layers": [
            {
                "heads_kv": layer.heads_kv, "width": layer.width, "width_v": layer.width_v,
                "window": layer.window, "chunk": layer.chunk, "offset": layer.offset,
            }
            for layer in step.layers
        ],
    }  # fmt: skip


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The model's attention, cache settings, mode and rotary embeddings are what they were, afterwards."""
    config: Any = model.config
    configs = list({id(part): part for part in (config, config.get_text_config())}.values())
    attention, caches = config._attn_implementation, [getattr(part, "use_cache", None) for part in configs]
    rotary = [(module, module.rope_type) for module in model.modules() if hasattr(module, "rope_type")]
    training = model.training
    try:
        yield
    finally:
        model.set_attn_implementation(attention or "eager")  # type: ignore[operator]
        for part, value in zip(configs, caches, strict=True):
            part.use_cache = value
        for module, kind in rotary:
            module.rope_type = kind
        model.train(training)


def step_method(step: Step, tokens: int) -> dict[str, Any]:
    """Example inputs of three sequences, and which sizes vary."""
    from torch.export import Dim

    block = step.block
    first = tokens - 3
    lengths = [first, 2, 1]
    needed = [-(-length // block) for length in lengths]
    columns, ends = max(*needed, 2), [0, first, first + 2, tokens]
    table = torch.zeros(3, columns, dtype=torch.int32)
    slots, positions, used = [], [], 0
    for s, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        table[s, :count] = torch.arange(used, used + count, dtype=torch.int32)
        slots.append(torch.arange(used * block, used * block + length))
        positions.append(torch.arange(length))
        used += count
    int32 = torch.int32
    args: tuple[torch.Tensor, ...] = (
        torch.arange(tokens) % 7, torch.cat(positions), torch.tensor(ends[1:]) - 1, table,
        torch.tensor(ends, dtype=int32), torch.tensor(lengths, dtype=int32), torch.cat(slots),
        torch.zeros(used + 1, step.elements, dtype=step.dtype),
    )  # fmt: skip
    if step.state_elements:
        args += (torch.tensor([2, 0, 1], dtype=int32), torch.zeros(4, step.state_elements))
    total, rows = Dim("tokens", min=1, max=_MOST), Dim("rows", min=1, max=_MOST)
    sequences, ends_ = Dim("sequences", min=1, max=_MOST), Dim("sequences_and_one", min=2, max=_MOST + 1)
    width, blocks = Dim("columns", min=1, max=_MOST), Dim("blocks", min=1, max=1 << 30)
    shapes: tuple[dict[int, Any], ...] = (
        {0: total}, {0: total}, {0: rows}, {0: sequences, 1: width}, {0: ends_}, {0: sequences}, {0: total},
        {0: blocks},
    )  # fmt: skip
    if step.state_elements:
        shapes += ({0: sequences}, {0: Dim("slots", min=1, max=_MOST)})
    return {"model": step, "args": args, "dynamic_shapes": shapes}
