"""transformers' attention interface on pages: every layer's attention becomes one ``untorch::paged_attention``.

A model calls its attention through ``AttentionInterface``, and makes masks through ``AttentionMaskInterface``. Ours
take the place of both, by name: the mask is a marker that says which keys a query sees, and the attention reads and
writes the step's pages. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.export.lm.latent import Latents
from untorch.export.lm.refusal import MaskError
from untorch.ops.kv_pages import block_elements
from untorch.ops.paged_attention import BLOCK_UNIT, OPERATOR

__all__ = ["NAME", "Context", "Layer", "Recorder", "current_step", "register_interfaces"]

NAME = "untorch_paged"

# What a mask of transformers may be made of; anything else sees other keys than window and chunk say.
_CAUSAL = {
    "causal_mask_function", "and_masks", "or_masks", "sliding_window_overlay", "chunked_overlay",
    "packed_sequence_mask_function", "packed_sequence_compatibility_function",
    "remap_positions_for_packed_sequence", "add_offsets_to_mask_function",
}  # fmt: skip
# Arguments of the attention interface that change nothing here.
_KNOWN = {
    "position_ids", "use_cache", "output_attentions", "position_bias", "is_causal", "cache_position",
    "layer_head_mask", "num_items_in_batch", "output_router_logits", "past_key_values", "output_hidden_states",
    "return_dict", "head_mask", "logits_to_keep", "position_embeddings",
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """What a layer keeps of a token, and which keys its queries see. group: of layers that have a block table, with
    ``block`` positions a block; offset: the layer's place in it.

    dtype: of the pages, that of the model's keys unless they are quantised.
    """

    module: str
    heads_kv: int
    width: int
    width_v: int
    window: int
    chunk: int
    dtype: torch.dtype
    group: int = 0
    block: int = 0
    offset: int = 0

    def elements(self, block: int) -> int:
        """Of a block with that many positions."""
        return block_elements(self.dtype, self.heads_kv, block, self.width, self.width_v)


@dataclass(frozen=True)
class Context:
    """The step's tables, and the pool. block_tables, slot_mappings: of each group of layers."""

    pool: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    slot_mappings: Sequence[torch.Tensor]


@dataclass
class Recorder:
    """Layers by the order of their calls. While ``layers`` grows, attention runs on pages of its own.

    A key that a layer was given before, with the same value, is another layer's: it is read only (Gemma 3n and 4). The
    same key with another value is a layer of its own (DiffLlama).
    """

    layers: list[Layer] = field(default_factory=list)
    known: list[Layer] | None = None  # those of an earlier run
    latents: Latents = field(default_factory=Latents)
    context: Context | None = None
    calls: int = 0
    _kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def begin(self, context: Context | None) -> None:
        """A run of the model."""
        self.context, self.calls = context, 0
        self._kept = []

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> tuple[int, bool]:
        """The number of the layer that keeps key and value, and whether this call is the first with them."""
        for number, (known_key, known_value) in enumerate(self._kept):
            if known_key is key and known_value is value:
                return number, False
        self._kept.append((key, value))
        return len(self._kept) - 1, True


_current: list[Recorder] = []


