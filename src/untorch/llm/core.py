"""The engine's thread: takes requests, runs one step after the other, and gives their tokens out.

Where tokens are chosen on the GPU, a step that decodes is enqueued before the tokens of the step before it are here: it
reads them there. So the GPU does not wait for the host. A sequence that turns out to have ended has been computed one
token further, which is dropped.

Sequences that speculate are waited for: what is proposed next depends on their tokens. A step is enqueued ahead only if
none of its sequences expects a draft.

Consumers are woken when the engine's thread is about to wait: for the device, once the next step is enqueued, for a
step on the CPU, or for requests. While it prepares a step it would share the interpreter with them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.llm.decode_batch import DecodeBatch
from untorch.llm.handle import Wake
from untorch.llm.logits import Choice, Logits
from untorch.llm.outputs import Chunk, FinishReason
from untorch.llm.request import Request, Sample
from untorch.llm.runner import Runner
from untorch.llm.sampler import SampledToken, Sampler, SamplerState, token_logprobs
from untorch.llm.scheduler import Plan, Scheduler
from untorch.llm.settings import Settings
from untorch.llm.slots import NO_SLOT
from untorch.llm.speculation import Speculator
from untorch.runtime.errors import ClosedError, ModelError, UntorchError
from untorch.runtime.log import INFO, log

__all__ = ["Core"]


@dataclass(frozen=True)
class _Flight:
    """A step that was enqueued: each of its sequences gets a token, which is being chosen, or will be from ``logits``
    once the tokens before it are known.
    """

    plan: Plan
    batch: DecodeBatch
    logits: Logits
    choice: Choice | None


@dataclass(eq=False)
class _Draft:
    """A sample's part of a step with drafts: its rows of the logits from ``row`` on, and the tokens to verify."""

    sample: Sample
    row: int
    tokens: list[int]
    accepted: int = 0
    chunk: Chunk | None = None


