"""The engine's thread: takes requests, runs one step after the other, and gives their tokens out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from untorch.llm.logits import Logits
from untorch.llm.outputs import FinishReason
from untorch.llm.request import Request, Sample
from untorch.llm.runner import Runner
from untorch.llm.sampler import Sampler, token_logprobs
from untorch.llm.scheduler import Plan, Scheduler
from untorch.llm.settings import Settings
from untorch.runtime.errors import ClosedError, ModelError, UntorchError
from untorch.runtime.log import INFO, log

__all__ = ["Core"]


class Core:
    """add, cancel, start and stop are for other threads; everything else is the engine thread's own."""

    def __init__(self, runner: Runner, scheduler: Scheduler, settings: Settings) -> None:
        self.runner, self.scheduler, self.settings = runner, scheduler, settings
        self.sampler = Sampler(settings.vocabulary)
        self.steps = self.requests = self.finished = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.step_seconds = self.model_seconds = 0.0
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._cancelled: list[Request] = []
        self._closed = False
        self._live: dict[Request, None] = {}
        self._thread = threading.Thread(target=self._loop, name="untorch-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, request: Request) -> None:
        """A new request. Raises ClosedError."""
        with self._changed:
            if self._closed:
                raise ClosedError("submit: the engine is closed")
            self._inbox.append(request)
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """Before the next step."""
        with self._changed:
            if not self._closed:
                self._cancelled.append(request)
                self._changed.notify_all()

    def stop(self) -> None:
        """Cancel everything, and wait for the thread."""
        with self._changed:
            self._closed = True
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
                for request in list(self._live):
                    self._fail(request, error)
            self.step_seconds += time.perf_counter() - begin
        for request in list(self._live):
            self._end(request, "cancelled")

    def _take_in(self) -> bool:
        """Waits for work. False: the engine is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._inbox or self._cancelled or self.scheduler.has_work
            )  # fmt: skip
            new, cancelled, closed = self._inbox, self._cancelled, self._closed
            self._inbox, self._cancelled = [], []
        for request in new:
            self._live[request] = None
            self.requests += 1
            self.prompt_tokens += len(request.prompt)
            self.scheduler.add(request.samples[0].sequence)
        for request in cancelled:
            if request in self._live:
                self._end(request, "cancelled")
        return not closed

    def _expire(self) -> None:
        now = time.monotonic()
        for request in [one for one in self._live if one.deadline is not None and one.deadline <= now]:
            self._end(request, "timeout")

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        for sequence in plan.full:
            self._finish(sequence.owner, "length")
        if not plan.items:
            return
        rows, prompts, ends = self._rows(plan)
        begin = time.perf_counter()
        try:
            logits = self.runner.run(plan, rows)
        except Exception as error:
            for request in dict.fromkeys(item.sequence.owner.request for item in plan.items):
                self._fail(request, error)
            return
        finally:
            self.model_seconds += time.perf_counter() - begin
            self.steps += 1
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
            return
        begin = time.perf_counter()
        sampled = self.sampler.sample(
            logits, [sample.state for sample, _ in chosen], [row for _, row in chosen]
        )  # fmt: skip
        if logits.can_choose:  # it waits for the step
            self.model_seconds += time.perf_counter() - begin
        for (sample, _), token in zip(chosen, sampled, strict=True):
            if sample.finish_reason is not None:
                continue  # another sample of its prompt failed
            if token.problem is not None:
                self._fail(sample.request, ModelError(f"no token can be chosen: {token.problem}"))
                continue
            try:
                chunk = sample.append(token, self.settings.max_positions)
            except BaseException as error:  # of its tokenizer or grammar; a panic of theirs is no Exception
                self._fail(sample.request, error)
                continue
            self.generated_tokens += 1
            matcher = sample.state.matcher
            if matcher is not None and (problem := matcher.problem):
                self._fail(sample.request, ModelError(f"the grammar failed: {problem}"))
                continue
            if sample.finish_reason is not None:
                self.scheduler.remove(sample.sequence)
            sample.request.handle._push(chunk)
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
                sequence, tokens=list(sequence.tokens), order=(sequence.order[0], index), samples=1, table=None
            )  # fmt: skip
            twin.owner = Sample(request, twin, sample.state.fork(index))
            others.append(twin)
        self.scheduler.fork(sequence, others)
        request.samples += [twin.owner for twin in others]
        return request.samples

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        if sample.finish_reason is None:
            self.scheduler.remove(sample.sequence)
            sample.request.handle._push(sample.finish(reason))
            self._complete(sample.request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        for sample in request.live:
            self._finish(sample, reason)

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
        request.handle._push(result=request.output(error))

    def _complete(self, request: Request) -> None:
        if request in self._live and not request.live:
            del self._live[request]
            self.finished += 1
            request.handle._push(result=request.output())
