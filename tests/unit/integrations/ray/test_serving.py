"""A replica of the Ray Serve application, with a stand-in for serve.batch; tests/integrations/ray has the real one."""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import untorch
from untorch.integrations.ray import serving


class Batch:
    """serve.batch: what comes within an iteration of the loop is one call, up to the size."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, **options: Any) -> Callable[[Any], Any]:
        self.options.append(options)

        def decorate(function: Any) -> Any:
            waiting: list[tuple[Any, asyncio.Future[Any]]] = []

            async def run() -> None:
                while waiting:
                    taken = [waiting.pop(0)]
                    size = options["batch_size_fn"]
                    while waiting and size([i for i, _ in (*taken, waiting[0])]) <= options["max_batch_size"]:
                        taken.append(waiting.pop(0))
                    self.sizes.append([size([item]) for item, _ in taken])
                    results = await function([item for item, _ in taken])
                    for (_, future), result in zip(taken, results, strict=True):
                        future.set_result(result)

            async def queue(item: Any) -> Any:
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                waiting.append((item, future))
                if len(waiting) == 1:
                    loop.call_soon(lambda: tasks.append(loop.create_task(run())))
                return await future

            tasks: list[Any] = []
            return queue

        return decorate


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    made = Batch()
    monkeypatch.setattr(serving, "import_serve", lambda: SimpleNamespace(batch=made))
    return made


@pytest.fixture
def server(rows_package: pathlib.Path, batch: Batch) -> Iterator[serving.ModelServer]:
    made = serving.ModelServer(str(rows_package), 6, 0.01, {"num_threads": 1, "num_runners": 2})
    yield made
    made._program.close()


def scaled(count: int, length: int = 3) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(count)
    ids, scale = rng.integers(0, 9, (count, length)), rng.random(count)
    return {"ids": ids, "scale": scale}, ids * scale.astype(np.float32)[:, None]


def test_requests_are_joined(server: serving.ModelServer, batch: Batch) -> None:
    given = [scaled(count, length) for count, length in [(1, 3), (2, 3), (2, 4), (3, 3), (1, 4), (2, 3), (8, 3)]]

    async def main() -> None:
        results = await asyncio.gather(*(server.predict(inputs, "rows") for inputs, _ in given))
        for result, (_, expected) in zip(results, given, strict=True):
            assert list(result) == ["scaled", "total", "half", "odd"]
            np.testing.assert_allclose(result["scaled"], expected, rtol=1e-6)

    asyncio.run(main())
    assert batch.sizes == [
        [1, 2, 2],
        [3, 1, 2],
    ]  # eight rows are more than the queue takes, and not more than the method
    assert {(o["max_batch_size"], o["batch_wait_timeout_s"], o["max_concurrent_batches"]) for o in batch.options} == {
        (6, 0.01, 2)
    }
    assert len(batch.options) == 2  # half has no batch dimension


def test_a_bad_request_does_not_touch_others(server: serving.ModelServer, batch: Batch) -> None:
    good, expected = scaled(1)
    bad = {"ids": np.ones((1, 3), np.int64), "scale": np.ones(2)}
    worse = {"ids": np.ones((2, 3), np.int64), "scale": np.ones(1)}

    async def main() -> None:
        requests = [server.predict(inputs, "rows") for inputs in (good, bad, worse, good)]
        results = await asyncio.gather(*requests, return_exceptions=True)
        for i in (0, 3):
            np.testing.assert_allclose(results[i]["scaled"], expected, rtol=1e-6)  # type: ignore[index]
        assert all(isinstance(results[i], untorch.InvalidArgumentError) for i in (1, 2))

    asyncio.run(main())
    assert batch.sizes == [[1, 1, 2, 1]]


def test_a_failed_call_is_tried_alone(server: serving.ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    run = serving.submit_run

    async def fails_together(method: Any, arrays: Any) -> Any:
        calls.append(len(arrays[0]))
        if len(arrays[0]) != 1:
            raise untorch.ModelError("too many")
        return await run(method, arrays)

    monkeypatch.setattr(serving, "submit_run", fails_together)

    async def main() -> None:
        inputs, expected = scaled(1)
        two, _ = scaled(2)
        results = await asyncio.gather(
            *(server.predict(item, "rows") for item in (inputs, two, inputs)), return_exceptions=True
        )
        np.testing.assert_allclose(results[0]["scaled"], expected, rtol=1e-6)  # type: ignore[index]
        assert isinstance(results[1], untorch.ModelError)
        np.testing.assert_allclose(results[2]["scaled"], expected, rtol=1e-6)  # type: ignore[index]

    asyncio.run(main())
    assert calls == [4, 1, 2, 1]


def test_wrong_requests(server: serving.ModelServer) -> None:
    async def main() -> None:
        for inputs, method, kind, text in (
            ({"ids": 1}, "rows", untorch.InvalidArgumentError, "expected the inputs ids, scale, got ids"),
            ([1], "rows", untorch.InvalidArgumentError, "expected the inputs ids, scale, got list"),
            ({}, "rows", untorch.InvalidArgumentError, "expected the inputs ids, scale, got none"),
            ({}, "nope", untorch.UnknownMethodError, "has no method 'nope'"),
            ({}, 3, untorch.ArgumentTypeError, "method: expected a name, got 3"),
        ):
            with pytest.raises(kind, match=text):
                await server.predict(inputs, method)  # type: ignore[arg-type]

    asyncio.run(main())


def test_methods_with_buffers_are_refused(own_package: pathlib.Path, batch: Batch) -> None:
    server = serving.ModelServer(str(own_package), 6, 0.01, {})
    with pytest.raises(untorch.UnsupportedError, match="^method 'counter' keeps values in buffers from call to call"):
        asyncio.run(server.predict({"x": np.ones(4, np.float32)}, "counter"))
    response = asyncio.run(server(request("POST", b'{"method": "counter", "inputs": {"x": [1, 2, 3, 4]}}')))
    assert response.status_code == 400
    response = asyncio.run(server(request("GET")))
    assert list(json.loads(bytes(response.body))["methods"]) == ["alias", "linear", "types"]
    server._program.close()


def test_wrong_options_are_found_before_a_replica_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "import_serve", lambda: None)
    with pytest.raises(untorch.ArgumentTypeError, match="got 'num_thread': did you mean 'num_threads'"):
        serving.application("model.pt2", num_thread=1)


def test_a_lost_gpu_is_not_healthy(server: serving.ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(method: Any, arrays: Any) -> Any:
        raise untorch.DeviceLostError("cuda:0 is lost")

    server.check_health()
    monkeypatch.setattr(serving, "submit_run", lost)

    async def main() -> None:
        with pytest.raises(untorch.DeviceLostError):
            await server.predict({"x": np.ones((2, 3), np.float32)}, "half")

    asyncio.run(main())
    with pytest.raises(untorch.DeviceLostError, match="cuda:0 is lost"):
        server.check_health()


def request(method: str, body: bytes = b"") -> Any:
    requests = pytest.importorskip("starlette.requests")

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return requests.Request({"type": "http", "method": method, "headers": []}, receive)


def test_http(server: serving.ModelServer) -> None:
    async def answer(method: str, document: Any = None, body: bytes | None = None) -> tuple[int, Any]:
        response = await server(request(method, json.dumps(document).encode() if body is None else body))
        return response.status_code, json.loads(bytes(response.body))

    async def main() -> None:
        status, document = await answer("GET")
        assert status == 200 and list(document["methods"]) == ["embed", "half", "rows"]
        assert document["methods"]["rows"]["inputs"] == [
            {"name": "ids", "dtype": "int64", "shape": [-1, -1]}, {"name": "scale", "dtype": "float32", "shape": [-1]},
        ]  # fmt: skip
        status, document = await answer("POST", {"method": "rows", "inputs": {"ids": [[1, 2]], "scale": [2]}})
        assert (status, document) == (
            200, {"outputs": {"scaled": [[2.0, 4.0]], "total": [6.0], "half": [[2.0, 4.0]], "odd": [[True, False]]}},
        )  # fmt: skip
        infinite = {"method": "rows", "inputs": {"ids": [[1, 0]], "scale": [float("inf")]}}
        status, document = await answer("POST", infinite)
        assert (status, document["outputs"]["scaled"]) == (200, [["inf", "nan"]])
        for body, text in (
            (b"{", "expected JSON: "),
            (b"[]", "expected a JSON object, got list"),
            (b'{"input": {}}', "expected the fields inputs, method, got input"),
            (b'{"method": "nope"}', "has no method 'nope'"),
            (
                b'{"method": "rows", "inputs": {"ids": [[1], [1, 2]], "scale": [1, 2]}}',
                "expected rows of numbers of one shape",
            ),
        ):
            status, document = await answer("POST", body=body)
            assert status == 400 and text in document["error"], document
        assert (await answer("PUT"))[0] == 405

    asyncio.run(main())


def test_a_body_that_is_too_large(monkeypatch: pytest.MonkeyPatch, server: serving.ModelServer) -> None:
    monkeypatch.setattr(serving, "_MOST_BODY", 10)
    response = asyncio.run(server(request("POST", b" " * 11)))
    assert (response.status_code, json.loads(bytes(response.body))) == (400, {"error": "expected at most 10 bytes"})


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray.serve", raising=False)
    with pytest.raises(
        untorch.UnsupportedError, match=r"^untorch.integrations.ray needs Ray: pip install 'untorch\[ray\]'$"
    ):
        serving.application("model.pt2")
