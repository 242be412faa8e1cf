"""Methods of a language model's step: their example inputs, and what the manifest says of their pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from untorch.export.lm.latent import latent_layers
from untorch.export.lm.step import Step

__all__ = ["block_tables", "keeps_latents", "pages_section", "step_method", "unchanged"]

_MOST = 1 << 20
_WIDEST_FLOAT32 = 256  # head of the kernels for GPUs


def keeps_latents(module: nn.Module, device: str, dtype: torch.dtype) -> bool:
    """Whether pages of latent attention hold latents."""
    layers: list[Any] = list(latent_layers(module).values())
    widest = max((int(layer.kv_lora_rank + layer.qk_rope_head_dim) for layer in layers), default=0)
    return device == "cpu" or dtype != torch.float32 or widest <= _WIDEST_FLOAT32


def pages_section(step: Step) -> dict[str, Any]:
    """Of the manifest: a block of the pool, and which layers have which block table."""
    section = {
        "block_elements": step.elements,
        "dtype": str(step.dtype).removeprefix("torch."),
        "layers": [
            {
                "heads_kv": layer.heads_kv, "width": layer.width, "width_v": layer.width_v,
                "window": layer.window, "chunk": layer.chunk, "offset": layer.offset,
                **({"group": layer.group} if len(step.groups) > 1 else {}),
            }
            for layer in step.layers
        ],
    }  # fmt: skip
    if len(step.groups) > 1:
        section["groups"] = [
            {"block_size": group.size, "window": group.window, "chunk": group.chunk} for group in step.groups
        ]
    return section


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


def block_tables(step: Step, lengths: Sequence[int], columns: int = 1) -> tuple[Any, Any, int]:
    """For sequences of these lengths: block_table and slot_mapping of all positions, and the blocks that they take.

    columns: of a table, at least.
    """
    tables, mappings, used = [], [], 0
    for group in step.groups:
        size = group.size
        table = torch.zeros(len(lengths), max(columns, -(-max(lengths) // size)), dtype=torch.int32)
        slots = []
        for row, length in enumerate(lengths):
            count = -(-length // size)
            table[row, :count] = torch.arange(used, used + count, dtype=torch.int32)
            slots.append(torch.arange(used * size, used * size + length))
            used += count
        tables.append(table)
        mappings.append(torch.cat(slots))
    return (tables[0], mappings[0], used) if len(tables) == 1 else (tuple(tables), tuple(mappings), used)


def step_method(step: Step, tokens: int) -> dict[str, Any]:
    """Example inputs of three sequences, and which sizes vary."""
    from torch.export import Dim

    first = tokens - 3
    lengths, ends = [first, 2, 1], [0, first, first + 2, tokens]
    tables, slots, used = block_tables(step, lengths, 2)
    int32 = torch.int32
    args: tuple[Any, ...] = (
        torch.arange(tokens) % 7, torch.cat([step.positions(0, length) for length in lengths], -1),
        torch.tensor(ends[1:]) - 1, tables, torch.tensor(ends, dtype=int32), torch.tensor(lengths, dtype=int32), slots,
        torch.zeros(used + 1, step.elements, dtype=step.dtype),
    )  # fmt: skip
    if step.state_elements:
        args += (torch.tensor([2, 0, 1], dtype=int32), torch.zeros(4, step.state_elements))
    total, rows = Dim("tokens", min=1, max=_MOST), Dim("rows", min=1, max=_MOST)
    sequences, ends_ = Dim("sequences", min=1, max=_MOST), Dim("sequences_and_one", min=2, max=_MOST + 1)
    blocks = Dim("blocks", min=1, max=1 << 30)
    if len(step.groups) == 1:
        of_tables: Any = {0: sequences, 1: Dim("columns", min=1, max=_MOST)}
        of_slots: Any = {0: total}
    else:
        widths = [Dim(f"columns_{i}", min=1, max=_MOST) for i in range(len(step.groups))]
        of_tables, of_slots = tuple({0: sequences, 1: width} for width in widths), tuple({0: total} for _ in widths)
    shapes: tuple[Any, ...] = (
        {0: total}, {0 if step.position_rows == 1 else 1: total}, {0: rows}, of_tables, {0: ends_}, {0: sequences},
        of_slots, {0: blocks},
    )  # fmt: skip
    if step.state_elements:
        shapes += ({0: sequences}, {0: Dim("slots", min=1, max=_MOST)})
    return {"model": step, "args": args, "dynamic_shapes": shapes}
