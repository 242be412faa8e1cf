"""Processes that are killed or told to end, and files that change, while calls run."""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.serve.process import Server, eventually, linear, serve

X = [[1.0, 2.0, 3.0, 4.0]]
# What a call ends with whose worker was killed: before its answer, or between the answer's headers and its body.
LOST = (OSError, http.client.IncompleteRead)


def test_a_worker_that_is_killed_is_replaced(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Calls of other workers go on; only those that the killed one had are lost."""
    with serve(tmp_path, f"own={package}", "--workers", "2") as server:
        first = server.workers()
        end, statuses, lost = threading.Event(), [], []

        def call() -> None:
            while not end.is_set():
                try:
                    statuses.append(server.infer("own.linear", X)[0])
                except LOST as error:
                    lost.append(error)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        os.kill(first[0], signal.SIGKILL)
        after = eventually(lambda: len(new := server.workers()) == 2 and first[0] not in new and new)
        time.sleep(0.3)
        end.set()
        for thread in threads:
            thread.join()
        assert first[1] in after
        assert set(statuses) == {200}
        assert len(lost) <= 2 < len(statuses)
        # The new one serves too, and ends as the others do.
        os.kill(first[1], signal.SIGKILL)
        eventually(lambda: server.json("GET", "/v2/health/ready")[0] == 200)
        assert server.infer("own.linear", X)[0] == 200
        assert server.stop() == 0


def test_workers_that_are_killed_again_and_again(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One that has not loaded its packages yet takes no requests from the others."""
    with serve(tmp_path, f"own={package}", "--workers", "2") as server:
        end, statuses, lost = threading.Event(), [], []

        def call() -> None:
            while not end.is_set():
                try:
                    statuses.append(server.infer("own.linear", X)[0])
                except LOST as error:
                    lost.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        for count in range(3):
            os.kill(server.workers()[0], signal.SIGKILL)
            eventually(lambda count=count: server.log.read_text().count("info serving own.") > 2 + count)
        end.set()
        thread.join()
        assert set(statuses) == {200}
        assert len(lost) <= 3


def test_workers_end_with_their_supervisor(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with serve(tmp_path, f"own={package}", "--workers", "2", "--drain", "1") as server:
        workers = server.workers()
        server.process.kill()
        server.process.wait()
        eventually(lambda: not any(pathlib.Path(f"/proc/{pid}/exe").exists() for pid in workers))


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, and a server that inherits that leaves it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("without_nohup")
@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (1, signal.SIGHUP)])
def test_sigterm_drains(package: pathlib.Path, tmp_path: pathlib.Path, workers: int, number: int) -> None:
    """A request that is under way is answered; new connections are refused; the exit code is 0."""
    with serve(tmp_path, f"own={package}", "--workers", str(workers), "--drain", "10") as server:
        host, port = server.http.split(":")
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": X}]}).encode()
        slow = socket.create_connection((host, int(port)), timeout=20)
        idle = socket.create_connection((host, int(port)), timeout=20)
        slow.sendall(
            b"POST /v2/models/own.linear/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body[:10]
        )
        time.sleep(0.3)
        server.process.send_signal(number)

        def refused() -> bool:
            try:
                socket.create_connection((host, int(port)), timeout=5).close()
            except ConnectionRefusedError:
                return True
            return False

        eventually(refused)
        assert server.process.poll() is None
        slow.sendall(body[10:])
        answer = b""
        while part := slow.recv(65536):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer
        assert server.process.wait(20) == 0
        slow.close()
        idle.close()


