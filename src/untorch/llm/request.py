"""A request's state in the engine."""

from __future__ import annotations

from typing import Any

from untorch.llm.detokenizer import StopStrings
from untorch.llm.handle import Handle
from untorch.llm.outputs import Chunk, Completion, FinishReason, RequestOutput, Usage
from untorch.llm.params import SamplingParams
from untorch.llm.sampler import SampledToken, SamplerState, TokenLogprobs
from untorch.llm.sequence import Sequence
from untorch.llm.tokenizer import Tokenizer

__all__ = ["Request", "Sample"]


class Sample:
    """One completion while it grows. ending_ids: tokens that end it. has_stop_strings: its text may end it, too."""

    def __init__(self, request: Request, sequence: Sequence, state: SamplerState) -> None:
        self.request, self.sequence, self.state = request, sequence, state
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self.draft_tokens = self.accepted_tokens = 0
        self.speculation: object = None  # the speculator's
        params, tokenizer = request.params, request.tokenizer
        self.ending_ids = (*(() if params.ignore_eos else request.stop_ids), *params.stop_token_ids)
        self.has_stop_strings = bool(params.stop)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(request.prompt, params.skip_special_tokens)

    @property
    def token_ids(self) -> list[int]:
        """Of the output."""
        return self.sequence.tokens[self.sequence.prompt_length :]

    def tokens_left(self, max_positions: int) -> int:
        """How many it may have yet."""
        left = max_positions - len(self.sequence.tokens)
        most = self.request.params.max_tokens
        return left if most is None else min(left, most - self.state.generated)

    def extend(self, token: int) -> Chunk | None:
        """Takes a token that is chosen on the device and cannot be the last. None: nobody wants chunks."""
        self.sequence.tokens.append(token)
        self.state.generated += 1
        text = "" if self._detokenizer is None else self._detokenizer.append(token)
        self.text += text
        return Chunk(self.state.index, [token], text) if self.request.streams else None

    def append(self, sampled: SampledToken, max_positions: int) -> Chunk:
        """Takes the token, and decides whether it is the last."""
        token, params = sampled.token, self.request.params
        self.sequence.tokens.append(token)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        self.state.append(token)
        text = self._stop(token)
        if self.finish_reason is None and (
            len(self.sequence.tokens) >= max_positions or self.state.generated == params.max_tokens
        ):
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._rest()
        return self._chunk([token], text)

    def finish(self, reason: FinishReason) -> Chunk:
        """Ends it for a reason from outside."""
        self.finish_reason = reason
        return self._chunk([], self._rest())

    def completion(self) -> Completion:
        """Once it is finished."""
        assert self.finish_reason is not None
        logprobs = self.logprobs if self.request.params.logprobs is not None else None
        return Completion(
            self.state.index, self.token_ids, self.text, self.finish_reason, self.stop_reason, logprobs
        )  # fmt: skip

    def _stop(self, token: int) -> str:
        params = self.request.params
        own = token in self.request.stop_ids and not params.ignore_eos
        if own or token in params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", None if own else token
            return ""
        text = "" if self._detokenizer is None else self._detokenizer.append(token)
        if self.state.generated > params.min_tokens:
            text, stop = self._stops.append(text)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
        if self.state.matcher is not None and self.finish_reason is None and self.state.matcher.done:
            self.finish_reason = "stop"
        return text

    def _rest(self) -> str:
        """Text that was held back; none behind a stop string."""
        if isinstance(self.stop_reason, str):
            return ""
        text = "" if self._detokenizer is None else self._detokenizer.finish()
        text, stop = self._stops.append(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            return text
        return text + self._stops.finish()

    def _chunk(self, tokens: list[int], text: str) -> Chunk:
        self.text += text
        params = self.request.params
        logprobs = self.logprobs[-len(tokens) :] if tokens and params.logprobs is not None else None
        usage = None if self.finish_reason is None else self.request.usage([self])
        return Chunk(
            self.state.index, tokens, text, self.finish_reason, self.stop_reason, logprobs, usage
        )  # fmt: skip


class Request:
    """All samples of one prompt. deadline: on the clock of time.monotonic(). streams: chunks are wanted."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        stop_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        deadline: float | None,
        handle: Handle[Any],
        streams: bool = True,
    ) -> None:
        self.prompt, self.params, self.stop_ids, self.tokenizer = prompt, params, stop_ids, tokenizer
        self.deadline, self.handle, self.streams = deadline, handle, streams
        self.samples: list[Sample] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.cancelled = False

    @property
    def live(self) -> list[Sample]:
        """Samples that go on."""
        return [sample for sample in self.samples if sample.finish_reason is None]

    def usage(self, samples: list[Sample]) -> Usage:
        """With the tokens of these samples."""
        cached = self.samples[0].sequence.cached if self.samples else 0
        return Usage(
            len(self.prompt), sum(len(sample.token_ids) for sample in samples), cached,
            sum(sample.draft_tokens for sample in samples), sum(sample.accepted_tokens for sample in samples),
        )  # fmt: skip

    def output(self, error: Exception | None = None) -> RequestOutput:
        """Once all samples are finished."""
        samples = self.samples
        if self.params.samples > self.params.n:
            samples = sorted(samples, key=_mean_logprob, reverse=True)[: self.params.n]
        completions = [sample.completion() for sample in samples]
        if not completions:  # refused
            completions = [Completion(0, [], "", "error")]
        return RequestOutput(self.prompt, completions, self.usage(self.samples), self.prompt_logprobs, error)


def _mean_logprob(sample: Sample) -> float:
    values = [item.logprob for item in sample.logprobs]
    return sum(values) / len(values) if values else float("-inf")
