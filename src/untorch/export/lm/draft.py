"""A draft model beside a language model in one package: what has to fit, and its methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.lm import choose
from untorch.export.lm.check import check_chunks, check_model
from untorch.export.lm.rotary import fix_rotary_embeddings
from untorch.export.lm.source import load_model, read_task, read_tokenizer
from untorch.export.lm.step import Step
from untorch.export.lm.step_methods import keeps_latents, pages_section, step_method
from untorch.export.lm.text import take_text_model
from untorch.ops.kv_pages import KV_DTYPES
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["Draft", "draft_methods", "read_draft"]


@dataclass(frozen=True)
class Draft:
    """A draft model, and the token ids below which it knows all."""

    model: nn.Module
    vocabulary: int


def read_draft(given: Any, dtype: torch.dtype | None, settings: dict[str, Any], tokenizer: bytes | None) -> Draft:
    """For a model with these settings and tokenizer.json. Raises InvalidArgumentError if it does not fit."""
    whole, folder = load_model(given, None if isinstance(given, nn.Module) else dtype, "generate", "draft")
    read_task(whole, "generate")
    model = take_text_model(whole, "generate", None, False)
    name = getattr(model, "architecture", type(model).__name__)
    if elsewhere := {str(parameter.device) for parameter in model.parameters()} - {"cpu"}:
        raise InvalidArgumentError(
            f"causal_lm: draft: expected its parameters on the CPU, got {', '.join(sorted(elsewhere))}: use draft.cpu()"
        )
    config: Any = model.config
    text = config.get_text_config()
    vocabulary, expected = int(text.vocab_size), int(settings["vocabulary"])
    own = read_tokenizer(None, folder).tokenizer
    if own is not None and tokenizer is not None:
        if _tokens(own) != _tokens(tokenizer):
            raise InvalidArgumentError(
                f"causal_lm: draft: expected the model's tokenizer, got another one with {name}: its tokens would mean "
                "something else"
            )
    elif vocabulary != expected:
        raise InvalidArgumentError(
            f"causal_lm: draft: expected the model's vocabulary of {expected}, got {vocabulary} of {name}: sizes may "
            "differ if both folders have the same tokenizer"
        )
    longest, positions = getattr(text, "max_position_embeddings", None), int(settings["max_positions"])
    if longest is not None and longest < positions:
        raise InvalidArgumentError(
            f"causal_lm: draft: expected a model for at least {positions} positions, got {longest} of {name}: limit "
            f"the package with max_positions={longest}"
        )
    return Draft(model, vocabulary)


def draft_methods(
    draft: Draft,
    settings: dict[str, Any],
    counts: Sequence[int],
    block_size: int,
    kv_dtype: str | None,
    device: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Methods as the model has them, with weights and pages of their own, and what the manifest says of them.

    Raises CompileError if the draft model cannot be paged or has recurrent layers.
    """
    model = draft.model
    weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    fix_rotary_embeddings(model, settings["max_positions"])
    step = Step(model, block_size, keeps_latents(model, device, weights), grouped=False)
    if step.state_elements:
        raise CompileError(
            f"causal_lm: draft: {step.architecture} has recurrent layers, whose states cannot be taken back when a "
            "token is rejected"
        )
    check_chunks(step, draft.vocabulary)
    check_model(step, draft.vocabulary, settings["max_positions"])
    if kv_dtype is not None:
        step.quantize_pages(KV_DTYPES[kv_dtype])
        check_chunks(step, draft.vocabulary)
    methods = {f"draft_step_{count}": step_method(step, count) for count in counts}
    section: dict[str, Any] = {
        "architecture": step.architecture,
        "vocabulary": draft.vocabulary,
        **pages_section(step),
        "methods": [{"name": f"draft_step_{count}", "tokens": count} for count in counts],
    }
    if str(device) != "cpu":
        section["choose"] = f"draft_{choose.NAME}"
        methods[section["choose"]] = choose.choose_method(min(draft.vocabulary, settings["vocabulary"]), step.width)
    return methods, section


def _tokens(tokenizer: bytes) -> dict[str, int]:
    """The ids of a tokenizer.json."""
    document = json.loads(tokenizer)
    given = document.get("model", {}).get("vocab", {})
    found = dict(given) if isinstance(given, dict) else {str(item[0]): i for i, item in enumerate(given)}
    return {**found, **{token["content"]: token["id"] for token in document.get("added_tokens", ())}}
