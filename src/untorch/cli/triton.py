"""``untorch triton``: writes a model repository for the Triton Inference Server."""

from __future__ import annotations

from typing import Annotated

import typer

from untorch.cli.options import (
    DebugOption,
    FileArgument,
    JsonOption,
    MethodOption,
    NumThreadsOption,
    RequiredOutputOption,
)
from untorch.cli.output import emit, print_fields

__all__ = ["triton"]


def triton(
    file: FileArgument,
    output: RequiredOutputOption,
    method: MethodOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The Triton model's name. Default: the file's.")
    ] = None,
    model_version: Annotated[
        int, typer.Option("--model-version", metavar="N", min=1, help="The version's number in the repository.")
    ] = 1,
    num_threads: NumThreadsOption = 0,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a Triton model for each method, or for --method: config.pbtxt, model.py and the package.

    The server's python backend runs it; its Python needs untorch and numpy, and not torch. Requests are joined up to
    the largest batch of the export, which is max_batch_size in config.pbtxt.
    """
    from untorch.integrations.triton.repository import write_repository

    written = write_repository(
        file,
        output,
        method=method,
        name=name,
        model_version=model_version,
        num_threads=num_threads,
    )
    document = {
        "repository": str(written.path),
        "models": [
            {"method": chosen, "model": model, "max_batch_size": written.max_batch_sizes[chosen]}
            for chosen, model in written.models.items()
        ],
        "left_out": [{"method": left, "reason": reason} for left, reason in written.left_out.items()],
    }
    fields: list[tuple[str, object]] = [("repository", written.path)]
    for chosen, model in written.models.items():
        batch = written.max_batch_sizes[chosen]
        joined = f"joins up to {batch} rows" if batch else "joins no requests"
        fields.append((f"method {chosen}", f"model {model}, {joined}"))
    fields += [(f"method {left}", f"left out: {reason}") for left, reason in written.left_out.items()]
    emit(document, json, lambda console: print_fields(console, fields))
