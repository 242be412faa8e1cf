"""How many requests a second does a server of MiniLM answer, and how long do clients wait? Beside other servers.

Clients on the loop-back address each send one sentence of 32 tokens as binary tensors of the Open Inference Protocol,
and the next one when they have the answer. ``untorch serve`` has its defaults, and the model in float32, as the others
have it, or in bfloat16. ONNX Runtime is behind a Starlette application of the same kind (serve_onnxruntime.py), once
call by call and once with untorch's batcher, so that the runtimes can be told from the servers; and, where they are
installed, in the Triton Inference Server (serve_triton.py) and KServe's Python server (serve_kserve.py). Servers take
turns in short rounds; one computes at a time. Clients use the same cores.

What one client waits for beside the model is told by turns of a quarter of a second: plain calls in this process, and
the same calls of a server, by a client that waits on its socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy
from common import RESULTS, WORK, Report, Table, ensure_models

CLIENTS = (1, 8, 64, 256)
LENGTH = 32
HERE = pathlib.Path(__file__).parent


@dataclass(frozen=True)
class Contestant:
    """A server: its key, its label, and what follows ``python``; FOLDER and PORT are replaced."""

    key: str
    label: str
    command: tuple[str, ...]
    runtime: str = "onnxruntime"


_SERVE = ("--port", "PORT", "--grpc-port", "-1", "--log-format", "none")
CONTESTANTS = (
    Contestant("untorch", "untorch serve", ("-m", "untorch", "serve", "FOLDER/minilm.pt2", *_SERVE), "untorch"),
    Contestant(
        "untorch_bfloat16",
        "untorch serve, bfloat16",
        ("-m", "untorch", "serve", "minilm=FOLDER/minilm_bfloat16.pt2", *_SERVE),
        "untorch_bfloat16",
    ),
    Contestant(
        "onnxruntime",
        "ONNX Runtime, Starlette",
        (str(HERE / "serve_onnxruntime.py"), "FOLDER/minilm.onnx", "PORT"),
    ),
    Contestant(
        "onnxruntime_batched",
        "ONNX Runtime, Starlette, untorch's batcher",
        (str(HERE / "serve_onnxruntime.py"), "FOLDER/minilm.onnx", "PORT", "--batch"),
    ),
    Contestant(
        "triton",
        "Triton Inference Server, ONNX Runtime",
        (str(HERE / "serve_triton.py"), "FOLDER/minilm.onnx", "PORT"),
    ),
    Contestant(
        "kserve",
        "KServe, ONNX Runtime",
        (str(HERE / "serve_kserve.py"), "FOLDER/minilm.onnx", "PORT"),
    ),
)  # fmt: skip
TURN = 0.25  # seconds of plain calls, then of calls of a server


def installed() -> list[Contestant]:
    """Those that can be started here."""
    there = {
        "triton": "UNTORCH_TRITON_PYTHON" in os.environ,
        "kserve": (HERE.parent / "build" / "kserve" / "kserve").is_dir(),
    }
    return [one for one in CONTESTANTS if there.get(one.key, True)]


def plain_calls(folder: pathlib.Path) -> dict[str, Callable[[], object]]:
    """A call of each runtime in this process, with the servers' input."""
    import onnxruntime

    import untorch

    ids = numpy.random.default_rng(0).integers(1000, 20000, (1, LENGTH))
    given = {"input_ids": ids, "attention_mask": numpy.ones_like(ids)}
    program, half = untorch.load(folder / "minilm.pt2"), untorch.load(folder / "minilm_bfloat16.pt2")
    session = onnxruntime.InferenceSession(str(folder / "minilm.onnx"), providers=["CPUExecutionProvider"])
    return {
        "untorch": lambda: program(*given.values()),
        "untorch_bfloat16": lambda: half(*given.values()),
        "onnxruntime": lambda: session.run(None, given),
    }


def overhead(call: Callable[[], object], port: int, turns: int) -> tuple[float, float, float]:
    """Milliseconds at p50 of a plain call, of a server's, and between them: the medians of the turns'."""
    pairs = []
    for _ in range(turns):
        plain: list[float] = []
        end = time.perf_counter() + TURN
        while (begin := time.perf_counter()) < end:
            call()
            plain.append(time.perf_counter() - begin)
        served = answers(port, TURN)
        pairs.append((numpy.median(plain) * 1e3, numpy.median(served) * 1e3))
    between = numpy.median([b - a for a, b in pairs])
    return float(numpy.median([a for a, _ in pairs])), float(numpy.median([b for _, b in pairs])), float(between)


