"""Recipe for text embeddings: pooling, dense layers and normalisation in the method, as modules.json says."""

from __future__ import annotations

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.sentence_transformers import Modules, read_modules, read_prompts
from untorch.export.recipes.source import Made, Source
from untorch.export.recipes.text import text_front_end, text_inputs

__all__ = ["write_text_embedding"]


class Embedding(nn.Module):
    """forward(tokens [batch, sequence]) → embeddings [batch, width], float32."""

    def __init__(self, model: nn.Module, modules: Modules, pads_left: bool) -> None:
        super().__init__()
        self.model, self.poolings, self.pads_left = model, modules.poolings, pads_left
        self.layers = nn.Sequential(*modules.layers)
        self.train(model.training)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of the last hidden states."""
        given = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **given).last_hidden_state.float()
        parts = [self._pool(hidden, attention_mask, name) for name in self.poolings]
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        found: torch.Tensor = self.layers(pooled)
        return found

    def _pool(self, hidden: torch.Tensor, attention_mask: torch.Tensor, name: str) -> torch.Tensor:
        mask = attention_mask[..., None].float()
        count = mask.sum(1).clamp(min=1e-9)
        if name in ("cls", "last"):
            if name == "last" and self.pads_left:
                return hidden[:, -1]
            if name == "cls" and not self.pads_left:
                return hidden[:, 0]
            # The first of a text that is padded on the left, or the last of one that is padded on the right.
            length = attention_mask.sum(1)
            place = hidden.shape[1] - length if self.pads_left else length - 1
            index = place[:, None, None].expand(-1, 1, hidden.shape[2])
            return hidden.gather(1, index)[:, 0]
        if name == "max":
            return hidden.masked_fill(mask == 0, -1e9).amax(1)
        if name == "weightedmean":  # a token's weight is its place, from 1 on
            places = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
            weights = mask * places
            return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return (hidden * mask).sum(1) / (count if name == "mean" else count.sqrt())


def write_text_embedding(source: Source) -> Made:
    """A base model, and what modules.json has behind it. Without one: the mean over the tokens, normalised."""
    modules = read_modules(source)
    front, files = text_front_end(source, source.model)
    if "attention_mask" not in front["text_inputs"]:
        raise CompileError(f"export_folder: {source.architecture} takes no attention_mask, which pooling needs")
    module = Embedding(source.model, modules, front["padding_side"] == "left")
    section = {"pooling": modules.poolings, "layers": modules.names, **read_prompts(source), **front}
    return Made({"forward": text_inputs(module, front)}, section, files)