class current_step:  # noqa: N801 - reads as a function
    """The recorder that the interface's functions use meanwhile."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __enter__(self) -> Recorder:
        _current.append(self.recorder)
        return self.recorder

    def __exit__(self, *_: object) -> None:
        _current.pop()


class _Mask:
    """Stands in for a mask of transformers."""

    def __init__(self, window: int, chunk: int) -> None:
        self.window, self.chunk = window, chunk

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MaskError(f"the model reads its mask ({name}), which pages cannot follow: it makes one of its own")

    def __getitem__(self, key: Any) -> Any:
        raise MaskError("the model reads a part of its mask, which pages cannot follow: it makes one of its own")


def _parts(function: Callable[..., Any], found: dict[str, int | None]) -> dict[str, int | None]:
    """The functions that a mask function is made of, by name, each with the number that it holds."""
    name = function.__qualname__.split(".")[0]
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for value in held if isinstance(held, tuple | list) else (held,):
            if callable(value) and hasattr(value, "__qualname__"):
                _parts(value, found)
            elif isinstance(value, int) and not isinstance(value, bool):
                found.setdefault(name, value)
    found.setdefault(name, None)
    return found


def _mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> _Mask:
    found = _parts(mask_function, {})
    if "bidirectional_mask_function" in found:
        raise CompileError(
            "the model has bidirectional attention, so it is an encoder: compile it with untorch.export.export"
        )
    if other := sorted(found.keys() - _CAUSAL):
        raise CompileError(
            f"the model's mask is made of {', '.join(other)}: only causal masks, windows and chunks work"
        )
    return _Mask(found.get("sliding_window_overlay") or 0, found.get("chunked_overlay") or 0)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    name = type(module).__name__
    if not _current:
        raise CompileError(f"{name}: the attention implementation {NAME!r} works inside of a step only")
    recorder = _current[-1]
    recorder.calls += 1
    kwargs.pop("dropout", None)
    if attention_mask is not None and not isinstance(attention_mask, _Mask):
        raise CompileError(f"{name}: it makes a mask of its own, which pages cannot follow")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise CompileError(f"{name}: its attention is not causal")
    if unknown := sorted(key for key, given in kwargs.items() if given is not None and key not in _KNOWN):
        raise CompileError(f"{name}: its attention has arguments that are not known: {', '.join(unknown)}")
    window, chunk = (attention_mask.window, attention_mask.chunk) if attention_mask is not None else (0, 0)
    if sliding_window and window and sliding_window != window:
        raise CompileError(f"{name}: its window is {sliding_window}, and {window} in its mask")
    window = window or int(sliding_window or 0)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    number, first = recorder.layer_of(key, value)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    sinks = None if s_aux is None else s_aux.float()
    latents = recorder.latents

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, context: Context) -> torch.Tensor:
        writes = first or recorder.known is None
        out: torch.Tensor = OPERATOR(
            q, k if writes else None, v if writes else None, context.pool, context.block_tables[layer.group],
            context.cu_seqlens_q, context.seqlens_k, context.slot_mappings[layer.group], sinks, None, layer.offset,
            layer.block, layer.heads_kv, layer.width, layer.width_v, scale, window, chunk, float(softcap or 0.0),
        )  # fmt: skip
        return out

    def absorbed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return latents.query(module, q), latents.key(module, k), latents.value(module)

    if recorder.known is not None:
        assert recorder.context is not None
        layer = recorder.known[number]
        if module in latents.absorbed:
            return latents.expand(module, attend(*absorbed(), layer, recorder.context)).unsqueeze(0), None
        return attend(q, k, v, layer, recorder.context).unsqueeze(0), None
    block = -(-q.shape[0] // BLOCK_UNIT) * BLOCK_UNIT
    layer = Layer(name, k.shape[1], k.shape[2], v.shape[2], window, chunk, k.dtype, block=block)
    out = attend(q, k, v, layer, _alone(layer, q.shape[0]))
    if module in latents.given:
        given = absorbed()
        small = Layer(name, 1, given[1].shape[2], given[2].shape[2], window, chunk, k.dtype, block=block)
        if latents.agrees(latents.expand(module, attend(*given, small, _alone(small, q.shape[0]))), out):
            latents.absorbed.add(module)
            layer = small
    if first:
        recorder.layers.append(layer)
    return out.unsqueeze(0), None


def _alone(layer: Layer, tokens: int) -> Context:
    """One sequence from its beginning, in a block of its own."""
    pool = torch.zeros(1, layer.elements(layer.block), dtype=layer.dtype)
    return Context(
        pool, [torch.zeros(1, 1, dtype=torch.int32)], torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32), [torch.arange(tokens)],
    )  # fmt: skip


def register_interfaces() -> None:
    """Makes both known to transformers. Raises CompileError for a transformers that has them not."""
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise CompileError(
            "language models are exported through transformers' attention interface: install transformers 5"
        ) from error
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
