"""One local cluster for all tests of Ray: ``python driver.py`` runs what its standard input names, line by line.

A line is ``["embed", [arguments of the example]]`` or ``["serve", [package, language model, front end]]``; each answer
is a line of JSON. The cluster is small: two cores for all, and an object store of 80 MB.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import io
import json
import pathlib
import runpy
import socket
import sys
import traceback
import urllib.request
from typing import Any

import numpy as np
import ray
from PIL import Image

EXAMPLE = pathlib.Path(__file__).resolve().parents[3] / "examples" / "ray" / "embed_sentences.py"


def embed(*arguments: str) -> Any:
    """The example's report. It finds the cluster that is there."""
    argv, init = sys.argv, ray.init
    sys.argv, ray.init = [str(EXAMPLE), *arguments], lambda **_: None
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        sys.argv, ray.init = argv, init
    return json.loads(printed.getvalue().splitlines()[-1])


def serve_models(package: str, language_package: str, colours: str) -> Any:
    """Calls a package and a language model by handles, over HTTP, and by OpenAI's API; and a front end.

    Raises AssertionError.
    """
    from ray import serve

    from untorch.integrations.ray import application, language_model, openai, pipeline

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    served = bool(importlib.util.find_spec("untorch.serve") and importlib.util.find_spec("untorch.serve.openai"))
    share = {"ray_actor_options": {"num_cpus": 0}}  # they stay until the cluster ends, which takes less time
    options: dict[str, Any] = {"kv_memory": "4MiB", "num_threads": 1, "deployment": share}
    targets = [
        serve.RunTarget(application(package, num_threads=1, batch_wait_timeout_s=0.01, deployment=share), "rows", "/"),
        serve.RunTarget(language_model(language_package, **options), "lm", "/lm"),
    ]
    if served:
        targets += [
            serve.RunTarget(openai(language_package, name="tiny", **options), "openai", "/openai"),
            serve.RunTarget(pipeline(colours, num_threads=1, deployment=share), "labels", "/labels"),
        ]
    handles = serve.run_many(targets)  # their replicas start at the same time

    def ask(path: str, document: Any) -> str:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    error = call_rows(handles[0], ask)
    chat = call_language_model(handles[1], ask)
    if served:
        messages = [{"role": "user", "content": "hello"}]
        document = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
        found = json.loads(ask("/openai/v1/chat/completions", document))
        assert found["choices"][0]["message"]["content"] == chat
        found = json.loads(ask("/labels/v1/pipeline/colours?top_k=1", picture("lime")))
        assert [one["label"] for one in found] == ["green"]
    return {"ok": True, "error": error, "openai": served}


def picture(colour: str) -> bytes:
    """A PNG."""
    file = io.BytesIO()
    Image.new("RGB", (30, 20), colour).save(file, "PNG")
    return file.getvalue()


def call_rows(handle: Any, ask: Any) -> str:
    """Requests of several shapes at a time; what a bad one is told."""
    rng = np.random.default_rng(0)
    given = [(rng.integers(0, 9, (1 + i % 3, 2 + i % 4)), rng.random(1 + i % 3)) for i in range(60)]
    expected = [ids * scale.astype(np.float32)[:, None] for ids, scale in given]
    futures = [handle.predict.remote({"ids": ids, "scale": scale}, method="rows") for ids, scale in given]
    for future, one in zip(futures, expected, strict=True):
        np.testing.assert_allclose(future.result()["scaled"], one, rtol=1e-6)

    def post(item: Any) -> Any:
        ids, scale = item
        inputs = {"ids": ids.tolist(), "scale": scale.tolist()}
        return json.loads(ask("/", {"method": "rows", "inputs": inputs}))["outputs"]["scaled"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for result, one in zip(pool.map(post, given), expected, strict=True):
            np.testing.assert_allclose(result, one, rtol=1e-5)
    try:
        handle.predict.remote({"ids": [[1]], "scale": [1]}, method="rows").result()
    except Exception as raised:
        return str(raised)
    return ""


def call_language_model(handle: Any, ask: Any) -> str:
    """A text whole, in pieces and over HTTP; the answer to a chat."""
    params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = handle.generate.remote("Once", params).result()["completions"][0]["token_ids"]
    chunks = handle.options(stream=True).stream.remote("Once", params)
    parts = [token for chunk in chunks for token in chunk["token_ids"]]
    lines = ask("/lm", {"prompt": "Once", "params": params, "stream": True}).split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert len(whole) == 6
    assert whole == parts == [token for event in events for token in event["token_ids"]]
    assert lines[-2:] == ["data: [DONE]", ""]
    messages = [{"role": "user", "content": "hello"}]
    text: str = json.loads(ask("/lm", {"messages": messages, "params": params}))["completions"][0]["text"]
    return text


def main() -> None:
    """Answers until its input ends."""
    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        kind, arguments = json.loads(line)
        try:
            result = {"embed": embed, "serve": serve_models}[kind](*map(str, arguments))
        except BaseException:
            result = {"failed": traceback.format_exc()}
        print(json.dumps(result), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
