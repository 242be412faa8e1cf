"""``untorch bench-llm``: latency and throughput of a language model under load, in the words of serving benchmarks."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.language_model import (
    KvMemoryOption,
    MaxBatchTokensOption,
    NumSpeculativeTokensOption,
    PromptLookupMaxOption,
    PromptLookupMinOption,
    SnapshotMemoryOption,
    SpeculativeOption,
    acceptance_text,
    open_engine,
)
from untorch.cli.options import DebugOption, FileArgument, JsonOption, NumThreadsOption, SeedOption, TrustOption
from untorch.cli.output import emit, make_table, print_fields, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

    from untorch.llm import Engine

__all__ = ["bench_llm"]


class Dataset(str, enum.Enum):
    """random: prompts without anything in common. shared-prefix: all begin with the same --prefix-len tokens."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"


@dataclass
class _Times:
    """Of one request: when it began, and when each chunk came."""

    begin: float
    tokens: list[float] = field(default_factory=list)


def bench_llm(
    file: FileArgument,
    dataset: Annotated[
        Dataset,
        typer.Option("--dataset", metavar="NAME", help="random: prompts without anything in common; shared-prefix."),
    ] = Dataset.RANDOM,
    num_prompts: Annotated[int, typer.Option("--num-prompts", metavar="N", min=1, help="Requests.")] = 32,
    max_concurrency: Annotated[
        int, typer.Option("--max-concurrency", metavar="N", min=1, help="Requests that are open at a time.")
    ] = 8,
    input_len: Annotated[int, typer.Option("--input-len", metavar="N", min=1, help="Tokens a prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", metavar="N", min=1, help="Tokens an answer.")] = 128,
    prefix_len: Annotated[
        int, typer.Option("--prefix-len", metavar="N", min=0, help="Tokens in common, of --input-len.")
    ] = 64,
    kv_memory: KvMemoryOption = None,
    snapshot_memory: SnapshotMemoryOption = None,
    speculative: SpeculativeOption = None,
    num_speculative_tokens: NumSpeculativeTokensOption = None,
    prompt_lookup_min: PromptLookupMinOption = None,
    prompt_lookup_max: PromptLookupMaxOption = None,
    max_batch_tokens: MaxBatchTokensOption = 1024,
    num_threads: NumThreadsOption = 0,
    trust: TrustOption = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure time to first token (TTFT), time per output token (TPOT), inter-token latency (ITL) and throughput."""
    from untorch.runtime.errors import InvalidArgumentError

    if dataset is Dataset.SHARED_PREFIX and prefix_len >= input_len:
        raise InvalidArgumentError(f"--prefix-len: expected less than --input-len ({input_len}), got {prefix_len}")
    with open_engine(
        file, kv_memory=kv_memory, snapshot_memory=snapshot_memory,
        max_batch_tokens=max(max_batch_tokens, max_concurrency), max_sequences=max_concurrency,
        num_threads=num_threads, trust=trust, text=False, speculative=speculative,
        num_speculative_tokens=num_speculative_tokens, prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max,
    ) as engine:  # fmt: skip
        prompts = _prompts(engine, dataset, num_prompts, input_len, prefix_len, seed)
        # Opens the libraries, without a prompt that is measured.
        _serve(engine, _prompts(engine, Dataset.RANDOM, 1, input_len, 0, seed + 1), 1, min(2, output_len))
        before = engine.stats()
        begin = time.perf_counter()
        times = _serve(engine, prompts, max_concurrency, output_len)
        seconds = time.perf_counter() - begin
        after, max_positions = engine.stats(), engine.settings.max_positions
    generated = sum(len(one.tokens) for one in times)
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    steps = after.steps - before.steps
    document = {
        "file": str(file),
        "dataset": dataset.value,
        "requests": num_prompts,
        "max_concurrency": max_concurrency,
        "input_len": input_len,
        "output_len": output_len,
        "output_tokens": generated,
        "max_positions": max_positions,
        "duration_s": seconds,
        "request_throughput": num_prompts / seconds,
        "output_throughput": generated / seconds,
        "total_throughput": (generated + prompt_tokens) / seconds,
        "cached_tokens": after.cached_tokens - before.cached_tokens,
        "preemptions": after.preemptions - before.preemptions,
        "steps": steps,
        "drafts": after.drafts - before.drafts,
        "draft_tokens": after.draft_tokens - before.draft_tokens,
        "accepted_tokens": after.accepted_tokens - before.accepted_tokens,
        "host_step_s": (
            (after.step_seconds - before.step_seconds - after.model_seconds + before.model_seconds) / max(steps, 1)
        ),
        "ttft_s": _summary([one.tokens[0] - one.begin for one in times]),
        "tpot_s": _summary(
            [(one.tokens[-1] - one.tokens[0]) / (len(one.tokens) - 1) for one in times if len(one.tokens) > 1]
        ),
        "itl_s": _summary([b - a for one in times for a, b in zip(one.tokens[:-1], one.tokens[1:], strict=True)]),
    }  # fmt: skip
    emit(document, json, lambda console: _render(console, document))


def _prompts(engine: Engine, dataset: Dataset, count: int, length: int, prefix: int, seed: int) -> list[list[int]]:
    import numpy

    vocabulary = engine.settings.vocabulary
    random = numpy.random.default_rng(seed)
    shared: list[int] = random.integers(0, vocabulary, prefix if dataset is Dataset.SHARED_PREFIX else 0).tolist()
    return [[*shared, *random.integers(0, vocabulary, length - len(shared)).tolist()] for _ in range(count)]


def _serve(engine: Engine, prompts: list[list[int]], concurrency: int, output_len: int) -> list[_Times]:
    from untorch.llm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    times: list[_Times] = []
    remaining = iter(prompts)

    async def client() -> None:
        for prompt in remaining:
            one = _Times(time.perf_counter())
            async for chunk in engine.stream(prompt, params):
                one.tokens += [time.perf_counter()] * len(chunk.token_ids)
            times.append(one)

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(min(concurrency, len(prompts)))))

    asyncio.run(clients())
    return times


def _summary(values: list[float]) -> dict[str, float | None]:
    import numpy

    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    return {
        "mean": float(numpy.mean(values)),
        **{f"p{q}": float(numpy.percentile(values, q)) for q in (50, 90, 99)},
    }


def _speculation(document: dict[str, Any]) -> list[tuple[str, str]]:
    drafts, proposed, accepted = (document[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return [("speculation", acceptance_text(drafts, proposed, accepted))] if drafts else []


def _output_text(document: dict[str, Any]) -> str:
    """Tokens an answer: fewer than were asked for where the model's length ends them."""
    asked, mean = document["output_len"], document["output_tokens"] / document["requests"]
    if mean == asked:
        return f"{asked} out"
    return f"{mean:.1f} out, not {asked}: the model's length is {document['max_positions']}"


def _render(console: Console, document: dict[str, Any]) -> None:
    print_fields(
        console,
        [
            ("requests", f"{document['requests']}, {document['max_concurrency']} at a time, {document['dataset']}"),
            ("tokens", f"{document['input_len']} in ({document['cached_tokens']} cached of all), "
                       f"{_output_text(document)}"),
            ("time", f"{seconds_text(document['duration_s'])}, {document['steps']} steps, host "
                     f"{seconds_text(document['host_step_s'])} a step"),
            ("throughput", f"{document['request_throughput']:.2f} requests/s, {document['output_throughput']:.1f} "
                           f"output tokens/s, {document['total_throughput']:.1f} tokens/s"),
            ("preemptions", document["preemptions"]),
            *_speculation(document),
        ],
    )  # fmt: skip
    rows = [
        (name.upper(), *(seconds_text(document[f"{name}_s"][key]) for key in ("mean", "p50", "p90", "p99")))
        for name in ("ttft", "tpot", "itl")
    ]
    console.print(make_table(None, ("", ">mean", ">p50", ">p90", ">p99"), rows))
