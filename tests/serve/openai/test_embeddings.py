"""Embeddings of a recipe with the unmodified ``openai`` client, against ``untorch serve`` in a process without torch."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests import packages
from tests.serve.process import RUN_PYTHON, Server, serve

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # those of the client's types

TEXTS = ["the cat sat on a mats .", "dogs ran", "far", "a dog ran far , the cat sat on this mat", "photo of a cat"]


@pytest.fixture(scope="module")
def package() -> pathlib.Path:
    return packages.compiled(pathlib.Path(__file__).with_name("embedding_models.py"), "minilm")


@pytest.fixture(scope="module")
def server(package: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("embeddings"), package) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_those_of_the_pipeline(client: Any, server: Server, package: pathlib.Path) -> None:
    code = (
        "import json, sys, untorch\n"
        "with untorch.pipeline(sys.argv[1]) as one: print(json.dumps([row.tolist() for row in one(sys.argv[2:])]))"
    )
    done = subprocess.run([RUN_PYTHON, "-c", code, str(package), *TEXTS], capture_output=True, text=True, check=True)
    expected = np.array(json.loads(done.stdout), np.float32)
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda at: client.embeddings.create(model="minilm", input=TEXTS[at % 5]), range(40))
        for at, one in enumerate(answers):
            np.testing.assert_allclose(one.data[0].embedding, expected[at % 5], atol=1e-5)
    assert 'untorch_batch_rows_count{model="minilm"}' in server.request("GET", "/metrics")[2].decode()


def test_refusals(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="expected at most 40 tokens"):
        client.embeddings.create(model="minilm", input="cat " * 60)
    with pytest.raises(openai.BadRequestError, match="use /v1/embeddings"):
        client.completions.create(model="minilm", prompt="a")
    assert [one.id for one in client.models.list()] == ["minilm"]
