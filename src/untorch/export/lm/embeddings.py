"""A step whose tokens may have embeddings of the caller: an image's or a sound's."""

from __future__ import annotations

from typing import Any

import torch

from untorch.export.lm.step import Step

__all__ = ["EmbeddingStep", "embedding_method"]


class EmbeddingStep(Step):
    """forward(…as Step…, embeddings [T, hidden] float32, mask [T] bool): where the mask is set, in the tokens' place.

    Of a model with recurrent layers, state_slots and states come last.

    It has the modules of another step, so that packages store their weights once. levels: features that are added to
    the hidden states behind each of as many first layers (DeepStack); a row of embeddings has them behind its own.
    """

    def __init__(self, step: Step, levels: int = 0) -> None:
        self.share(step)
        self.levels = levels
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        block_table: torch.Tensor | tuple[torch.Tensor, ...],
        cu_seqlens_q: torch.Tensor,
        seqlens_k: torch.Tensor,
        slot_mapping: torch.Tensor | tuple[torch.Tensor, ...],
        pool: torch.Tensor,
        embeddings: torch.Tensor,
        mask: torch.Tensor,
        state_slots: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The outputs, float32."""
        self._given = embeddings, mask
        try:
            return super().forward(
                tokens, positions, rows, block_table, cu_seqlens_q, seqlens_k, slot_mapping, pool, state_slots, states
            )  # fmt: skip
        finally:
            self._given = None

    def _inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        model: Any = self.model
        assert self._given is not None
        embeddings, mask = self._given
        known = model.get_input_embeddings()(tokens)
        own, *features = embeddings.to(known.dtype).chunk(self.levels + 1, dim=-1)
        given: dict[str, Any] = {"inputs_embeds": torch.where(mask[:, None], own, known)[None]}
        if features:
            # The mask selects rows of the batch's one sequence; so does this index, for all tokens, and its result has
            # a known size. Features of tokens without embeddings are 0.
            given["visual_pos_masks"] = torch.zeros(1, dtype=torch.int64, device=tokens.device)
            given["deepstack_visual_embeds"] = [torch.where(mask[:, None], part, 0) for part in features]
        return given


def embedding_method(step: EmbeddingStep, method: dict[str, Any], hidden: int) -> dict[str, Any]:
    """The method of a step over tokens, with the two inputs more, behind the pool. hidden: width of embeddings."""
    tokens = len(method["args"][0])
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(tokens, hidden, generator=generator)
    args, shapes = method["args"], method["dynamic_shapes"]
    return {
        "model": step, "args": (*args[:8], embeddings, torch.arange(tokens) % 2 == 0, *args[8:]),
        "dynamic_shapes": (*shapes[:8], shapes[0], shapes[0], *shapes[8:]),
    }  # fmt: skip
