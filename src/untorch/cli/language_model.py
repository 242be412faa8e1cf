"""What the commands for language models share: their options, and an engine of a file."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from untorch.llm import Engine, SamplingParams

__all__ = [
    "FrequencyPenaltyOption",
    "GrammarOption",
    "IgnoreEosOption",
    "JsonSchemaOption",
    "KvMemoryOption",
    "LogprobsOption",
    "LoraOption",
    "MaxBatchTokensOption",
    "MaxSequencesOption",
    "MaxTokensOption",
    "MinPOption",
    "NumSpeculativeTokensOption",
    "PresencePenaltyOption",
    "PromptLookupMaxOption",
    "PromptLookupMinOption",
    "RegexOption",
    "RepetitionPenaltyOption",
    "SamplingSeedOption",
    "SnapshotMemoryOption",
    "SpeculativeOption",
    "StopOption",
    "TemperatureOption",
    "TopKOption",
    "TopPOption",
    "acceptance_text",
    "has_wrong_bytes",
    "keep_wrong_bytes",
    "open_engine",
    "sampling_params",
]

KvMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--kv-memory",
        metavar="BYTES",
        help="Memory for keys and values: bytes, or such as 2GiB. Default: what is needed, at most a quarter of what "
        "is available.",
    ),
]
SnapshotMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--snapshot-memory",
        metavar="BYTES",
        help="Of models with recurrent layers: the part of --kv-memory for the states of known prefixes; 0: no prefix "
        "cache. Default: up to a quarter of it.",
    ),
]
MaxBatchTokensOption = Annotated[
    int, typer.Option("--max-batch-tokens", metavar="N", min=1, help="Tokens of a step; longer prompts are cut.")
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", min=1, help="The most new tokens. Default: as many as fit.")
]
TemperatureOption = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", help="0: the most likely token. Default: the model's, else 0."),
]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", metavar="P", help="The smallest set of tokens with this probability stays.")
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", metavar="K", help="The most likely tokens that stay; 0: all.")
]
MinPOption = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Tokens less likely than this part of the most likely one are left out."),
]
PresencePenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty", metavar="X", help="Subtracted from the logits of tokens in the output: -2 to 2."
    ),
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option("--frequency-penalty", metavar="X", help="The same for each time that the output has the token."),
]
RepetitionPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        help="Above 1, tokens of prompt and output become less likely. Default: the model's, else 1.",
    ),
]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="The model's stop tokens do not end the text.")]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        min=0,
        help="With --json: each token's logprob, and those of that many of the most likely tokens.",
    ),
]
JsonSchemaOption = Annotated[
    str | None,
    typer.Option("--json-schema", metavar="JSON", help="The text is JSON of this schema. Needs llguidance."),
]
RegexOption = Annotated[
    str | None,
    typer.Option("--regex", metavar="REGEX", help="The text matches this regular expression. Needs llguidance."),
]
GrammarOption = Annotated[
    str | None,
    typer.Option("--grammar", metavar="LARK", help="The text is of this Lark grammar. Needs llguidance."),
]
MaxSequencesOption = Annotated[
    int | None,
    typer.Option(
        "--max-sequences", metavar="N", min=1, help="Sequences that are computed at a time; others wait. Default: 64."
    ),
]
SamplingSeedOption = Annotated[
    int | None, typer.Option("--sampling-seed", metavar="N", min=0, help="Seed of the request. Default: random.")
]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        "--speculative",
        metavar="METHOD",
        help="Propose tokens and verify several at a time. ngram: what followed the last tokens when they came before; "
        "draft: those of the package's draft model. Default: not.",
    ),
]
NumSpeculativeTokensOption = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", metavar="K", min=1, help="The most tokens to propose at a time: 4."),
]
PromptLookupMinOption = Annotated[
    int | None,
    typer.Option("--prompt-lookup-min", metavar="N", min=1, help="Of ngram: the fewest tokens that have to match: 2."),
]
PromptLookupMaxOption = Annotated[
    int | None,
    typer.Option("--prompt-lookup-max", metavar="N", min=1, help="Of ngram: the most tokens that are compared: 5."),
]
LoraOption = Annotated[
    str | None,
    typer.Option("--lora", metavar="DIR", help="An adapter (LoRA) of PEFT that the request goes through."),
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="A string that ends the text, repeatable.")
]


def open_engine(file: Path, **options: Any) -> Engine:
    """Options that are None have the engine's default."""
    from untorch.llm import Engine
    from untorch.progress import large_file

    # The engine's thread gets the interpreter back after 0.5 ms from threads that consume tokens, not after 5.
    sys.setswitchinterval(5e-4)
    given = {name: value for name, value in options.items() if value is not None}
    with large_file("loading", file):
        return Engine(file, progress=_show_progress if sys.stderr.isatty() else None, **given)


def _show_progress(done: int, of: int) -> None:
    if of:
        sys.stderr.write(f"\rcapturing CUDA graphs {done}/{of}" + ("\n" if done == of else ""))
        sys.stderr.flush()


def acceptance_text(drafts: int, draft_tokens: int, accepted_tokens: int) -> str:
    """Of speculative decoding: how many tokens were accepted, and how many a step gave a sequence that had a draft."""
    return (
        f"{accepted_tokens} of {draft_tokens} proposed tokens accepted ({accepted_tokens / draft_tokens:.0%}), "
        f"{1 + accepted_tokens / drafts:.2f} tokens a draft"
    )


def keep_wrong_bytes(stream: TextIO) -> None:
    """What is not UTF-8 in standard input is kept for ``has_wrong_bytes``: an error would take more lines with it."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="surrogateescape")


def has_wrong_bytes(text: str) -> bool:
    """Whether it has bytes that were not UTF-8."""
    return any("\udc80" <= character <= "\udcff" for character in text)


def sampling_params(engine: Engine, **fields: Any) -> SamplingParams:
    """The model's defaults, with those fields that are given."""
    import dataclasses

    return dataclasses.replace(
        engine.default_params, **{name: value for name, value in fields.items() if value is not None}
    )
