"""Recipes for text: classification of texts and of tokens, and fill-mask. Batch and sequence are dynamic."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.source import Made, Source
from untorch.pipeline.settings import TOKENIZER
from untorch.runtime.errors import InvalidArgumentError

__all__ = [
    "MAX_BATCH",
    "text_front_end",
    "text_inputs",
    "write_fill_mask",
    "write_text_classification",
    "write_token_classification",
]

MAX_BATCH = 4096
_NAMES = ("input_ids", "attention_mask", "token_type_ids")
_UNLIMITED = 1 << 20  # a tokenizer without a limit says a far larger number


class TextLogits(nn.Module):
    """forward(input_ids, attention_mask, token_type_ids; each [batch, sequence] int64) → logits, float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The model's own logits."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        logits: torch.Tensor = self.model(**{name: value for name, value in given.items() if value is not None}).logits
        return logits.float()


def write_text_classification(source: Source) -> Made:
    """…ForSequenceClassification."""
    section = {"labels": source.labels(), "activation": source.activation()}
    return _made(source, section)


def write_token_classification(source: Source) -> Made:
    """…ForTokenClassification."""
    return _made(source, {"labels": source.labels(), "unknown_id": source.tokenizer.unk_token_id})


def write_fill_mask(source: Source) -> Made:
    """…ForMaskedLM."""
    mask = source.tokenizer.mask_token_id
    if mask is None:
        raise InvalidArgumentError(
            f"export_folder: {source.folder}: fill-mask needs a mask token, its tokenizer has none"
        )
    return _made(source, {"mask_id": mask, "mask_token": source.tokenizer.mask_token})


def _made(source: Source, section: dict[str, Any]) -> Made:
    if getattr(source.model.config, "is_encoder_decoder", False):
        raise CompileError(
            f"export_folder: {source.architecture} has an encoder and a decoder: write a script for untorch export "
            "SCRIPT:FUNCTION"
        )
    front, files = text_front_end(source, source.model)
    method = text_inputs(TextLogits(source.model), front)
    return Made({"forward": method}, {**section, **front}, files)


def text_front_end(source: Source, model: nn.Module) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The tokenizer's part of the section, and its file. model: whose ``forward`` takes the tokens."""
    tokenizer = source.tokenizer
    known = inspect.signature(type(model).forward).parameters
    names = [name for name in _NAMES if name in tokenizer.model_input_names and name in known]
    section = {
        "text_inputs": names,
        "max_length": _longest(source, model),
        "pad_id": tokenizer.pad_token_id or 0,
        "padding_side": tokenizer.padding_side,
        "clean_up_spaces": bool(tokenizer.clean_up_tokenization_spaces),
    }
    return section, {TOKENIZER: tokenizer.backend_tokenizer.to_str().encode()}


def _longest(source: Source, model: Any) -> int:
    """Tokens that the model reads at most: by its position embeddings, its tokenizer and sentence-transformers."""
    limits = [getattr(model.config, "max_position_embeddings", None), source.tokenizer.model_max_length]
    table = next((part for name, part in model.named_modules() if name.endswith("position_embeddings")), None)
    if limits[0] is not None and getattr(table, "padding_idx", None) is not None:
        limits[0] -= int(table.padding_idx) + 1  # type: ignore[union-attr]  # RoBERTa counts from there
    limits.append((source.read_json("sentence_bert_config.json") or {}).get("max_seq_length"))
    found = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < _UNLIMITED]
    return min(found, default=512)


def text_inputs(module: nn.Module, section: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    """A method with example tokens and the axes batch and sequence. length: the sequence is fixed to it."""
    from torch.export import Dim

    width = length or min(8, section["max_length"])
    axes: dict[int, Any] = {0: Dim("batch", min=1, max=MAX_BATCH)}
    if length is None:
        axes[1] = Dim("sequence", min=1, max=section["max_length"])
    values = {name: torch.ones(2, width, dtype=torch.int64) for name in section["text_inputs"]}
    values["input_ids"] = torch.arange(2 * width).reshape(2, width) % 7 + 2
    if "token_type_ids" in values:
        values["token_type_ids"] = torch.zeros_like(values["input_ids"])
    return {"model": module, "args": tuple(values.values()), "dynamic_shapes": tuple(dict(axes) for _ in values)}
