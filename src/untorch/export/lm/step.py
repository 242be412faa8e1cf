"""A causal language model as one step over pages and states: tokens of many sequences in, logits of some rows out."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.lm.attention import NAME, Context, Recorder, current_step, register_interfaces
from untorch.export.lm.groups import place_layers, pool_elements
from untorch.export.lm.latent import Latents, latent_layers, latent_projections
from untorch.export.lm.refusal import refusals
from untorch.export.lm.states import StateRecorder, StateTables, state_operators

__all__ = ["Step"]


class Step(nn.Module):
    """forward(tokens, positions, rows, block_table, cu_seqlens_q, seqlens_k, slot_mapping, pool) → logits [rows, V].

    tokens, positions, slot_mapping [T], int64; rows [R], int64: the tokens whose logits are wanted; the tables int32,
    as ``untorch::paged_attention`` has them; pool [blocks, elements], written in place. ``width`` is V. With several
    ``groups`` of layers, block_table and slot_mapping are tuples, one of each.

    A model with recurrent layers, whose ``state_elements`` are not 0, takes two more: state_slots [sequences], int32,
    and states [slots, state_elements], float32, written in place, as ops/states.py has them.

    block: Positions a block of the group of layers that needs most elements.
    latent: Whether pages keep the latents of multi-head latent attention, instead of each head's keys and values.
    max_positions: The longest sequence: windows that are as long are none. grouped: False: all layers have one table.
    position_rows: 3 for multimodal rotary positions (M-RoPE: time, height, width); positions are [3, T] then.
    """

    def __init__(
        self,
        model: nn.Module,
        block: int = 16,
        latent: bool = True,
        max_positions: int | None = None,
        grouped: bool = True,
        position_rows: int = 1,
    ) -> None:
        super().__init__()
        register_interfaces()
        self.model, self.block, self.position_rows = model.eval(), block, position_rows
        config: Any = model.config
        self.model.set_attn_implementation(NAME)  # type: ignore[operator]
        for part in (config, config.get_text_config()):
            part.use_cache = False
        self._keeps_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        recorder, states = Recorder(), StateRecorder()
        layers = latent_layers(model) if latent else {}
        with (
            torch.no_grad(), refusals(model, self.architecture, "over pages"), current_step(recorder),
            state_operators(model, states), latent_projections(layers, recorder.latents),
        ):  # fmt: skip
            recorder.begin(None)
            self.width = self._logits(torch.tensor([1, 2, 3]), self.positions(0, 3), torch.tensor([0, 2])).shape[-1]
        if not recorder.layers:
            only = "all of its layers are recurrent: " if states.layers else ""
            raise CompileError(
                f"{self.architecture}: {only}it does not call transformers' attention interface, so its cache cannot "
                "be paged"
            )
        self._placing = max_positions, grouped
        self.layers, self.groups = place_layers(recorder.layers, block, *self._placing)
        self.state_layers, self.state_elements = states.layers, states.elements
        self.absorbed = tuple(name for name, module in layers.items() if module in recorder.latents.absorbed)
        # What expands latents is multiplied head by head, and is called by nobody: it is not quantised.
        self.weights_read = tuple(f"model.{name}.kv_b_proj" for name in self.absorbed)

    def quantize_pages(self, dtype: torch.dtype) -> None:
        """Keys and values are int8 or float8_e4m3fn codes from now on, with a scale for each token and head."""
        layers = [replace(layer, dtype=dtype) for layer in self.layers]
        self.layers, self.groups = place_layers(layers, self.block, *self._placing)

    @property
    def architecture(self) -> str:
        """The model's name."""
        return str(getattr(self.model, "architecture", type(self.model).__name__))

    @property
    def elements(self) -> int:
        """Of a block of the pool."""
        return pool_elements(self.layers)

    def share(self, step: Step) -> None:
        """Takes another step's modules and settings, in the place of its own: packages store their weights once."""
        nn.Module.__init__(self)
        vars(self).update({name: value for name, value in vars(step).items() if name != "_modules"})
        self._modules = dict(step._modules)

    def positions(self, begin: int, end: int) -> torch.Tensor:
        """Of the tokens of a text, as the step takes them."""
        row = torch.arange(begin, end)
        return row if self.position_rows == 1 else row.repeat(self.position_rows, 1)

    @property
    def dtype(self) -> torch.dtype:
        """Of the pool."""
        return self.layers[0].dtype

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        block_table: torch.Tensor | tuple[torch.Tensor, ...],
        cu_seqlens_q: torch.Tensor,
        seqlens_k: torch.Tensor,
        slot_mapping: torch.Tensor | tuple[torch.Tensor, ...],
        pool: torch.Tensor,
        state_slots: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits, float32."""
        block_tables = (block_table,) if isinstance(block_table, torch.Tensor) else block_table
        slot_mappings = (slot_mapping,) if isinstance(slot_mapping, torch.Tensor) else slot_mapping
        absorbed = {name: self.model.get_submodule(name) for name in self.absorbed}
        recorder, tables = Recorder(known=self.layers, latents=Latents(set(absorbed.values()))), None
        if states is not None and state_slots is not None:
            tables = StateTables(states, state_slots, cu_seqlens_q, seqlens_k)
        with (
            current_step(recorder), state_operators(self.model, StateRecorder(self.state_layers, tables)),
            latent_projections(absorbed, recorder.latents),
        ):  # fmt: skip
            recorder.begin(Context(pool, block_tables, cu_seqlens_q, seqlens_k, slot_mappings))
            return self._logits(tokens, positions, rows)

    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        head = model.get_output_embeddings()
        # Of a batch of one: [1, T], or [3, 1, T].
        given: dict[str, Any] = {**self._inputs(tokens), "position_ids": positions.unsqueeze(-2)}
        hook = None
        if self._keeps_rows:
            given["logits_to_keep"] = rows
        else:
            hook = head.register_forward_pre_hook(lambda module, args: (args[0][:, rows], *args[1:]))
        try:
            logits: torch.Tensor = model(**given, use_cache=False, return_dict=True).logits[0]
        finally:
            if hook is not None:
                hook.remove()
        return logits.float()

    def _inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": tokens[None]}
