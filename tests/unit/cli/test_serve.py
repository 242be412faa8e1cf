"""``untorch serve``: what the command line makes of its flags. tests/serve runs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from untorch.serve import run as module
from untorch.serve.addresses import Addresses
from untorch.serve.options import ServeOptions


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options of servers that would have run."""
    seen: list[ServeOptions] = []

    def run(options: ServeOptions, announce: Callable[[Addresses], None]) -> None:
        seen.append(options)
        announce(Addresses(options, 81, options.grpc_port))

    monkeypatch.setattr(module, "run", run)
    return seen


def test_flags(cli: Callable[..., Any], ran: list[ServeOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNTORCH_API_KEY", "two")
    done = cli(
        "serve", "/m.pt2", "n=/x.pt2", "--max-wait", 5, "--max-body", "2KiB", "--api-key", "one", "--grpc-port", -1,
        "--num-runners", 3, "--workers", 2, "--repository", "/models", "--poll", 2, "--llm-timeout", 0,
        "--cors-origin", "https://a.b", "--cors-origin", "http://c:1", "--kv-memory", "1GiB", "--snapshot-memory", "1MiB",
        "--uds", "/run/u.sock",
    )  # fmt: skip
    assert (done.code, done.out) == (0, "ready: unix:/run/u.sock\n")
    assert ran == [
        ServeOptions(
            models={"m": "/m.pt2", "n": "/x.pt2"}, max_wait=0.005, max_body=2048, api_keys=("one", "two"),
            grpc_port=None, num_runners=3, workers=2, repository="/models", poll=2, llm_timeout=0,
            cors_origins=("https://a.b", "http://c:1"), kv_memory="1GiB", snapshot_memory="1MiB",
            uds="/run/u.sock",
        )
    ]  # fmt: skip


def test_defaults_are_those_of_the_options(cli: Callable[..., Any], ran: list[ServeOptions]) -> None:
    done = cli("serve", "/m.pt2", "--json")
    assert done.document() == {"http": "http://127.0.0.1:81", "grpc": "127.0.0.1:8001"}
    assert ran == [ServeOptions(models={"m": "/m.pt2"})]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "models: expected a package, or a repository, got neither"),
        (("/m.pt2", "--max-body", "big"), "--max-body: expected bytes, or a size such as 64MiB or 1GB, got 'big'"),
        (("/m.pt2", "--log-format", "xml"), "log_format: expected text, json or none, got 'xml'"),
        (("/a/m.pt2", "/b/m.pt2"), "two packages are named 'm': name one of them with NAME=/b/m.pt2"),
    ],
)
def test_wrong_arguments(cli: Callable[..., Any], arguments: tuple[str, ...], text: str) -> None:
    done = cli("serve", *arguments)
    assert (done.code, done.err) == (1, f"untorch: {text}\n")


def test_packages_that_are_missing(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("grpc", "uvicorn") else find(name))
    done = cli("serve", tmp_path / "m.pt2")
    assert (done.code, done.err) == (1, "untorch: untorch serve needs uvicorn, grpc: pip install 'untorch[serve]'\n")
