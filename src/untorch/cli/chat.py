"""``untorch chat``: a conversation with a language model in the terminal."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.language_model import (
    KvMemoryOption,
    LoraOption,
    MaxTokensOption,
    NumSpeculativeTokensOption,
    PromptLookupMaxOption,
    PromptLookupMinOption,
    SamplingSeedOption,
    SnapshotMemoryOption,
    SpeculativeOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    acceptance_text,
    has_wrong_bytes,
    keep_wrong_bytes,
    open_engine,
    sampling_params,
)
from untorch.cli.options import DebugOption, FileArgument, JsonOption, NumThreadsOption, TrustOption
from untorch.cli.output import emit
from untorch.runtime.errors import FileMissingError, InvalidArgumentError
from untorch.runtime.text import escape_controls

if TYPE_CHECKING:
    from untorch.llm import Engine, SamplingParams

__all__ = ["chat"]

_HELP = (
    "/reset begins anew, /image FILE adds an image to the next turn, /stats shows speeds, /help this, /exit ends; "
    "Ctrl-C stops an answer"
)
_COMMAND = re.compile(r"/[A-Za-z-]+(?!\S)")


def chat(
    file: FileArgument,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="The conversation's system message.")
    ] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    sampling_seed: SamplingSeedOption = None,
    lora: LoraOption = None,
    kv_memory: KvMemoryOption = None,
    snapshot_memory: SnapshotMemoryOption = None,
    speculative: SpeculativeOption = None,
    num_speculative_tokens: NumSpeculativeTokensOption = None,
    prompt_lookup_min: PromptLookupMinOption = None,
    prompt_lookup_max: PromptLookupMaxOption = None,
    num_threads: NumThreadsOption = 0,
    trust: TrustOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Chat with a language model: answers come as they are made, earlier turns stay in the prefix cache.

    Lines from standard input are the turns; /image, /reset, /stats, /help and /exit are commands. A line with a space
    in front of its / is a turn. With --json the conversation is printed at its end.
    """
    with open_engine(
        file, kv_memory=kv_memory, snapshot_memory=snapshot_memory, num_threads=num_threads, trust=trust,
        speculative=speculative, num_speculative_tokens=num_speculative_tokens, prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max, loras=None if lora is None else {"lora": lora},
    ) as engine:  # fmt: skip
        params = sampling_params(
            engine, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=sampling_seed
        )
        messages = _converse(engine, params, system, show=not json)
        if json:
            stats = {name: value for name, value in asdict(engine.stats()).items() if isinstance(value, int)}
            emit({"file": str(file), "messages": messages, "stats": stats}, json, lambda console: None)


def _converse(engine: Engine, params: SamplingParams, system: str | None, show: bool) -> list[dict[str, Any]]:
    images: list[str] = []  # of the next turn
    first: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    messages, last, answered = list(first), "", False
    if sys.stdin.isatty():
        print(_HELP, file=sys.stderr)
    keep_wrong_bytes(sys.stdin)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return messages
        command = line.strip()
        if command in ("/exit", "/quit"):
            return messages
        if command == "/reset":
            messages, last, images = list(first), "", []
        elif command.startswith("/image "):
            images += _image(engine, command)
        elif command in ("/stats", "/help", ""):
            if show:
                print(_stats(engine, last) if command == "/stats" else _HELP)
        elif unknown := _COMMAND.match(line):
            print(f"untorch: {unknown[0]}: expected /image, /reset, /stats, /help or /exit", file=sys.stderr)
        elif has_wrong_bytes(line):
            print("untorch: the line is not UTF-8: it is left out", file=sys.stderr)
        else:
            turn = [*messages, {"role": "user", "content": _content(line, images)}]
            images = []
            try:
                answer, last = _answer(engine, params, turn, show)
            except InvalidArgumentError as error:
                if not answered:  # there is no chat template, say
                    raise
                # Too long, say: what was said before stays.
                print(f"untorch: {escape_controls(str(error))} (/reset begins anew)", file=sys.stderr)
                continue
            answered = True
            messages = [*turn, {"role": "assistant", "content": answer}]


def _content(line: str, images: list[str]) -> str | list[dict[str, str]]:
    """Of a message: the text, behind its images."""
    if not images:
        return line
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": line}]


def _image(engine: Engine, command: str) -> list[str]:
    """The file that "/image FILE" names; none, with a line on standard error, if it cannot be used."""
    from untorch.images import read_image

    path = command.removeprefix("/image").strip()
    try:
        if not engine.takes_images:
            raise InvalidArgumentError("/image: the package has no image encoder")
        read_image(path, "/image", "llm")
    except (InvalidArgumentError, FileMissingError) as error:
        print(f"untorch: {escape_controls(str(error))}", file=sys.stderr)
        return []
    return [path]


def _answer(engine: Engine, params: SamplingParams, messages: list[dict[str, Any]], show: bool) -> tuple[str, str]:
    """The answer's text, and its speeds in words."""
    begin = time.perf_counter()
    first = None
    handle = engine.submit(engine.chat_prompt(messages), params, lora=next(iter(engine.loras), None))
    try:
        for chunk in handle:
            first = first or time.perf_counter()
            if show:
                sys.stdout.write(escape_controls(chunk.text) if sys.stdout.isatty() else chunk.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        handle.cancel()
    output = handle.result()
    if show:
        print(flush=True)
    end, usage = time.perf_counter(), output.usage
    decoding = end - (first or end)
    speed = (usage.completion_tokens - 1) / decoding if decoding > 0 else 0.0
    words = (
        f"last answer: {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), first token after "
        f"{((first or end) - begin) * 1e3:.0f} ms, {usage.completion_tokens} tokens, {speed:.1f} tokens/s, "
        f"ended by {output.finish_reason}"
    )
    if usage.draft_tokens:
        words += f", {usage.accepted_tokens} of {usage.draft_tokens} proposed tokens accepted"
    return output.text, words


def _stats(engine: Engine, last: str) -> str:
    stats = engine.stats()
    used = stats.blocks - stats.blocks_free
    words = (
        f"{stats.finished} answers, {stats.generated_tokens} tokens in {stats.steps} steps; "
        f"{used} of {stats.blocks} blocks in use, {stats.preemptions} preemptions"
    )
    if stats.drafts:
        words += f"; {acceptance_text(stats.drafts, stats.draft_tokens, stats.accepted_tokens)}"
    return f"{words}\n{last}" if last else words
