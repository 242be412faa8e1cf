"""Recipe for text embeddings: pooling and normalisation in the method, as sentence-transformers' modules.json says."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.source import Made, Source
from untorch.export.recipes.text import text_front_end, text_inputs

__all__ = ["write_text_embedding"]

# Flags of a Pooling module's config. Several at once are concatenated, in this order.
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}


class Embedding(nn.Module):
    """forward(tokens [batch, sequence]) → embeddings [batch, width], float32."""

    def __init__(self, model: nn.Module, poolings: list[str], normalize: bool, pads_left: bool) -> None:
        super().__init__()
        self.model, self.poolings, self.normalize, self.pads_left = model, poolings, normalize, pads_left
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
        return nn.functional.normalize(pooled, dim=1) if self.normalize else pooled

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
        return (hidden * mask).sum(1) / (count if name == "mean" else count.sqrt())


def write_text_embedding(source: Source) -> Made:
    """A base model. Without a modules.json: the mean over the tokens, normalised."""
    poolings, normalize = read_modules(source)
    front, files = text_front_end(source, source.model)
    if "attention_mask" not in front["text_inputs"]:
        raise CompileError(f"export_folder: {source.architecture} takes no attention_mask, which pooling needs")
    module = Embedding(source.model, poolings, normalize, front["padding_side"] == "left")
    return Made({"forward": text_inputs(module, front)}, {"pooling": poolings, "normalize": normalize, **front}, files)


def read_modules(source: Source) -> tuple[list[str], bool]:
    """Poolings, and whether embeddings are normalised. Raises CompileError for modules that are not served."""
    modules = source.read_json("modules.json")
    if modules is None:
        return ["mean"], True
    poolings, normalize = ["mean"], False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            config: dict[str, Any] = source.read_json(f"{module['path']}/config.json") or {}
            # Older configs have a flag each, newer ones a name.
            found = [name for flag, name in _POOLINGS.items() if config.get(flag)]
            named = config.get("pooling_mode")
            names = [named] if isinstance(named, str) else found
            poolings = [{"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}.get(one, one) for one in names]
            if not poolings or set(poolings) - set(_POOLINGS.values()):
                raise CompileError(
                    f"export_folder: {source.folder}: {module['path']}/config.json: expected a pooling of "
                    f"{', '.join(_POOLINGS.values())}, got {config!r:.200}"
                )
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CompileError(
                f"export_folder: {source.folder}: modules.json has the module {module.get('type')!r}: expected "
                "Transformer, Pooling and Normalize: write a script for untorch export SCRIPT:FUNCTION"
            )
    return poolings, normalize