class Core:
    """add, cancel, start and stop are for other threads; everything else is the engine thread's own."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, settings: Settings, speculator: Speculator | None = None
    ) -> None:  # fmt: skip
        self.runner, self.scheduler, self.settings, self.speculator = runner, scheduler, settings, speculator
        self.sampler = Sampler(settings.vocabulary)
        self.steps = self.requests = self.finished = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.step_seconds = self.model_seconds = 0.0
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._cancelled: list[Request] = []
        self._closed = False
        self._last = math.inf  # when closed: requests that run then are cancelled
        self._live: dict[Request, None] = {}
        self._next_deadline = math.inf  # of the live requests, or of one that has ended
        self._flight: _Flight | None = None
        self._enqueues = False  # the runner: its steps run on a device, while the host goes on
        self._wake = Wake()
        self._thread = threading.Thread(target=self._loop, name="untorch-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, *requests: Request) -> None:
        """New requests, which the same step sees. Raises ClosedError."""
        with self._changed:
            if self._closed:
                raise ClosedError("submit: the engine is closed")
            self._inbox.extend(requests)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Before the next step."""
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify_all()

    def stop(self, drain: float = 0.0) -> None:
        """Take no more requests, cancel those that still run after ``drain`` seconds, and wait for the thread."""
        with self._changed:
            self._closed = True
            self._last = min(self._last, time.monotonic() + drain)
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _loop(self) -> None:
        while self._take_in():
            begin = time.perf_counter()
            try:
                self._expire()
                self._step()
            except BaseException as error:  # of the engine itself: no request is left waiting
                log(INFO, "the engine failed: %r", error)
                self._flight = None
                self.scheduler.forget_states()
                for request in list(self._live):
                    self._fail(request, error)
            self.step_seconds += time.perf_counter() - begin
        self._flight = None
        for request in list(self._live):
            self._end(request, "cancelled")

    def _take_in(self) -> bool:
        """Waits for work. False: the engine is closed, and nothing runs that it waits for."""
        if self._flight is None and not self.scheduler.has_work:
            self._wake.now()
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed or self._inbox or self._cancelled or self.scheduler.has_work or self._flight
                )
            )  # fmt: skip
            new, cancelled, closed = self._inbox, self._cancelled, self._closed
            self._inbox, self._cancelled = [], []
        for request in new:
            self._live[request] = None
            if request.deadline is not None:
                self._next_deadline = min(self._next_deadline, request.deadline)
            self.requests += 1
            self.prompt_tokens += len(request.prompt)
            self.scheduler.add(request.samples[0].sequence)
        for request in cancelled:
            if request in self._live:
                self._end(request, "cancelled")
        return not closed or (bool(self._live) and time.monotonic() < self._last)

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._next_deadline:
            return
        for request in [one for one in self._live if one.deadline is not None and one.deadline <= now]:
            self._end(request, "timeout")
        self._next_deadline = min(
            (one.deadline for one in self._live if one.deadline is not None), default=math.inf
        )  # fmt: skip

    def _step(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self.scheduler.complete(flight.plan)
            following = self._follow(flight)
            self._land(flight)
            self._flight = None if following is None else self._chosen(following)
            return
        if self.speculator is not None:
            self.speculator.prepare(self.scheduler.running)
        plan = self.scheduler.schedule()
        for sequence in plan.full:
            self._finish(sequence.owner, "length")
        if not plan.items or (self.speculator is not None and not self._propose(plan, self.speculator)):
            return
        rows, prompts, ends = self._rows(plan)
        logits = self._run(plan, rows)
        if logits is None:
            return
        self.scheduler.complete(plan)
        self._take(plan, logits, prompts, ends)

    def _take(
        self,
        plan: Plan,
        logits: Logits,
        prompts: Sequence[tuple[Request, int, int]],
        ends: Sequence[tuple[Sample, int]],
    ) -> None:
        """What the step of the plan computed, for the prompt positions and samples of ``_rows``."""
        for request, position, row in prompts:
            self._prompt_logprobs(request, position, logits.numpy()[row])
        chosen: list[tuple[Sample, int]] = []
        for sample, row in ends:
            chosen += [(one, row) for one in self._split(sample)]
        if not chosen:
            self._wake.now()  # nothing is waited for
            return
        if plan.drafted:
            self._verify(logits, [_Draft(sample, row, sample.sequence.draft) for sample, row in chosen])
            return
        samples, states = [sample for sample, _ in chosen], [sample.state for sample, _ in chosen]
        places = [row for _, row in chosen]
        if not self.sampler.chooses_on_device(logits, states):
            self._fetch(logits)
            self._append(samples, self.sampler.sample(logits, states, places))
            return
        draws = self.sampler.draws(states, places)
        choice = self.sampler.choose(logits, states, draws)
        if [sample.sequence for sample in samples] == [item.sequence for item in plan.items]:
            batch = DecodeBatch(samples, draws, self.sampler.vocabulary, self.settings.max_positions)
            self._flight = _Flight(plan, batch, logits, choice)
        else:
            self._append(samples, self._wait(choice, states))

    def _run(self, plan: Plan, rows: Sequence[int], tokens: object = None) -> Logits | None:
        """None: it failed, and so did its requests."""
        self.steps += 1
        if not self._enqueues or plan.tokens > len(plan.items):
            self._wake.now()  # a step on the CPU blocks, and one with prompts is long in launching
        begin = time.perf_counter()
        try:
            logits = self.runner.run(plan, rows, tokens)
        except Exception as error:
            self._fail_all(plan, error)
            return None
        self._enqueues = logits.can_choose
        if not self._enqueues:
            self.model_seconds += time.perf_counter() - begin
        return logits

    def _propose(self, plan: Plan, speculator: Speculator) -> bool:
        """False: it failed, and so did the step's requests."""
        begin = time.perf_counter()
        self._wake.now()
        try:
            speculator.fill(plan)
        except Exception as error:
            self._fail_all(plan, error)
            return False
        self.model_seconds += time.perf_counter() - begin
        return True

    def _verify(self, logits: Logits, drafts: list[_Draft]) -> None:
        """Chooses the tokens of each sample one after the other, until one is not that of its draft."""
        states, rows = [one.sample.state for one in drafts], [one.row for one in drafts]
        ahead: dict[_Draft, list[SampledToken]] = {}
        if logits.can_choose and self.sampler.are_plain(states):
            counts = [len(one.tokens) + 1 for one in drafts]
            choice = logits.choose(self.sampler.draws_ahead(states, rows, counts))
            tokens = map(self.sampler.chosen, self._blocked(choice.wait).tolist())
            ahead = {one: [next(tokens) for _ in range(count)] for one, count in zip(drafts, counts, strict=True)}
        else:
            self._fetch(logits)
            logits = Logits(logits.numpy())  # each token's changes depend on the one before
        active, place = drafts, 0
        while active:
            states, rows = [one.sample.state for one in active], [one.row + place for one in active]
            if ahead:
                sampled = [ahead[one][place] for one in active]
                self.sampler.take_numbers(states)
            else:
                sampled = self.sampler.sample(logits, states, rows)
            chunks: list[Chunk | None] = []
            self._append([one.sample for one in active], sampled, chunks)
            active = [
                one
                for one, token, chunk in zip(active, sampled, chunks, strict=True)
                if chunk is not None and self._take_drafted(one, token.token, chunk, place)
            ]
            place += 1

    def _take_drafted(self, draft: _Draft, token: int, chunk: Chunk, place: int) -> bool:
        """Whether the row behind the token is right, as the token is that of the draft."""
        sample = draft.sample
        draft.chunk = chunk if draft.chunk is None else draft.chunk.joined(chunk)
        is_accepted = place < len(draft.tokens) and token == draft.tokens[place]
        draft.accepted += is_accepted
        if is_accepted and sample.finish_reason is None:
            return True
        if draft.tokens and self.speculator is not None:
            self.drafts += 1
            self.draft_tokens += len(draft.tokens)
            self.accepted_tokens += draft.accepted
            self.speculator.update(sample, len(draft.tokens), draft.accepted)
            self.scheduler.settle(sample.sequence)
            if draft.chunk.usage is not None:
                draft.chunk.usage = sample.request.usage([sample])
        if sample.finish_reason != "error":  # another sample of its prompt has failed
            sample.request.handle._push(self._wake, draft.chunk)
            if sample.finish_reason is not None:
                self._close(sample)
        return False

    def _fetch(self, logits: Logits) -> None:
        """Waits for the step, and brings its logits to the host."""
        if logits.can_choose:  # they come from the GPU
            self._blocked(logits.numpy)

    def _follow(self, flight: _Flight) -> _Flight | None:
        """Enqueues the step behind a flight, if it will have the same sequences as far as one can know."""
        batch = flight.batch
        if self.speculator is not None and self.speculator.expects_drafts(batch.samples):
            return None
        plan = self.scheduler.follow(flight.plan) if batch.goes_on else None
        if plan is None:
            return None
        assert flight.choice is not None
        logits = self._run(plan, range(len(plan.items)), flight.choice.device)
        if logits is None:
            return None
        return _Flight(plan, batch, logits, logits.choose(batch.draws_behind()) if batch.is_plain else None)

    def _chosen(self, flight: _Flight) -> _Flight:
        """With its tokens being chosen, now that those before them are known: penalties and grammars need them."""
        if flight.choice is not None:
            return flight
        states = [None if sample.finish_reason is not None else sample.state for sample in flight.batch.samples]
        return replace(flight, choice=self.sampler.choose(flight.logits, states, flight.batch.draws_behind()))

    def _land(self, flight: _Flight) -> None:
        """Waits for a flight, and gives its tokens out."""
        assert flight.choice is not None
        if not flight.batch.is_plain:
            samples = flight.batch.samples
            self._append(samples, self._wait(flight.choice, [sample.state for sample in samples]))
            flight.batch.count_given()
            return
        tokens = self._blocked(flight.choice.wait)
        may_end = flight.batch.may_end(tokens).tolist()
        count = 0
        for sample, token, is_last in zip(flight.batch.samples, tokens.tolist(), may_end, strict=True):
            if is_last or sample.finish_reason is not None:
                self._append([sample], [self.sampler.chosen(token)])
                continue
            try:
                chunk = sample.extend(token)
            except BaseException as error:  # of its tokenizer; a panic of theirs is no Exception
                self._fail(sample.request, error)
                continue
            count += 1
            if chunk is not None:
                sample.request.handle._push(self._wake, chunk)
        self.generated_tokens += count

    def _wait(self, choice: Choice, states: Sequence[SamplerState]) -> list[SampledToken]:
        return self.sampler.taken(self._blocked(choice.wait), choice, states)

    def _blocked(self, wait: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Waits for the device.

        Consumers that have something to take are woken now and not before: they need the interpreter, and the engine
        does not until the device is done.
        """
        begin = time.perf_counter()
        self._wake.now()
        try:
            return wait()
        finally:
            self.model_seconds += time.perf_counter() - begin

    def _append(
        self, samples: Sequence[Sample], sampled: Sequence[SampledToken], kept: list[Chunk | None] | None = None
    ) -> None:
        """Gives the tokens to the samples, and their chunks out; or puts those into ``kept``, None where one failed."""
        for sample, token in zip(samples, sampled, strict=True):
            chunk = None
            if sample.finish_reason is not None:
                pass  # it was cancelled meanwhile, or another sample of its prompt failed
            elif token.problem is not None:
                self._fail(sample.request, ModelError(f"no token can be chosen: {token.problem}"))
            else:
                try:
                    chunk = sample.append(token, self.settings.max_positions)
                except BaseException as error:  # of its tokenizer or grammar; a panic of theirs is no Exception
                    self._fail(sample.request, error)
                else:
                    self.generated_tokens += 1
                    matcher = sample.state.matcher
                    if matcher is not None and (problem := matcher.problem):
                        self._fail(sample.request, ModelError(f"the grammar failed: {problem}"))
                        chunk = None
            if kept is not None:
                kept.append(chunk)
            elif chunk is not None:
                if sample.request.streams or sample.finish_reason is not None:
                    sample.request.handle._push(self._wake, chunk)
                if sample.finish_reason is not None:
                    self._close(sample)

    def _close(self, sample: Sample) -> None:
        """A sample that has ended."""
        self.scheduler.remove(sample.sequence)
        self._complete(sample.request)

    def _rows(self, plan: Plan) -> tuple[list[int], list[tuple[Request, int, int]], list[tuple[Sample, int]]]:
        """The step's tokens whose logits are wanted; for which prompt positions and samples they are, by row."""
        rows: list[int] = []
        prompts: list[tuple[Request, int, int]] = []
        ends: list[tuple[Sample, int]] = []
        begin = 0
        for item in plan.items:
            sample: Sample = item.sequence.owner
            request = sample.request
            known = request.prompt_logprobs
            if known is not None and len(known) < len(request.prompt):
                for position in range(item.start, min(item.end, len(request.prompt) - 1)):
                    if position + 1 >= len(known):
                        prompts.append((request, position, len(rows)))
                        rows.append(begin + position - item.start)
            if item.end == len(item.sequence.tokens):
                ends.append((sample, len(rows)))
                rows.append(begin + item.count - 1)
            elif item.drafted:
                ends.append((sample, len(rows)))
                rows += range(begin + item.count - item.drafted - 1, begin + item.count)
            begin += item.count
        return rows, prompts, ends

    def _prompt_logprobs(self, request: Request, position: int, logits: NDArray[np.float32]) -> None:
        known, count = request.prompt_logprobs, request.params.prompt_logprobs
        assert known is not None
        assert count is not None
        known.append(token_logprobs(logits[: self.settings.vocabulary], request.prompt[position + 1], count))

    def _split(self, sample: Sample) -> Sequence[Sample]:
        """All samples of a prompt that is computed now; else the sample itself."""
        sequence, request = sample.sequence, sample.request
        if sample.state.generated == 0:
            self.cached_tokens += sequence.cached
            sequence.shares_prefix = True
        if sequence.samples == 1:
            return [sample]
        others = []
        for index in range(1, sequence.samples):
            twin = replace(
                sequence, tokens=list(sequence.tokens), order=(sequence.order[0], index), samples=1, table=None,
                slot=NO_SLOT,
            )  # fmt: skip
            twin.owner = Sample(request, twin, sample.state.fork(index))
            others.append(twin)
        self.scheduler.fork(sequence, others)
        request.samples += [twin.owner for twin in others]
        return request.samples

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        if sample.finish_reason is None:
            self.scheduler.remove(sample.sequence)
            sample.request.handle._push(self._wake, sample.finish(reason))
            self._complete(sample.request)
            self._wake.now()

    def _end(self, request: Request, reason: FinishReason) -> None:
        for sample in request.live:
            self._finish(sample, reason)

    def _fail_all(self, plan: Plan, error: BaseException) -> None:
        self.scheduler.forget_states()
        for request in dict.fromkeys(item.sequence.owner.request for item in plan.items):
            self._fail(request, error)

    def _fail(self, request: Request, error: BaseException) -> None:
        if request not in self._live:
            return
        if not isinstance(error, UntorchError):
            cause, error = error, ModelError(f"the step failed: {type(error).__name__}: {error}")
            error.__cause__ = cause
        for sample in request.live:
            self.scheduler.remove(sample.sequence)
            sample.finish_reason = "error"
        del self._live[request]
        self.finished += 1
        request.handle._push(self._wake, result=request.output(error))
        self._wake.now()

    def _complete(self, request: Request) -> None:
        if request in self._live and not request.live:
            del self._live[request]
            self.finished += 1
            request.handle._push(self._wake, result=request.output())
