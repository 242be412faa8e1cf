"""A sequence: the tokens of one completion, and where the scheduler has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from untorch.llm.blocks import BlockTable
from untorch.llm.prompt import Embeddings
from untorch.llm.slots import NO_SLOT

__all__ = ["Sequence"]


@dataclass(eq=False)
class Sequence:
    """tokens: of prompt and output. computed: those at the beginning whose keys and values are in the pages.

    priority: the smaller, the earlier. order: of arrival, and of the samples of one prompt. samples: sequences that it
    becomes when its prompt is computed. shares_prefix: its prompt may come from the prefix cache. embeddings: of its
    prompt, in the place of tokens. slot: of the state pool, while it runs. borders: where its prompt's steps end, as a
    snapshot of its state is taken there. wanted: tokens behind the last one that the
    next step should verify. draft: those tokens. draft_computed: as computed, by the draft model.
    lora: the adapter that its tokens go through; salt: what its keys and values depend on beside the tokens.
    """

    tokens: list[int]
    priority: int = 0
    order: tuple[int, int] = (0, 0)
    samples: int = 1
    shares_prefix: bool = True
    salt: bytes = b""
    lora: Any = None
    embeddings: Embeddings | None = None
    owner: Any = None
    prompt_length: int = -1
    computed: int = 0
    cached: int = 0  # of the prompt, at its first admission
    preemptions: int = 0
    table: BlockTable | None = field(default=None, repr=False)
    slot: int = NO_SLOT
    borders: tuple[int, ...] = ()
    wanted: int = 0
    draft: list[int] = field(default_factory=list)
    draft_computed: int = 0

    def __post_init__(self) -> None:
        if self.prompt_length < 0:
            self.prompt_length = len(self.tokens)

    @property
    def rank(self) -> tuple[int, tuple[int, int]]:
        """Smaller ones come first and are preempted last."""
        return self.priority, self.order

    @property
    def remaining(self) -> int:
        """Tokens to compute."""
        return len(self.tokens) - self.computed