def test_the_drain_has_a_limit(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with serve(tmp_path, f"own={package}", "--drain", "1") as server:
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port)), timeout=20) as stuck:
            stuck.sendall(b"POST /v2/models/own.linear/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            time.sleep(0.3)
            begin = time.monotonic()
            assert server.stop(timeout=15) == 0
            assert 0.5 < time.monotonic() - begin < 10
            assert stuck.recv(65536).startswith(b"HTTP/1.1 503")


def test_a_grpc_stream_does_not_hold_up_the_end(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    client_module = pytest.importorskip("tritonclient.grpc")
    with (
        serve(tmp_path, f"own={package}", "--drain", "1") as server,
        client_module.InferenceServerClient(server.grpc) as client,
    ):
        client.start_stream(lambda result, error: None)
        assert client.is_server_live()
        begin = time.monotonic()
        assert server.stop(timeout=15) == 0
        assert time.monotonic() - begin < 10
        client.stop_stream()


def test_a_package_that_is_removed_is_still_served(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copy = tmp_path / "copy.pt2"
    shutil.copy(package, copy)
    with serve(tmp_path, copy, f"own={package}") as server:
        assert server.infer("copy.linear", X)[0] == 200
        copy.unlink()
        assert server.infer("copy.linear", X)[1]["outputs"][0]["data"] == linear(X)[0]
        status, document = server.json("POST", "/v2/repository/models/copy/load")
        assert status == 500
        assert "copy.pt2" in document["error"]
        assert server.infer("copy.linear", X)[0] == 200  # what was loaded stays
        assert server.json("POST", "/v2/repository/models/copy/unload")[0] == 200
        assert server.infer("copy.linear", X)[0] == 404
        assert server.infer("own.linear", X)[0] == 200


def test_a_package_that_is_written_over(
    package: pathlib.Path, served_package: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Its mapped weights change under the model: it is loaded again, or taken out of service until it can be."""
    file = tmp_path / "live.pt2"
    shutil.copy(package, file)
    with serve(tmp_path, file, f"own={package}") as server:
        assert server.infer("live.linear", X)[0] == 200
        file.write_bytes(served_package.read_bytes())
        eventually(lambda: server.infer("live.linear", X)[0] == 404)
        assert server.request("GET", "/v2/models/live.similarity/ready")[0] == 200
        file.write_bytes(package.read_bytes()[:5000])
        _, document = eventually(lambda: (found := server.infer("live.linear", X))[0] == 503 and found)
        assert "model 'live' is not loaded: its file was written over, and cannot be loaded: " in document["error"]
        assert server.infer("own.linear", X)[0] == 200
        file.write_bytes(package.read_bytes())
        eventually(lambda: server.infer("live.linear", X)[0] == 200)
        assert server.infer("live.linear", X)[1]["outputs"][0]["data"] == linear(X)[0]


def test_a_folder_that_is_watched(package: pathlib.Path, served_package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Packages that come, are replaced or go while others are called."""
    repository = tmp_path / "repository"
    repository.mkdir()
    with serve(tmp_path, f"own={package}", "--repository", repository, "--poll", "0.1") as server:
        end, statuses = threading.Event(), []

        def call() -> None:
            while not end.is_set():
                statuses.append(server.infer("own.linear", X)[0])

        thread = threading.Thread(target=call)
        thread.start()

        def ready(name: str) -> bool:
            return server.json("GET", f"/v2/models/{name}/ready")[0] == 200

        def put(source: pathlib.Path) -> None:
            shutil.copy(source, repository / "part")
            (repository / "part").rename(repository / "m.pt2")

        put(package)
        eventually(lambda: ready("m.linear"))
        put(served_package)
        eventually(lambda: ready("m.similarity") and not ready("m.linear"))
        (repository / "bad.pt2").write_bytes(b"no package")
        (repository / "m.pt2").unlink()
        eventually(lambda: server.json("GET", "/v2/models/m.similarity/ready")[0] == 404)
        index = eventually(
            lambda: [row for row in server.json("POST", "/v2/repository/index")[1] if row["name"] == "bad"]
        )
        eventually(lambda: "bad.pt2" in server.json("POST", "/v2/repository/index")[1][0]["reason"])
        assert index[0]["state"] == "UNAVAILABLE"
        end.set()
        thread.join()
        assert set(statuses) == {200}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_package_that_cannot_be_loaded_is_an_error_at_the_start(
    package: pathlib.Path, tmp_path: pathlib.Path, workers: int
) -> None:
    bad = tmp_path / "bad.pt2"
    bad.write_bytes(b"no package")
    with (
        pytest.raises(AssertionError, match=r"(?s)ended with 1:.*untorch: .*bad\.pt2"),
        serve(tmp_path, bad, f"own={package}", "--workers", str(workers)),
    ):
        pass


def test_a_port_that_is_taken(server: Server, package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    port = server.http.split(":")[1]
    text = f"(?s)ended with 1:.*untorch: HTTP cannot listen on 127.0.0.1:{port}: Address already in use"
    with pytest.raises(AssertionError, match=text), serve(tmp_path, package, "--port", port):
        pass
