"""HTTP on a Unix domain socket: curl and httpx, several workers, and what becomes of the file."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from tests.serve.process import RUN_PYTHON, linear, serve

httpx = pytest.importorskip("httpx")

X = [[1.0, 2.0, 3.0, 4.0]]
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": X}]}


def infer(path: pathlib.Path) -> list[float]:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
        answer = client.post("/v2/models/own.linear/infer", json=REQUEST)
        assert answer.status_code == 200, answer.text
        found: list[float] = answer.json()["outputs"][0]["data"]
        return found


def test_clients_and_the_file(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "untorch.sock"
    with serve(tmp_path, f"own={package}", "--uds", path, "--grpc-port", "-1") as server:
        assert server.addresses == {"http": f"unix:{path}", "grpc": None}
        assert infer(path) == linear(X)[0]
        if (curl := shutil.which("curl")) is not None:
            url = "http://localhost/v2/models/own.linear/infer"
            command = [curl, "-sS", "--unix-socket", str(path), url, "-d", json.dumps(REQUEST)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            assert json.loads(done.stdout)["outputs"][0]["data"] == linear(X)[0]
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/", headers={"origin": "http://localhost"}).status_code == 200
            assert client.get("/v2", headers={"origin": "http://elsewhere"}).status_code == 403
        # Another server of the same path is refused, and leaves it as it is.
        command = [RUN_PYTHON, "-m", "untorch", "serve", f"own={package}", "--uds", str(path), "--grpc-port", "-1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        text = "another server listens there: end it, or choose another --uds"
        assert (done.returncode, text in done.stderr) == (1, True), done.stderr
        assert infer(path) == linear(X)[0]
        server.process.kill()
        server.process.wait()
        assert path.is_socket()  # nobody could remove it
    with serve(tmp_path, f"own={package}", "--uds", path, "--workers", "2", "--drain", "5") as server:
        assert len(server.workers()) == 2
        assert [infer(path) for _ in range(20)] == [linear(X)[0]] * 20
        assert server.stop(signal.SIGTERM) == 0
        assert not path.exists()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_event_loops(loop: str, package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("uvloop")
    path = tmp_path / "untorch.sock"
    code = "import runpy, sys; sys.modules.update({} if sys.argv.pop(1) == 'uvloop' else {'uvloop': None}); "
    code += "sys.argv[0] = 'untorch'; runpy.run_module('untorch', run_name='__main__', alter_sys=True)"
    words = ["-c", code, loop, "serve", f"own={package}", "--uds", str(path), "--grpc-port", "-1", "--json"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"http": f"unix:{path}", "grpc": None}
        assert infer(path) == linear(X)[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not path.exists()
