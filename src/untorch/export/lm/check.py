"""The build's own check of a step: in chunks over pages it gives the logits of the model's own forward."""

from __future__ import annotations

from typing import Any

import torch

from untorch.export.errors import CompileError
from untorch.export.lm.attention import NAME
from untorch.export.lm.refusal import refusals
from untorch.export.lm.step import Step
from untorch.export.lm.step_methods import block_tables
from untorch.ops.kv_pages import LARGEST_CODE

__all__ = ["check_chunks", "check_model", "tolerance_of_models"]

_TOKENS = 12
_CHUNKS = (5, 4, 1, 1, 1)
# Of the largest logit.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
# Rounding may change codes of keys and values, by no more than quantising them changes the logits: up to 0.45 in small
# models with experts. Other state changes them by more than 1.
_TOLERANCE_OF_CODES = 0.5

# Beyond the reach of most layers that summarise tokens or choose among them (DeepSeek-V4 compresses 128).
_LONG = 300
_LAST = 8
# Of tokens and parameters: 300 tokens up to 7 billion parameters, which take a minute on two cores. Larger models are
# checked at a smaller length, so that the check stays shorter than the compilation.
_MOST_PRODUCTS = 2e12
# In half types a row may also go to another expert, so the rows' median counts. Another mask, or another value, changes
# all of them by much more.
_TOLERANCE_OF_MODELS = {torch.float32: 1e-3, torch.bfloat16: 2e-1, torch.float16: 5e-2}


def check_chunks(step: Step, vocabulary: int) -> None:
    """Raises CompileError if the model keeps state from token to token that is not in the pages.

    Pages of codes are checked with a wide tolerance: check the same step with pages of the model's dtype first.
    """
    tokens = _tokens(_TOKENS, vocabulary)
    whole, chunked = _logits(step, tokens, (_TOKENS,)), _logits(step, tokens, _CHUNKS)
    difference, largest = (whole - chunked).abs().max().item(), whole.abs().max().item()
    relative = _TOLERANCE_OF_CODES if step.dtype in LARGEST_CODE else _TOLERANCE.get(step.dtype, 1e-3)
    tolerance = relative * max(largest, 1e-6)
    if not difference <= tolerance:
        raise CompileError(
            f"{step.architecture}: {_TOKENS} tokens as a whole and in chunks of "
            f"{', '.join(map(str, _CHUNKS))} differ by {difference:.3g} in their logits, expected at most "
            f"{tolerance:.3g}: this family keeps state that pages cannot hold, by functions that are not known "
            "(linear attention, convolutions, state spaces)"
        )


def check_model(step: Step, vocabulary: int, max_positions: int, long: bool | None = None) -> None:
    """Raises CompileError if the step's logits are not those of the model's own forward, with its own attention.

    At two lengths: a short one, and one that layers with an index or with compressed keys treat in another way; at one
    of them where ``long`` says which.
    """
    parameters = sum(parameter.numel() for parameter in step.model.parameters())
    shorter, longer = min(_TOKENS, max_positions), min(_LONG, max_positions, int(_MOST_PRODUCTS / max(parameters, 1)))
    for count in ([] if long is True else [shorter]) + ([] if long is False else [longer]):
        if count <= _LAST:
            continue
        tokens = _tokens(count, vocabulary)
        expected = _own_logits(step, tokens)
        found = _logits(step, tokens, (count - _LAST, _LAST))[-_LAST:]
        differences = (found - expected).abs().amax(1)
        difference = (differences.max() if step.dtype == torch.float32 else differences.median()).item()
        tolerance = tolerance_of_models(step.dtype) * max(expected.abs().max().item(), 1e-6)
        if not difference <= tolerance:
            raise CompileError(
                f"{step.architecture}: the logits of {count} tokens over pages differ by {difference:.3g} from those "
                f"of the model's own forward, expected at most {tolerance:.3g}: its layers do more than causal "
                "attention to the keys and values that they give to transformers' attention interface"
            )


def tolerance_of_models(dtype: torch.dtype) -> float:
    """Of the largest logit, for a step with pages of that dtype."""
    return _TOLERANCE_OF_MODELS.get(dtype, 1e-3)


def _tokens(count: int, vocabulary: int) -> torch.Tensor:
    return torch.arange(3, 3 + 7 * count, 7) % vocabulary


def _own_logits(step: Step, tokens: torch.Tensor) -> torch.Tensor:
    """Of the last rows, by the attention that transformers calls eager."""
    model: Any = step.model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), refusals(model, step.architecture, "in the model's own forward"):
            logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False, return_dict=True).logits
    finally:
        model.set_attn_implementation(NAME)
    return logits[0, -_LAST:].float()


def _logits(step: Step, tokens: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
    tables, slots, blocks = block_tables(step, [len(tokens)])
    pool = torch.zeros(blocks, step.elements, dtype=step.dtype)
    # A sequence begins at zero, whatever was in its slot.
    states = (torch.ones(1, dtype=torch.int32), torch.full((2, step.state_elements), 3.0))
    found, begin = [], 0
    with torch.no_grad(), refusals(step.model, step.architecture, "over pages"):
        for count in chunks:
            end = begin + count
            found.append(
                step(
                    tokens[begin:end], step.positions(begin, end), torch.arange(count), tables,
                    torch.tensor([0, count], dtype=torch.int32), torch.tensor([end], dtype=torch.int32),
                    slots[begin:end] if isinstance(slots, torch.Tensor) else tuple(own[begin:end] for own in slots),
                    pool, *(states if step.state_elements else ()),
                )
            )  # fmt: skip
            begin = end
    return torch.cat(found)
