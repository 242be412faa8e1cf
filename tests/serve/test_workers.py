"""Several worker processes: one address, one set of metrics, loads and unloads in all of them."""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest

from tests.serve.process import Server, eventually, linear, serve

X = [[1.0, 2.0, 3.0, 4.0]]


@pytest.fixture(scope="module")
def server(package: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("workers")
    repository = folder / "repository"
    repository.mkdir()
    shutil.copy(package, repository / "a.pt2")
    with serve(folder, f"own={package}", "--repository", repository, "--workers", "2", "--log-format", "json") as one:
        yield one


def test_workers_share_the_address_and_the_mapped_file(server: Server, package: pathlib.Path) -> None:
    workers = server.workers()
    assert len(workers) == 2
    for pid in workers:
        assert str(package) in pathlib.Path(f"/proc/{pid}/maps").read_text()
    for _ in range(40):
        status, document = server.infer("own.linear", X)
        assert (status, document["outputs"][0]["data"]) == (200, linear(X)[0])
    processes = set(re.findall(r'/infer 200 .*?"process": (\d+)', server.log.read_text()))
    assert processes <= set(map(str, workers))


def test_loads_and_unloads_reach_all_workers(server: Server) -> None:
    def states(name: str) -> set[int]:
        return {server.infer(name, X)[0] for _ in range(20)}

    assert states("a.linear") == {200}
    assert server.json("POST", "/v2/repository/models/a/unload") == (200, {})
    assert states("a.linear") == {404}
    assert server.json("POST", "/v2/repository/models/a/load") == (200, {})
    assert states("a.linear") == {200}
    status, document = server.json("POST", "/v2/repository/models/none/load")
    assert (status, document["error"][:28]) == (404, "no package is named 'none': ")


def test_metrics_are_those_of_all_workers(server: Server) -> None:
    def count() -> float:
        text = server.request("GET", "/metrics")[2].decode()
        found = re.search(r'untorch_requests_total\{code="ok",model="own.linear",protocol="http"\} ([\d.]+)', text)
        return float(found[1]) if found else 0

    before = count()
    for _ in range(30):
        assert server.infer("own.linear", X)[0] == 200
    assert count() == before + 30
    eventually(lambda: re.search(r"untorch_models_loaded 16\.0", server.request("GET", "/metrics")[2].decode()))
