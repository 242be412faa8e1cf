"""Ray Data with killed workers, and Ray Serve, on one local cluster in a process of its own: driver.py."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import untorch
from tests import packages

pytestmark = [pytest.mark.slow]
pytest.importorskip("ray")
pytest.importorskip("PIL")

DRIVER = pathlib.Path(__file__).with_name("driver.py")
EXAMPLE = packages.ROOT / "examples" / "ray" / "embed_sentences.py"


class Driver:
    """The process with the cluster, which runs one thing after the other."""

    def __init__(self, process: subprocess.Popen[str], log: pathlib.Path) -> None:
        self._process, self._log = process, log
        assert self._answer() == {"ready": True}

    def run(self, kind: str, *arguments: object) -> Any:
        """The answer. Fails with what the process printed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, [*map(str, arguments)]]) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        assert "failed" not in found, found["failed"]
        return found

    def _answer(self) -> Any:
        """A line of JSON, between lines of Ray's."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(self._log.read_text()[-5000:])


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    paths = [str(pathlib.Path(untorch.__path__[0]).parent), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "RAY_DEDUP_LOGS": "0",
        # Ray's workers give way to all other processes by default: the tests beside these ones left them little.
        "RAY_worker_niceness": "0",
        # A proxy that needs longer to start is killed, which it may on a busy machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    }  # fmt: skip
    log = tmp_path_factory.mktemp("ray") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(DRIVER)], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield Driver(process, log)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def package() -> pathlib.Path:
    return packages.compiled(packages.ROOT / "tests" / "unit" / "models.py", "rows")


def test_nothing_is_lost_or_doubled_when_workers_are_killed(
    driver: Driver, package: pathlib.Path, tmp_path: pathlib.Path
) -> None:
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
    report = driver.run("embed", tmp_path, "--output", tmp_path / "out", *options)
    assert report == {"sentences": 4000, "seconds": report["seconds"], "killed": 2, "each_once": True}
    table = parquet.dataset(tmp_path / "out", format="parquet").to_table().sort_by("id")
    assert table.column_names == ["id", "sentence", "output"]
    vectors = np.array(table["output"].to_pylist())
    assert vectors.shape == (4000, 8)
    with untorch.load(package) as program:
        for i in (0, 700, 2500, 3999):
            ids = np.array([tokenizer.encode(table["sentence"][i].as_py()).ids])
            np.testing.assert_allclose(vectors[i], program.embed(ids, np.ones_like(ids))[0], rtol=1e-5)


def test_serve(driver: Driver, package: pathlib.Path) -> None:
    # Those that the tests of the server have, too.
    model = packages.compiled(packages.ROOT / "tests" / "serve" / "openai" / "models.py", "tiny")
    colours = packages.compiled(packages.ROOT / "tests" / "serve" / "front_end_models.py", "colours")
    document = driver.run("serve", package, model, colours)
    assert document["ok"]
    assert re.search(r"method 'rows', input 'ids': expected int64\[\w+, \w+\], got int64\[1, 1\]", document["error"])
