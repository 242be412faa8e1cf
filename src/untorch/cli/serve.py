"""``untorch serve``: packages over HTTP and gRPC."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from untorch.cli.language_model import (
    KvMemoryOption,
    NumSpeculativeTokensOption,
    PromptLookupMaxOption,
    PromptLookupMinOption,
    SnapshotMemoryOption,
    SpeculativeOption,
)
from untorch.cli.options import (
    CudaGraphsOption,
    DebugOption,
    DeviceOption,
    JsonOption,
    NumRunnersOption,
    NumThreadsOption,
    TrustOption,
)

__all__ = ["serve"]


def serve(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=]FILE…", help="Packages to serve. Default name: the file's.", show_default=False),
    ] = None,
    repository: Annotated[
        Path | None, typer.Option("--repository", metavar="DIR", help="Also serve the .pt2 files of this folder.")
    ] = None,
    poll: Annotated[
        float,
        typer.Option("--poll", metavar="SECONDS", min=0, help="Look at the folder that often; 0: only at the start."),
    ] = 0.0,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="The port of HTTP; 0: any free one.")
    ] = 8000,
    uds: Annotated[
        Path | None,
        typer.Option("--uds", metavar="PATH", help="A Unix domain socket for HTTP, in place of --host and --port."),
    ] = None,
    grpc_port: Annotated[
        int,
        typer.Option("--grpc-port", metavar="N", min=-1, max=65535, help="The port of gRPC; 0: any free; -1: none."),
    ] = 8001,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Server processes, which share the weights.")
    ] = 1,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="A key that requests must carry, repeatable. Better: UNTORCH_API_KEY, which no other user sees.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="An origin whose web pages may call the server, such as https://app.example, repeatable; *: all.",
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option("--max-batch-size", metavar="ROWS", min=1, help="Rows of joined calls; 1: none are joined.")
    ] = 32,
    max_wait: Annotated[
        float,
        typer.Option("--max-wait", metavar="MS", min=0, help="Milliseconds that a call waits for others."),
    ] = 0.0,
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue",
            metavar="N",
            min=1,
            help="Calls of a method that wait, prompts of a language model that run and wait; further ones get 429.",
        ),
    ] = 1024,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0, help="Time of a call of a method; 0: no limit.")
    ] = 60.0,
    llm_timeout: Annotated[
        float,
        typer.Option(
            "--llm-timeout",
            metavar="SECONDS",
            min=0,
            help="Time of a request to a language or speech model; 0: no limit.",
        ),
    ] = 600.0,
    max_body: Annotated[
        str, typer.Option("--max-body", metavar="BYTES", help="The largest request: bytes, or such as 64MiB.")
    ] = "64MiB",
    max_pixels: Annotated[
        int, typer.Option("--max-pixels", metavar="N", min=1, help="The largest image that a front end decodes.")
    ] = 32 * 2**20,
    num_runners: NumRunnersOption = None,
    num_threads: NumThreadsOption = 0,
    cuda_graphs: CudaGraphsOption = 0,
    device: DeviceOption = None,
    kv_memory: KvMemoryOption = None,
    snapshot_memory: SnapshotMemoryOption = None,
    speculative: SpeculativeOption = None,
    num_speculative_tokens: NumSpeculativeTokensOption = None,
    prompt_lookup_min: PromptLookupMinOption = None,
    prompt_lookup_max: PromptLookupMaxOption = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            "--lora-module",
            metavar="[MODEL:]NAME=DIR",
            help="An adapter (LoRA) of PEFT for the language models, or for one of them, repeatable: requests to the "
            "OpenAI API name it as their model.",
        ),
    ] = None,
    max_audio: Annotated[
        float, typer.Option("--max-audio", metavar="SECONDS", min=1, help="The longest audio that is transcribed.")
    ] = 3600.0,
    tool_format: Annotated[
        str | None,
        typer.Option(
            "--tool-format",
            metavar="NAME",
            help="How language models write calls of tools: hermes, llama3, mistral, qwen3_coder. Default: as the chat "
            "template shows.",
        ),
    ] = None,
    trust: TrustOption = None,
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            metavar="SECONDS",
            min=0,
            help="Time for running requests after SIGTERM, and of language and speech models that are unloaded.",
        ),
    ] = 30.0,
    log_format: Annotated[
        str, typer.Option("--log-format", metavar="FORMAT", help="text, json, or none: only errors.")
    ] = "text",
    tls_certificate: Annotated[
        Path | None, typer.Option("--tls-certificate", metavar="PEM", help="The certificate, and those above it.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="PEM", help="The certificate's key.")] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve packages by the Open Inference Protocol, over HTTP and gRPC, until Ctrl-C or SIGTERM.

    Needs untorch[serve].
    """
    import importlib.util
    import sys
    from json import dumps

    from untorch.runtime.errors import UnsupportedError
    from untorch.serve.options import ServeOptions, parse_bytes, parse_loras, parse_models

    missing = [
        name
        for name in ("starlette", "uvicorn", "httptools", "grpc", "google.protobuf", "prometheus_client")
        if importlib.util.find_spec(name.partition(".")[0]) is None
    ]
    if missing:
        raise UnsupportedError(f"untorch serve needs {', '.join(missing)}: pip install 'untorch[serve]'")
    keys = [*(api_key or ()), *filter(None, [os.environ.get("UNTORCH_API_KEY")])]
    options = ServeOptions(
        models=parse_models(files or []),
        repository=None if repository is None else str(repository.absolute()),
        poll=poll,
        host=host,
        port=port,
        uds=None if uds is None else str(uds),
        grpc_port=None if grpc_port < 0 else grpc_port,
        workers=workers,
        api_keys=tuple(keys),
        cors_origins=tuple(cors_origin or ()),
        max_batch_size=max_batch_size,
        max_wait=max_wait / 1e3,
        max_queue=max_queue,
        timeout=timeout,
        llm_timeout=llm_timeout,
        max_body=parse_bytes(max_body, "--max-body"),
        max_pixels=max_pixels,
        num_runners=num_runners or 1,
        num_threads=num_threads,
        cuda_graphs=cuda_graphs,
        device=device,
        kv_memory=kv_memory,
        snapshot_memory=snapshot_memory,
        speculative=speculative,
        num_speculative_tokens=num_speculative_tokens,
        prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max,
        loras=parse_loras(lora_modules or []),
        max_audio=max_audio,
        tool_format=tool_format,
        trust=None if trust is None else str(trust.absolute()),
        drain=drain,
        log_format=log_format,
        tls_certificate=None if tls_certificate is None else str(tls_certificate),
        tls_key=None if tls_key is None else str(tls_key),
    )
    from untorch.serve.addresses import Addresses
    from untorch.serve.run import run

    def announce(addresses: Addresses) -> None:
        if json:
            print(dumps(addresses.to_json()), flush=True)
        else:
            grpc = f", gRPC on {addresses.grpc}" if addresses.grpc is not None else ""
            print(f"ready: {addresses.http}{grpc}", file=sys.stdout, flush=True)

    run(options, announce)
