"""The text model of a larger model: its decoder, and the layer that its hidden states go through."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError

__all__ = ["TextModel", "check_embeddings", "check_outputs", "position_rows", "take_text_model"]

_HEADS = {"generate": "lm_head", "classify": "score", "embed": "dense"}
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}  # of the largest output


@dataclass
class _Output:
    logits: torch.Tensor


class TextModel(nn.Module):
    """A decoder and a head, with the interface that ``Step`` has for causal language models.

    ``logits`` of its output are the head's, [1, rows, width]: logits, scores, or hidden states without a head.
    architecture: the name of the model that it was taken from.
    """

    def __init__(self, decoder: nn.Module, head: nn.Module | None, task: str, source: nn.Module) -> None:
        super().__init__()
        self.model, self._head = decoder, _HEADS[task]
        self.add_module(self._head, head)
        self.config: Any = decoder.config
        self.architecture = type(source).__name__
        self.generation_config = getattr(source, "generation_config", None)
        self.training = source.training

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
        **features: Any,
    ) -> _Output:
        """logits_to_keep: the positions that go through the head; None: all. features: of images, for the decoder."""
        given = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        hidden = self.model(
            **given, position_ids=position_ids, use_cache=use_cache, return_dict=return_dict, **features
        ).last_hidden_state  # fmt: skip
        if logits_to_keep is not None:
            hidden = hidden[:, logits_to_keep]
        head = getattr(self, self._head)
        return _Output(hidden if head is None else head(hidden))

    def set_attn_implementation(self, name: str) -> None:
        """Of the decoder alone."""
        self.model.set_attn_implementation(name)  # type: ignore[operator]

    def get_input_embeddings(self) -> Any:
        """The decoder's."""
        return self.model.get_input_embeddings()  # type: ignore[operator]

    def get_output_embeddings(self) -> Any:
        """The head over the vocabulary; None if there is none."""
        return getattr(self, "lm_head", None)


def take_text_model(model: Any, task: str, dense: nn.Module | None, inputs_embeds: bool) -> Any:
    """The model itself if it is a causal language model that generates, else its decoder with the task's head.

    dense: what hidden states go through, for "embed". Raises CompileError for what cannot be taken out, and for inputs
    that embeddings alone do not replace.
    """
    is_multimodal = model.config.get_text_config(decoder=True) is not model.config
    if inputs_embeds:
        _check_inputs(model, is_multimodal)
    if task == "generate" and not is_multimodal:
        return model
    decoder = _decoder(model) if is_multimodal else model
    own = decoder is not model and getattr(decoder, "get_output_embeddings", lambda: None)() is not None
    if task == "generate":  # some wrap a …ForCausalLM, others have the head themselves
        return decoder if own else TextModel(decoder, model.get_output_embeddings(), task, model)
    base = decoder.base_model if own or decoder is model else decoder
    return TextModel(base, model.score if task == "classify" else dense, task, model)


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(decoder, nn.Module) or decoder is model or not hasattr(decoder, "config"):
        raise CompileError(
            f"causal_lm: model: {type(model).__name__} does not tell its text model by get_decoder(): pass the text "
            "model itself"
        )
    return decoder


def _check_inputs(model: Any, is_multimodal: bool) -> None:
    """Raises CompileError if embeddings do not say all that a position has."""
    name, text = type(model).__name__, model.config.get_text_config(decoder=True)
    if getattr(text, "hidden_size_per_layer_input", None):
        raise CompileError(
            f"causal_lm: inputs_embeds: {name} has embeddings of the tokens in each layer, which its inputs' "
            "embeddings do not replace"
        )
    types = {"token_type_ids", "mm_token_type_ids"} if is_multimodal else set()
    if position_rows(model) > 1:
        types.discard("mm_token_type_ids")  # it makes the positions
    if found := sorted(types & inspect.signature(type(model.base_model).forward).parameters.keys()):
        raise CompileError(
            f"causal_lm: inputs_embeds: {name} reads {found[0]}, by which the tokens of an image see each other in "
            "both directions: attention over pages is causal"
        )


def position_rows(model: Any) -> int:
    """3: its rotary positions are time, height and width (M-RoPE); else 1. Raises CompileError for other numbers."""
    text = model.config.get_text_config(decoder=True)
    section = (getattr(text, "rope_parameters", None) or {}).get("mrope_section")
    if section is None and not hasattr(model.base_model, "get_rope_index"):
        return 1
    if section is not None and len(section) != 3:
        raise CompileError(
            f"causal_lm: inputs_embeds: {type(model).__name__} has positions of {len(section)} dimensions: expected "
            "one, or time, height and width"
        )
    return 3


def check_outputs(model: Any, text: nn.Module, task: str) -> None:
    """A text model that was taken out gives what the whole model gives for text. Raises CompileError."""
    if not isinstance(text, TextModel) or task == "embed":
        return
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    tokens = torch.tensor([[token for token in (1, 2, 3, 4, 5) if token != pad]])
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected = model(input_ids=tokens, use_cache=False, return_dict=True).logits
            found = text(input_ids=tokens).logits
    finally:
        model.train(was_training)
    found = found[:, -1] if task == "classify" else found
    if (problem := _difference(expected, found)) is not None:
        raise CompileError(
            f"causal_lm: model: {text.architecture}: its outputs for text differ by {problem} from those of its "
            f"decoder and {_HEADS[task]}: pass a model whose outputs are its head's"
        )


def check_embeddings(text: Any) -> None:
    """Tokens give what their embeddings as inputs give. Raises CompileError: the model reads the tokens elsewhere."""
    tokens = torch.tensor([[1, 2, 3, 4]])
    positions = torch.arange(4)[None]
    was_training = text.training
    text.eval()
    try:
        with torch.no_grad():
            given = {"position_ids": positions, "use_cache": False, "return_dict": True}
            expected = text(input_ids=tokens, **given).logits
            embeddings = text.get_input_embeddings()(tokens)
            found = text(inputs_embeds=embeddings, **given).logits
    finally:
        text.train(was_training)
    if (problem := _difference(expected, found)) is not None:
        name = getattr(text, "architecture", type(text).__name__)
        raise CompileError(
            f"causal_lm: inputs_embeds: {name} gives outputs that differ by {problem} for tokens and for their "
            "embeddings: it reads the tokens in other places too, such as per-layer embeddings"
        )


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    if expected.shape != found.shape:
        return f"their shapes, {list(expected.shape)} and {list(found.shape)}"
    difference, largest = (expected.float() - found.float()).abs().max().item(), expected.float().abs().max().item()
    tolerance = _TOLERANCE.get(expected.dtype, 1e-3) * max(largest, 1e-6)
    return None if difference <= tolerance else f"{difference:.3g}"
