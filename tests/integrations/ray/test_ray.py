"""Ray Data with a killed worker, and Ray Serve, each in a process of its own on a local cluster."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest

import untorch
from tests import packages

pytestmark = [pytest.mark.slow]
pytest.importorskip("ray")

EXAMPLE = packages.ROOT / "examples" / "ray" / "embed_sentences.py"


@pytest.fixture(scope="module")
def package() -> pathlib.Path:
    return packages.compiled(packages.ROOT / "tests" / "unit" / "models.py", "rows")


def run(*command: object) -> Any:
    """What the script prints as JSON, between lines of Ray's."""
    paths = [str(pathlib.Path(untorch.__path__[0]).parent), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_nothing_is_lost_or_doubled_when_workers_are_killed(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    parquet = pytest.importorskip("pyarrow.dataset")
    np = pytest.importorskip("numpy")
    shutil.copy(package, tmp_path / "minilm.pt2")
    words = sorted(set(re.findall(r"[A-Za-z]+", EXAMPLE.read_text())))[:63]
    vocabulary = {"[UNK]": 0} | {word: i + 1 for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = ["--sentences", 4000, "--method", "embed", "--kill", 700, 2500]
    report = run(EXAMPLE, tmp_path, "--output", tmp_path / "out", *options)
    assert report == {"sentences": 4000, "seconds": report["seconds"], "killed": 2, "each_once": True}
    table = parquet.dataset(tmp_path / "out", format="parquet").to_table().sort_by("id")
    assert table.column_names == ["id", "sentence", "output"]
    vectors = np.array(table["output"].to_pylist())
    assert vectors.shape == (4000, 8)
    with untorch.load(package) as program:
        for i in (0, 700, 2500, 3999):
            ids = np.array([tokenizer.encode(table["sentence"][i].as_py()).ids])
            np.testing.assert_allclose(vectors[i], program.embed(ids, np.ones_like(ids))[0], rtol=1e-5)


SERVE = r"""
import concurrent.futures, importlib.util, json, sys, urllib.request
import numpy as np, ray
from ray import serve
from untorch.integrations.ray import application, language_model, openai

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
app = application(sys.argv[1], num_threads=1, batch_wait_timeout_s=0.01, deployment={"ray_actor_options": {"num_cpus": 1}})
handle = serve.run(app)

def expect(ids, scale):
    return ids * scale.astype(np.float32)[:, None]

rng = np.random.default_rng(0)
given = [(rng.integers(0, 9, (1 + i % 3, 2 + i % 4)), rng.random(1 + i % 3)) for i in range(60)]
futures = [handle.predict.remote({"ids": ids, "scale": scale}, method="rows") for ids, scale in given]
for future, (ids, scale) in zip(futures, given):
    np.testing.assert_allclose(future.result()["scaled"], expect(ids, scale), rtol=1e-6)

def post(item):
    ids, scale = item
    body = json.dumps({"method": "rows", "inputs": {"ids": ids.tolist(), "scale": scale.tolist()}}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[2]}/", body, timeout=60) as answer:
        return json.load(answer)["outputs"]["scaled"]

with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for result, (ids, scale) in zip(pool.map(post, given), given):
        np.testing.assert_allclose(result, expect(ids, scale), rtol=1e-5)
error = ""
try:
    handle.predict.remote({"ids": [[1]], "scale": [1]}, method="rows").result()
except Exception as raised:
    error = str(raised)

def ask(path, document):
    request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[2]}{path}", json.dumps(document).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()

options = {"kv_memory": "4MiB", "num_threads": 1, "deployment": {"ray_actor_options": {"num_cpus": 0.5}}}
params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
handle = serve.run(language_model(sys.argv[3], **options), name="lm", route_prefix="/lm")
whole = handle.generate.remote("Once", params).result()["completions"][0]["token_ids"]
parts = [token for chunk in handle.options(stream=True).stream.remote("Once", params) for token in chunk["token_ids"]]
lines = ask("/lm", {"prompt": "Once", "params": params, "stream": True}).split("\n\n")
events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
assert len(whole) == 6 and whole == parts == [token for event in events for token in event["token_ids"]]
assert lines[-2:] == ["data: [DONE]", ""]
messages = [{"role": "user", "content": "hello"}]
chat = json.loads(ask("/lm", {"messages": messages, "params": params}))["completions"][0]["text"]
served = importlib.util.find_spec("untorch.serve") and importlib.util.find_spec("untorch.serve.openai")
if served:
    serve.run(openai(sys.argv[3], name="tiny", **options), name="openai", route_prefix="/openai")
    document = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
    assert json.loads(ask("/openai/v1/chat/completions", document))["choices"][0]["message"]["content"] == chat
print(json.dumps({"ok": True, "error": error, "openai": bool(served)}))
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.exhaustive
def test_serve(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    model = packages.compiled(pathlib.Path(__file__).with_name("language_model.py"), "lm")
    document = run(script, package, port, model)
    assert document["ok"]
    assert re.search(r"method 'rows', input 'ids': expected int64\[\w+, \w+\], got int64\[1, 1\]", document["error"])
