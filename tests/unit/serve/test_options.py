"""Options: checked once, and carried to workers."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from untorch.runtime.errors import InvalidArgumentError
from untorch.serve.options import ServeOptions, parse_bytes, parse_loras, parse_models

MODELS = {"m": "/m.pt2"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"models": {}}, "models: expected a package, or a repository, got neither"),
        ({"port": 65536}, "port: expected from 0 to 65535, got 65536"),
        ({"workers": 0}, "workers: expected from 1 to 1024, got 0"),
        ({"cuda_graphs": 1025}, "cuda_graphs: expected from 0 to 1024, got 1025"),
        ({"max_batch_size": 0}, "max_batch_size: expected at least 1, got 0"),
        ({"log_format": "xml"}, "log_format: expected text, json or none, got 'xml'"),
        ({"api_keys": ("",)}, "api_keys: expected keys that are not empty"),
        ({"cors_origins": ("https://a.b/",)}, "cors_origins: expected scheme://host or scheme://host:port, or *, got 'https://a.b/'"),
        ({"tls_key": "k.pem"}, "tls_certificate, tls_key: expected both or none"),
        ({"models": {"a/b": "x"}}, "model name: expected letters, digits and . _ + - (at most 200, none of . + - first), got 'a/b': name the package with NAME=FILE"),
    ],
)  # fmt: skip
def test_wrong_values(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ServeOptions(**{"models": MODELS, **fields})
    assert str(caught.value) == text


def test_adapters(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loras = parse_loras(["sql=a/b", "m:chat=/c", "other:chat=/d"])
    assert loras == {"sql": f"{tmp_path}/a/b", "m:chat": "/c", "other:chat": "/d"}
    options = ServeOptions(models=MODELS, loras=loras)
    assert options.loras_of("m") == {"sql": f"{tmp_path}/a/b", "chat": "/c"}
    assert options.loras_of("x") == {"sql": f"{tmp_path}/a/b"}
    for text, message in (
        ("sql", "lora: expected NAME=DIR or MODEL:NAME=DIR, got 'sql'"),
        ("=x", "lora: expected NAME=DIR or MODEL:NAME=DIR, got '=x'"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            parse_loras([text])
    with pytest.raises(InvalidArgumentError, match="two adapters are named 'a'"):
        parse_loras(["a=1", "a=2"])
    with pytest.raises(InvalidArgumentError, match="model name: expected letters"):
        ServeOptions(models=MODELS, loras={"a/b": "x"})


def test_a_worker_gets_the_same() -> None:
    options = ServeOptions(
        models=MODELS,
        api_keys=("a", "b"),
        cors_origins=("*", "http://a:1"),
        grpc_port=None,
        max_wait=0.5,
        loras={"a": "/b"},
    )
    assert ServeOptions.from_json(options.to_json()) == options


def test_names_of_models(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path)
    assert parse_models(["a.b.pt2", "n=x/c.pt2"]) == {"a.b": f"{folder}/a.b.pt2", "n": f"{folder}/x/c.pt2"}
    (tmp_path / "k=v.pt2").touch()
    with pytest.raises(InvalidArgumentError, match="got 'k=v'"):
        parse_models(["k=v.pt2"])
    with pytest.raises(InvalidArgumentError, match="two packages are named 'a': name one of them with NAME=x/a.pt2"):
        parse_models(["a.pt2", "x/a.pt2"])


@pytest.mark.parametrize(
    ("text", "value"), [("17", 17), ("64MiB", 64 << 20), ("1.5 kB", 1500), ("2gib", 2 << 30)]
)  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text, "--max-body") == value


@pytest.mark.parametrize("text", ["", "-1", "1TB", "x", "1e3"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--max-body: expected bytes, or a size such as 64MiB or 1GB"):
        parse_bytes(text, "--max-body")
