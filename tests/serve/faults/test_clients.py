"""Clients that send too much, too slowly or nonsense, or do not read: each is answered or cut off, others are served."""

from __future__ import annotations

import json
import pathlib
import random
import socket
import time
from collections.abc import Iterator

import pytest

from tests.serve.process import Server, eventually, linear, serve

X = [[1.0, 2.0, 3.0, 4.0]]
HEAD = b"POST /v2/models/own.linear/infer HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def strict(package: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Short limits, which only ServeOptions has: the command's own are for real clients."""
    folder = tmp_path_factory.mktemp("strict")
    script = folder / "strict.py"
    script.write_text(STRICT)
    with serve(folder, package, command=[str(script), str(package)]) as one:
        yield one


STRICT = """
import json, sys
from untorch.serve.options import ServeOptions
from untorch.serve.run import run
options = ServeOptions(
    models={"own": sys.argv[1]}, port=0, grpc_port=0, header_timeout=0.5, body_timeout=1.0, write_timeout=1.0,
    max_body=2**20, max_connections=20,
)
run(options, lambda addresses: print(json.dumps(addresses.to_json()), flush=True))
"""


def connect(server: Server) -> socket.socket:
    host, port = server.http.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def read_all(one: socket.socket) -> bytes:
    answer = b""
    try:
        while part := one.recv(65536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def is_well(server: Server) -> None:
    begin = time.monotonic()
    status, document = server.infer("own.linear", X)
    assert (status, document["outputs"][0]["data"]) == (200, linear(X)[0])
    assert time.monotonic() - begin < 5


def test_ten_gigabytes_by_content_length(server: Server) -> None:
    """Refused by the head alone."""
    with connect(server) as one:
        one.sendall(HEAD + b"Content-Length: 10737418240\r\n\r\n")
        begin = time.monotonic()
        answer = read_all(one)
        assert time.monotonic() - begin < 10
    assert answer.startswith(b"HTTP/1.1 413")
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {
        "error": "expected a body of at most 1048576 bytes (--max-body)"
    }
    is_well(server)


def test_an_endless_chunked_body(server: Server) -> None:
    """Cut off soon after the limit; the answer comes first."""
    sent = 0
    with connect(server) as one:
        one.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        try:
            while sent < 10 << 30:
                one.sendall(chunk)
                sent += 65536
        except (ConnectionError, TimeoutError):
            pass
    assert 1 << 20 <= sent < 100 << 20
    with connect(server) as one:  # one that stops at the limit sees why
        one.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 17 + b"0\r\n\r\n")
        assert read_all(one).startswith(b"HTTP/1.1 413")
    is_well(server)


def test_memory_stays_level_under_large_bodies(server: Server) -> None:
    def resident() -> int:
        text = pathlib.Path(f"/proc/{server.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0])

    before = resident()
    for _ in range(20):
        with connect(server) as one:
            one.sendall(HEAD + b"Content-Length: 900000\r\n\r\n" + b" " * 500_000)
    is_well(server)
    assert resident() - before < 60_000


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\n12345\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http(server: Server, data: bytes) -> None:
    with connect(server) as one:
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        assert read_all(one)[:12] in (b"HTTP/1.1 400", b"")
    is_well(server)


BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}
).encode()  # fmt: skip
OFFERS = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",  # Java's client
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
]


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 50])
def test_an_offer_of_another_protocol_is_declined(server: Server, offer: bytes, is_chunked: bool, pieces: int) -> None:
    """The body is the request's own, and never read as the next request."""
    if is_chunked:
        rest = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    else:
        rest = b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    data = (HEAD + offer + rest) * 3 + b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    size = -(-len(data) // pieces)
    with connect(server) as one:
        for begin in range(0, len(data), size):
            one.sendall(data[begin : begin + size])
            time.sleep(0.002)
        answer = read_all(one)
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert answer.count(b'"data":[16.0,42.0,68.0]') == 3
    assert answer.endswith(b'{"live":true}')


def test_what_is_no_http_gets_json(server: Server) -> None:
    for data in (b"nonsense\r\n\r\n", b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        with connect(server) as one:
            one.sendall(data)
            answer = read_all(one)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert answer.endswith(b'{"error": "expected a request of HTTP/1.1"}')


def test_random_bytes(server: Server) -> None:
    """Mutants of a request with a binary tensor: each gets an answer below 500, or none."""
    rng = random.Random(1)
    data = b"\x00" * 16
    header = json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}]}
    ).encode()
    whole = bytearray(header + data)
    for _ in range(300):
        body = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        status, _, _ = server.request(
            "POST", "/v2/models/own.linear/infer", bytes(body),
            {"Inference-Header-Content-Length": str(len(header) + rng.choice((0, 0, 0, -1, 1)))},
        )  # fmt: skip
        assert status < 500
    is_well(server)


def test_a_head_that_comes_slowly(strict: Server) -> None:
    with connect(strict) as one:
        begin = time.monotonic()
        answer = b""
        one.settimeout(0.1)
        while time.monotonic() - begin < 10 and not answer:
            try:
                one.sendall(b"POST / HTTP/1.1\r\n"[int(10 * (time.monotonic() - begin)) % 16 :][:1])
                answer = one.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() - begin < 3
    with connect(strict) as one:
        one.sendall(b"GET /v2 HTTP/1.1\r\nX-Slow: ")
        begin = time.monotonic()
        assert read_all(one).startswith(b"HTTP/1.1 408")
        assert 0.3 < time.monotonic() - begin < 3
    with connect(strict) as one:  # nothing at all
        assert read_all(one) == b""
    with connect(strict) as one:  # the second request of a connection
        one.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.2)
        one.sendall(b"GET /v2 HTTP/1.1\r\nX-Slow: ")
        answer = read_all(one)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in answer
    is_well(strict)


def test_a_body_that_comes_slowly(strict: Server) -> None:
    with connect(strict) as one:
        one.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        begin = time.monotonic()
        answer = read_all(one)
        assert 0.5 < time.monotonic() - begin < 5
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body of the request did not come in time" in answer
    is_well(strict)


def test_a_head_without_end(strict: Server) -> None:
    with connect(strict) as one:
        try:
            one.sendall(b"GET /v2 HTTP/1.1\r\n" + b"X-Long: " + b"a" * 500_000)
        except ConnectionError:
            return
        assert read_all(one)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
    is_well(strict)


def test_many_slow_clients(strict: Server) -> None:
    """As many as there may be: further ones are answered, and all are gone soon."""
    many = [connect(strict) for _ in range(30)]
    try:
        for one in many:
            one.sendall(b"GET /v2 HTTP/1.1\r\n")
        eventually(lambda: strict.infer("own.linear", X)[0] == 200, 10)
    finally:
        for one in many:
            one.close()
    is_well(strict)


def test_a_client_that_does_not_read(strict: Server) -> None:
    """Its connection is closed; its responses do not pile up."""
    x = [[1.0] * 4] * 30
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [30, 4], "data": x}]}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connect(strict) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(1.0)
        begin, cut_off = time.monotonic(), False
        while time.monotonic() - begin < 20 and not cut_off:
            try:
                one.sendall(request)
            except TimeoutError:
                continue
            except ConnectionError:
                cut_off = True
        assert cut_off
        is_well(strict)


def test_a_client_that_leaves(server: Server) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": X}]}).encode()
    for end in (len(HEAD) + 5, len(HEAD) + 40, None):
        for _ in range(20):
            with connect(server) as one:
                one.sendall((HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)[:end])
    is_well(server)
    assert "Traceback" not in server.log.read_text()
