"""ServeOptions: everything that a server can be told, typed and checked in one place."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from untorch.runtime.errors import InvalidArgumentError

__all__ = ["ServeOptions", "parse_bytes", "parse_loras", "parse_models"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
# What URLs and gRPC carry without escapes, and no path: no slash, no leading dot.
# What browsers send: no path, no default port.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._-]+(:\d{1,5})?|[a-z]+://\[[0-9a-f:]+\](:\d{1,5})?")
# What the kernel takes.
_UDS_BYTES = 107
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class ServeOptions:
    """What is served, where, and the limits.

    Args:
        models: Packages to serve, by name. A server does not start if one of them cannot be loaded.
        repository: A folder. Its ``*.pt2`` files are served by their names without the suffix.
        poll: Seconds between two looks at the repository's files: new ones are loaded, replaced ones loaded again,
            removed ones unloaded. 0: only at the start and by the load and unload calls.
        host: Address to listen on.
        port: Port of HTTP; 0: any free one.
        uds: Path of a Unix domain socket on which HTTP listens, in place of host and port.
        grpc_port: Port of gRPC; 0: any free one; None: no gRPC.
        workers: Server processes. They share the mapped weights.
        api_keys: Keys of which each request has to carry one; empty: no key is asked for.
        cors_origins: Origins such as "https://app.example" whose pages may call the server, "*" for all; empty: none
            but its own.
        max_body: Bytes of a request's body, also after decompression.
        max_pixels: Of an image that a front end takes.
        max_batch_size: Rows of a joined call; 1: calls are not joined.
        max_wait: Seconds that a call waits for others to join.
        max_queue: Calls of a method that may wait, and prompts of a language model that may run and wait; further ones
            are refused.
        tool_format: How language models write calls of tools: "hermes", "llama3", "mistral" or "qwen3_coder". None: as
            the chat template shows.
        timeout: Seconds after which a call of a method is answered with an error, unless the request asks for less.
            0: none.
        llm_timeout: As timeout, for requests to language and speech models. They end then.
        header_timeout: Seconds in which a client has to send the head of a request.
        body_timeout: Seconds in which a client has to send a request's body.
        write_timeout: Seconds that a client may leave a response unread.
        max_connections: HTTP connections of a worker; further ones are answered with 503.
        drain: Seconds that running requests have after SIGTERM, and those of a language or speech model when it is
            unloaded or replaced.
        device: As for ``untorch.load``.
        num_runners: As for ``untorch.load``: concurrent calls of a method.
        num_threads: As for ``untorch.load``.
        cuda_graphs: As for ``untorch.load``.
        trust: The path of a trust policy that has to accept each package.
        kv_memory: As for ``untorch.llm.Engine``; so are snapshot_memory and the four of speculative decoding, where
            None is its default.
        snapshot_memory: Of kv_memory, for the states of known prefixes.
        speculative: "ngram", "draft" or None.
        num_speculative_tokens: The most tokens to propose at a time.
        prompt_lookup_min: The fewest of the last tokens that have to match.
        prompt_lookup_max: The most that are compared.
        loras: Folders of adapters (LoRA) by name: for all language models, or as "model:name" for one of them.
        max_audio: Seconds of the longest audio that is transcribed.
        log_format: "text", "json", or "none".
        tls_certificate: PEM file with the server's certificate and those between it and the root.
        tls_key: PEM file with its key.
        page: Whether ``/`` has the page.

    Raises:
        InvalidArgumentError: A value is wrong.
    """

    models: Mapping[str, str] = dataclasses.field(default_factory=dict)
    repository: str | None = None
    poll: float = 0.0
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    grpc_port: int | None = 8001
    workers: int = 1
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body: int = 64 * 2**20
    max_pixels: int = 32 * 2**20
    max_batch_size: int = 32
    max_wait: float = 0.0
    max_queue: int = 1024
    tool_format: str | None = None
    timeout: float = 60.0
    llm_timeout: float = 600.0
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    max_connections: int = 4096
    drain: float = 30.0
    device: str | None = None
    num_runners: int = 1
    num_threads: int = 0
    cuda_graphs: int = 0
    trust: str | None = None
    kv_memory: str | None = None
    snapshot_memory: str | None = None
    speculative: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    loras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    max_audio: float = 3600.0
    log_format: str = "text"
    tls_certificate: str | None = None
    tls_key: str | None = None
    page: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535), ("grpc_port", 0, 65535), ("workers", 1, 1024), ("max_body", 1, None),
            ("max_pixels", 1, None), ("max_batch_size", 1, None), ("max_queue", 1, None), ("num_runners", 1, 1024),
            ("cuda_graphs", 0, 1024), ("max_connections", 1, None),
            ("poll", 0, 86400), ("max_wait", 0, 60), ("timeout", 0, None), ("llm_timeout", 0, None), ("drain", 0, None),
            ("header_timeout", 0.01, None), ("body_timeout", 0.01, None), ("write_timeout", 0.01, None),
            ("max_audio", 1, None),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (not low <= value or (high is not None and value > high)):
                bounds = f"at least {low}" if high is None else f"from {low} to {high}"
                raise InvalidArgumentError(f"{name}: expected {bounds}, got {value}")
        if self.log_format not in ("text", "json", "none"):
            raise InvalidArgumentError(f"log_format: expected text, json or none, got {self.log_format!r}")
        if self.uds is not None and ("\0" in self.uds or not 0 < len(os.fsencode(self.uds)) <= _UDS_BYTES):
            raise InvalidArgumentError(
                f"uds: expected a path of 1 to {_UDS_BYTES} bytes, got {len(os.fsencode(self.uds))}: {self.uds!r:.80}"
            )
        if any(not key for key in self.api_keys):
            raise InvalidArgumentError("api_keys: expected keys that are not empty")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidArgumentError(
                    f"cors_origins: expected scheme://host or scheme://host:port, or *, got {origin!r:.80}"
                )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidArgumentError("tls_certificate, tls_key: expected both or none")
        if not self.models and self.repository is None:
            raise InvalidArgumentError("models: expected a package, or a repository, got neither")
        for name in (*self.models, *(part for lora in self.loras for part in lora.split(":", 1))):
            check_name(name)

    def loras_of(self, model: str) -> dict[str, str]:
        """The adapters of a language model, by name."""
        found = {}
        for key, folder in self.loras.items():
            base, colon, name = key.rpartition(":")
            if not colon or base == model:
                found[name] = folder
        return found

    def to_json(self) -> str:
        """For a worker process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServeOptions:
        """What ``to_json`` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("api_keys", "cors_origins")}})


def check_name(name: str) -> str:
    """A name under which a package can be served. Raises InvalidArgumentError."""
    if not _NAME.fullmatch(name) or len(name) > 200:
        raise InvalidArgumentError(
            f"model name: expected letters, digits and . _ + - (at most 200, none of . + - first), got {name!r}: "
            "name the package with NAME=FILE"
        )
    return name


def parse_models(texts: list[str]) -> dict[str, str]:
    """``["a.pt2", "name=b.pt2"]`` → names and absolute paths. Raises InvalidArgumentError."""
    models: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or os.path.exists(text):
            name, path = "", text
        name = check_name(name or os.path.basename(path).removesuffix(".pt2"))
        if name in models:
            raise InvalidArgumentError(f"two packages are named {name!r}: name one of them with NAME={path}")
        models[name] = os.path.abspath(path)
    return models


def parse_loras(texts: list[str]) -> dict[str, str]:
    """``["sql=adapters/sql", "model:sql=adapters/sql"]`` → names and absolute paths. Raises InvalidArgumentError."""
    loras: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise InvalidArgumentError(f"lora: expected NAME=DIR or MODEL:NAME=DIR, got {text!r}")
        if name in loras:
            raise InvalidArgumentError(f"lora: two adapters are named {name!r}")
        loras[name] = os.path.abspath(path)
    return loras


def parse_bytes(text: str, what: str) -> int:
    """``"64MiB"`` → 67108864. Raises InvalidArgumentError."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise InvalidArgumentError(f"{what}: expected bytes, or a size such as 64MiB or 1GB, got {text!r}")
    return int(float(match[1]) * unit)
