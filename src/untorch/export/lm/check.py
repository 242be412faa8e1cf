"""The build's own check of a step: a prompt as a whole gives the same logits as in chunks."""

from __future__ import annotations

import torch

from untorch.export.errors import CompileError
from untorch.export.lm.step import Step
from untorch.ops.kv_pages import LARGEST_CODE

__all__ = ["check_chunks"]

_TOKENS = 12
_CHUNKS = (5, 4, 1, 1, 1)
# Of the largest logit.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
# Rounding may change codes of keys and values, by no more than quantising them changes the logits: up to 0.45 in small
# models with experts. Other state changes them by more than 1.
_TOLERANCE_OF_CODES = 0.5


def check_chunks(step: Step, vocabulary: int) -> None:
    """Raises CompileError if the model keeps state from token to token that is not in the pages.

    Pages of codes are checked with a wide tolerance: check the same step with pages of the model's dtype first.
    """
    tokens = torch.arange(3, 3 + 7 * _TOKENS, 7) % vocabulary
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


def _logits(step: Step, tokens: torch.Tensor, chunks: tuple[int, ...]) -> torch.Tensor:
    block = step.block
    blocks = -(-len(tokens) // block)
    pool = torch.zeros(blocks, step.elements, dtype=step.dtype)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    # A sequence begins at zero, whatever was in its slot.
    states = (torch.ones(1, dtype=torch.int32), torch.full((2, step.state_elements), 3.0))
    found, begin = [], 0
    with torch.no_grad():
        for count in chunks:
            end = begin + count
            found.append(
                step(
                    tokens[begin:end], torch.arange(begin, end), torch.arange(count), table,
                    torch.tensor([0, count], dtype=torch.int32), torch.tensor([end], dtype=torch.int32),
                    torch.arange(begin, end), pool, *(states if step.state_elements else ()),
                )
            )  # fmt: skip
            begin = end
    return torch.cat(found)
