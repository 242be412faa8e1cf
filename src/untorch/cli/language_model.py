"""What the commands for language models share: their options, and an engine of a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from untorch.llm import Engine, SamplingParams

__all__ = [
    "KvMemoryOption",
    "MaxBatchTokensOption",
    "MaxTokensOption",
    "SamplingSeedOption",
    "StopOption",
    "TemperatureOption",
    "TopKOption",
    "TopPOption",
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
SamplingSeedOption = Annotated[
    int | None, typer.Option("--sampling-seed", metavar="N", min=0, help="Seed of the request. Default: random.")
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="A string that ends the text, repeatable.")
]


def open_engine(file: Path, **options: Any) -> Engine:
    """Options that are None have the engine's default."""
    from untorch.llm import Engine

    # The engine's thread gets the interpreter back after 0.5 ms from threads that consume tokens, not after 5.
    sys.setswitchinterval(5e-4)
    given = {name: value for name, value in options.items() if value is not None}
    return Engine(file, progress=_show_progress if sys.stderr.isatty() else None, **given)


def _show_progress(done: int, of: int) -> None:
    if of:
        sys.stderr.write(f"\rcapturing CUDA graphs {done}/{of}" + ("\n" if done == of else ""))
        sys.stderr.flush()


def sampling_params(engine: Engine, **fields: Any) -> SamplingParams:
    """The model's defaults, with those fields that are given."""
    import dataclasses

    return dataclasses.replace(
        engine.default_params, **{name: value for name, value in fields.items() if value is not None}
    )