def message() -> bytes:
    """An HTTP request with two binary tensors."""
    ids = numpy.random.default_rng(0).integers(1000, 20000, (1, LENGTH))
    tensors = [("input_ids", ids), ("attention_mask", numpy.ones_like(ids))]
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": name, "datatype": "INT64", "shape": [1, LENGTH],
                    "parameters": {"binary_data_size": array.nbytes},
                }
                for name, array in tensors
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()  # fmt: skip
    body = b"".join([header, *(array.tobytes() for _, array in tensors)])
    head = (
        "POST /v2/models/minilm/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def client(port: int, request: bytes, until: float, times: list[float]) -> None:
    """One request after the other on one connection, at least one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ended = False
    while not ended:
        begin = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
        times.append((now := time.perf_counter()) - begin)
        ended = now >= until
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {head[:40]!r} {body[:200]!r}")
    writer.close()


async def load(port: int, clients: int, seconds: float) -> tuple[list[float], float]:
    """All answers' times, and the seconds that it took."""
    times: list[float] = []
    request, begin = message(), time.perf_counter()
    await asyncio.gather(*(client(port, request, begin + seconds, times) for _ in range(clients)))
    return times, time.perf_counter() - begin


def answers(port: int, seconds: float) -> list[float]:
    """Times of a client that waits on its socket, which adds no event loop to the server's."""
    times: list[float] = []
    request = message()
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as reader:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            connection.sendall(request)
            length, status = 0, reader.readline()
            while (line := reader.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line[15:])
            body = reader.read(length)
            times.append(time.perf_counter() - begin)
            if not status.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {status!r} {body[:200]!r}")
    return times


def start(contestant: Contestant, folder: pathlib.Path) -> tuple[subprocess.Popen[bytes], int]:
    """A server that answers, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.replace("FOLDER", str(folder)).replace("PORT", str(port)) for word in contestant.command]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    for _ in range(600):
        try:
            asyncio.run(load(port, 1, 0.01))
            return process, port
        except (OSError, RuntimeError, asyncio.IncompleteReadError):
            if process.poll() is not None:
                raise SystemExit(f"{contestant.label} did not start") from None
            time.sleep(0.1)
    raise SystemExit(f"{contestant.label} did not answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try the script: no numbers to quote")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the JSON file")
    parser.add_argument(
        "--packages", type=pathlib.Path, help="folder with MiniLM's packages and ONNX file; default: made"
    )
    options = parser.parse_args()
    rounds, seconds, turns = (1, 0.5, 3) if options.quick else (5, 4.0, 40)
    contestants, folder = installed(), options.packages or WORK
    if options.packages is None:
        ensure_models("minilm")
    report = Report("serve", options.quick)
    servers = {one.key: start(one, folder) for one in contestants}
    calls = plain_calls(folder)
    waits: dict[str, tuple[float, float, float]] = {}
    times: dict[tuple[str, int], list[float]] = {}
    rates: dict[tuple[str, int], list[float]] = {}
    try:
        for _, port in servers.values():
            for clients in CLIENTS:  # each size of a batch has run once
                asyncio.run(load(port, clients, 0.5))
        for one in contestants:
            waits[one.key] = overhead(calls[one.runtime], servers[one.key][1], turns)
        for _ in range(rounds):
            for clients in CLIENTS:
                for key, (_, port) in servers.items():
                    found, took = asyncio.run(load(port, clients, seconds))
                    times.setdefault((key, clients), []).extend(found)
                    rates.setdefault((key, clients), []).append(len(found) / took)
    finally:
        for process, _ in servers.values():
            process.terminate()
            process.wait()
    rows = []
    for one in contestants:
        cells = []
        for clients in CLIENTS:
            p50, p99 = numpy.percentile(times[one.key, clients], (50, 99)) * 1e3
            rate = float(numpy.median(rates[one.key, clients]))
            report.values.setdefault(one.key, {})[clients] = {"requests_per_s": rate, "p50_ms": p50, "p99_ms": p99}
            cells.append(f"{rate:.0f} ({p50:.1f}, {p99:.1f})")
        rows.append([one.label, *cells])
    headings = [f"{clients} client{'s' if clients > 1 else ''}" for clients in CLIENTS]
    report.tables["serve"] = Table(
        ["Server", *headings], rows,
        f"Requests a second (milliseconds at p50 and p99), one sentence of {LENGTH} tokens a request, "
        f"{len(os.sched_getaffinity(0))} cores for servers and clients together.",
    )  # fmt: skip
    for one in contestants:
        names = ("plain_ms", "served_ms", "overhead_ms")
        report.values[one.key]["overhead"] = dict(zip(names, waits[one.key], strict=True))
    report.tables["serve_overhead"] = Table(
        ["Server", "plain call", "by the server", "between"],
        [[one.label, *(f"{value:.2f}" for value in waits[one.key])] for one in contestants],
        "Milliseconds at p50 for one client that waits for each answer; medians of turns of a quarter of a second.",
    )  # fmt: skip
    report.write(options.output or (WORK / "results" if options.quick else RESULTS))


if __name__ == "__main__":
    main()
