"""What the engine gives back: whole results, and chunks of them as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from untorch.llm.sampler import TokenLogprobs

__all__ = ["Chunk", "Completion", "FinishReason", "RequestOutput", "Usage"]

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True)
class Usage:
    """Tokens. cached_tokens: of the prompt, those that the prefix cache had.

    draft_tokens: that were proposed by speculative decoding. accepted_tokens: of those, the ones in the output.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """One sample. stop_reason: the stop string or token id that ended it; None for the model's own stop tokens."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Chunk:
    """What one step added to one sample. finish_reason, stop_reason and usage: of its last chunk."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    usage: Usage | None = None

    def joined(self, other: Chunk) -> Chunk:
        """This one and the one behind it."""
        logprobs = self.logprobs
        if logprobs is not None and other.logprobs is not None:
            logprobs = logprobs + other.logprobs
        return Chunk(
            self.index, self.token_ids + other.token_ids, self.text + other.text, other.finish_reason,
            other.stop_reason, logprobs, other.usage,
        )  # fmt: skip


@dataclass(frozen=True)
class RequestOutput:
    """A request's n completions, the best first with best_of, and properties of the first one.

    prompt_logprobs: for each token of the prompt; None for the first one. error: what made the request fail.
    """

    prompt_token_ids: list[int]
    completions: list[Completion]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first completion."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Of the first completion."""
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Of the first completion."""
        return self.completions[0].logprobs
