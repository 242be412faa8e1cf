"""How long does the language-model engine take on the host, a step? With a stand-in for the GPU, on any machine.

    PYTHONPATH=src python benchmarks/llm_host.py [--streams 1 64 128 256] [--sampled] [--penalties] [--launch 200]

Steps decode, are enqueued ahead and would be CUDA graphs, as on a GPU; the model computes nothing. Instead the engine
waits for ``--gpu`` microseconds a step, and a launch releases the interpreter for ``--launch``. Prompts are random, of
128 tokens; an asyncio task reads each stream in the same process, as in ``untorch bench-llm``. Medians of the steps
that were enqueued ahead: CPU time of the engine's thread, wall time without the wait, and CPU time by phase.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import untorch
from untorch.llm import Engine, SamplingParams
from untorch.llm.graphs import graph_sizes
from untorch.llm.logits import DeviceMethods, Logits
from untorch.llm.paged_model import PagedModel
from untorch.llm.runner import Runner
from untorch.llm.scheduler import Plan
from untorch.llm.settings import Settings

VOCABULARY, PROMPT, BLOCK = 32_000, 128, 16
PHASES = {
    "complete": ("scheduler", "complete"), "follow": ("scheduler", "follow"), "run": ("runner", "run"),
    "enqueue": ("", "_follow"), "wake": ("_wake", "now"), "wait": ("", "_blocked"), "give out": ("", "_land"),
}  # fmt: skip


class Ids:
    """Tokens that a GPU would be choosing until ``ready``."""

    ready = 0.0

    def __init__(self, count: int, seconds: float) -> None:
        self.values, self.seconds = np.arange(3, 3 + count), seconds

    def copy_to_host_async(self) -> None:
        """The GPU computes one step after the other."""
        self.ready = Ids.ready = max(time.perf_counter(), Ids.ready) + self.seconds

    def numpy(self) -> np.ndarray:
        """Wait for the step."""
        time.sleep(max(self.ready - time.perf_counter(), 0.0))
        return self.values

    def __len__(self) -> int:
        return len(self.values)


class Step:
    """A method of a package, and its graphs."""

    def __init__(self, launch: float) -> None:
        self.launch, self.logits = launch, untorch.zeros((1024, 8), "float32")

    def __call__(self, *given: Any) -> Any:
        """Launch."""
        if self.launch:
            time.sleep(self.launch)
        return self.logits

    def graph(self, *given: Any) -> Step:
        """Capture."""
        return self

    def share(self, *given: Any) -> Step:
        """Capture another one."""
        return self

    def close(self) -> None:
        """Nothing is held."""


class StandIn(Runner):
    """seconds: of the GPU, a step."""

    def __init__(self, streams: int, output: int, seconds: float, launch: float) -> None:
        self.settings = Settings(block_size=BLOCK, vocabulary=VOCABULARY, max_positions=PROMPT + output, stop_ids=(2,))
        self.blocks = streams * -(-(PROMPT + output) // BLOCK)
        step = Step(launch)
        methods = DeviceMethods(VOCABULARY, lambda logits, *given: Ids(len(given[0]), seconds), step, step)
        self.model = PagedModel(
            [(16, step), (1024, step)], [], methods, [BLOCK], 0,  # type: ignore[list-item]
            untorch.zeros((1, 1), "float32"), None, graph_sizes(streams),
        )  # fmt: skip

    def run(self, plan: Plan, rows: Sequence[int], tokens: Any = None) -> Logits:
        """A step."""
        return self.model.run(plan, rows, tokens)


class Clock:
    """CPU time of the thread by phase, without that of the phases within."""

    def __init__(self) -> None:
        self.spent: collections.Counter[str] = collections.Counter()
        self._inner: list[float] = []

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*given: Any) -> Any:
            begin = time.thread_time()
            self._inner.append(0.0)
            try:
                return function(*given)
            finally:
                took = time.thread_time() - begin
                self.spent[phase] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed


def measure(streams: int, options: argparse.Namespace, by_phase: bool) -> tuple[float, float, dict[str, float]]:
    """Seconds a step: CPU time, wall time without the wait, CPU time by phase."""
    runner = StandIn(streams, options.output, options.gpu * 1e-6, options.launch * 1e-6)
    clock = Clock()
    steps: list[tuple[float, float, dict[str, float]]] = []
    with Engine(runner, max_batch_tokens=max(1024, streams), max_sequences=streams, text=False) as engine:
        core: Any = engine._core
        for phase, (owner, name) in PHASES.items() if by_phase else ():
            thing = getattr(core, owner) if owner else core
            setattr(thing, name, clock.wrap(phase, getattr(thing, name)))
        step = core._step

        def timed() -> None:
            clock.spent.clear()
            was_ahead, waited = core._flight is not None, core.model_seconds
            cpu, wall = time.thread_time(), time.perf_counter()
            step()
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall - (core.model_seconds - waited)
            if was_ahead and core._flight is not None:
                steps.append((cpu, wall, dict(clock.spent)))

        core._step = timed
        asyncio.run(read(engine, streams, options))
    middle = statistics.median
    return (
        middle(cpu for cpu, _, _ in steps),
        middle(wall for _, wall, _ in steps),
        {phase: middle(spent.get(phase, 0.0) for *_, spent in steps) for phase in PHASES},
    )


async def read(engine: Engine, streams: int, options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)

    async def one(seed: int) -> None:
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": seed} if options.sampled else {"temperature": 0.0}
        if options.penalties:
            sampling["repetition_penalty"] = 1.1
        params = SamplingParams(max_tokens=options.output, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        async for _ in engine.stream(rng.integers(3, VOCABULARY, PROMPT).tolist(), params):
            pass

    await asyncio.gather(*(one(i) for i in range(streams)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--output", type=int, default=250, help="tokens of a stream")
    parser.add_argument("--gpu", type=float, default=10_000, help="microseconds of a step")
    parser.add_argument("--launch", type=float, default=0, help="microseconds of a launch without the interpreter")
    parser.add_argument("--sampled", action="store_true", help="random tokens instead of the most likely ones")
    parser.add_argument("--penalties", action="store_true", help="a repetition penalty, applied on the GPU")
    options = parser.parse_args()
    sys.setswitchinterval(0.0005)  # as the commands do
    print("streams  cpu, µs  wall, µs  cpu µs a stream  by phase, µs")
    for streams in options.streams:
        cpu, wall, _ = measure(streams, options, by_phase=False)
        *_, phases = measure(streams, options, by_phase=True)
        parts = ", ".join(f"{phase} {seconds * 1e6:.0f}" for phase, seconds in phases.items())
        print(f"{streams:7d}  {cpu * 1e6:7.0f}  {wall * 1e6:8.0f}  {cpu * 1e6 / streams:15.1f}  {parts}")


if __name__ == "__main__":
    main()
