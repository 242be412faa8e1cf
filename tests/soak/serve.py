"""Soaks ``untorch serve``: ``python tests/soak/serve.py --minutes 20``. The exit status is 1 for an error, or for growth.

Clients send what they can for some seconds, then 80 % of it, in rounds: tensors, completions, streams that are read or
left, sound, and requests that are refused. Between rounds they close their connections, and what the server's processes
hold is measured: it must be level.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import io
import json
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests import packages, speech_models  # noqa: E402
from tests.serve.process import Server, linear, serve  # noqa: E402

CLIENTS = 8
SHARE = 0.8  # of the measured maximum
SHORTEST_ROUND = 1.5
ROUNDS = 8  # at least; a round is at most a minute
# A server process has two pools of threads, its own and asyncio's: each starts a thread when none is idle, up to its size.
POOLS = 4 + min(32, (os.cpu_count() or 1) + 4)
# Of each server process, between the largest of the second quarter of the rounds and the smallest of the last quarter.
LIMITS = {"resident": 16 << 20, "files": 0, "threads": POOLS}
BOUNDARY = "soak"


@dataclass
class Load:
    """What clients send, and what they saw."""

    server: Server
    texts: dict[str, str] = field(default_factory=dict)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    late: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tensors(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        x = [[float(rng.randrange(9)) for _ in range(4)] for _ in range(rng.randrange(1, 9))]
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(x), 4], "data": x}]}
        _, answer = exchange(connection, "/v2/models/own.linear/infer", body)
        expected = [value for row in linear(x) for value in row]
        self.expect("tensors", np.allclose(json.loads(answer)["outputs"][0]["data"], expected), answer)

    def completion(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        body = {"model": "tiny", "prompt": "abc " * rng.randrange(1, 9), "max_tokens": 8, "temperature": 0}
        _, answer = exchange(connection, "/v1/completions", body)
        self.same(f"completion of {len(body['prompt'])}", json.loads(answer)["choices"][0]["text"])

    def stream(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        body = {"model": "tiny", "prompt": "xyz", "max_tokens": 8, "temperature": 0, "stream": True}
        _, answer = exchange(connection, "/v1/completions", body)
        self.expect("stream", answer.endswith(b"data: [DONE]\n\n"), answer)

    def stream_that_is_left(self, _: http.client.HTTPConnection, rng: random.Random) -> None:
        connection = http.client.HTTPConnection(self.server.http, timeout=60)
        body = {"model": "tiny", "prompt": "go on", "max_tokens": 400, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read(rng.randrange(1, 500))
        connection.close()
        response.close()

    def sound(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        seed = rng.randrange(4)
        _, answer = exchange(
            connection, "/v1/audio/transcriptions", form(seed), f"multipart/form-data; boundary={BOUNDARY}"
        )
        self.same(f"sound {seed}", json.loads(answer)["text"])

    def refused(self, connection: http.client.HTTPConnection, rng: random.Random) -> None:
        path, body, wanted = rng.choice(
            [
                ("/v2/models/own.linear/infer", {"inputs": []}, 400),
                ("/v2/models/nobody/infer", {"inputs": []}, 404),
                ("/v1/completions", {"model": "tiny", "prompt": "a", "top_k": "many"}, 400),
                ("/v1/audio/transcriptions", {"model": "ctc"}, 400),
            ]
        )
        status, answer = exchange(connection, path, body, expected=wanted)
        self.expect("refused", status == wanted, answer)

    def same(self, what: str, text: str) -> None:
        """It was so before."""
        with self.lock:
            known = self.texts.setdefault(what, text)
        self.expect(what, known == text, f"{text!r}, and {known!r} before")

    def expect(self, what: str, is_right: bool, got: Any) -> None:
        if not is_right:
            self.fail(f"{what}: {got!r:.300}")

    def fail(self, text: str) -> None:
        with self.lock:
            if len(self.problems) < 20:
                self.problems.append(text)

    def client(self, seed: int, end: float, interval: float) -> None:
        """One connection. interval: seconds from one request's beginning to the next; 0: none waits."""
        rng = random.Random(seed)
        steps: list[Callable[[http.client.HTTPConnection, random.Random], None]] = (
            [self.tensors] * 12
            + [self.completion] * 3
            + [self.stream, self.stream_that_is_left, self.sound, self.refused]
        )
        connection = http.client.HTTPConnection(self.server.http, timeout=60)
        due = time.monotonic() + rng.random() * interval
        while (now := time.monotonic()) < end:
            if now < due:
                time.sleep(due - now)
            elif now - due > 1:
                with self.lock:
                    self.late += 1
                due = now
            due += interval
            step = rng.choice(steps)
            try:
                step(connection, rng)
            except Exception as error:
                self.fail(f"{step.__name__}: {type(error).__name__}: {error}")
                connection.close()
            with self.lock:
                self.counts[step.__name__] += 1
        connection.close()

    def run(self, seed: int, seconds: float, rate: float = 0.0) -> float:
        """All clients, for some seconds, at that many requests a second; 0: as many as they can. The rate that it was."""
        before, begin = sum(self.counts.values()), time.monotonic()
        interval = CLIENTS / rate if rate else 0.0
        threads = [
            threading.Thread(target=self.client, args=(seed * CLIENTS + i, begin + seconds, interval))
            for i in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (sum(self.counts.values()) - before) / (time.monotonic() - begin)


def exchange(
    connection: http.client.HTTPConnection, path: str, body: Any, kind: str = "application/json", expected: int = 200
) -> tuple[int, bytes]:
    """A request's status and answer. Raises AssertionError for another status."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": kind})
    response = connection.getresponse()
    answer = response.read()
    assert response.status == expected, f"{path}: {response.status}: {answer[:200]!r}"
    return response.status, answer


def form(seed: int) -> bytes:
    """A second of sound for the model ctc."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16000)
        writer.writeframes((speech_models.speech(1.0, seed=seed) * 32767).astype("<i2").tobytes())
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="model"\r\n\r\nctc\r\n--{BOUNDARY}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return head.encode() + file.getvalue() + f"\r\n--{BOUNDARY}--\r\n".encode()


def processes(pid: int) -> Iterator[pathlib.Path]:
    """The folders in /proc of a process and of those below it."""
    folder = pathlib.Path(f"/proc/{pid}")
    yield folder
    for task in folder.glob("task/*/children"):
        for child in task.read_text().split():
            yield from processes(int(child))


def held(pid: int) -> dict[str, int]:
    """Bytes of resident memory, open files and threads of a process and of those below it."""
    found = {"resident": 0, "files": 0, "threads": 0}
    for folder in processes(pid):
        found["resident"] += int((folder / "statm").read_text().split()[1]) * 4096
        found["files"] += len(list((folder / "fd").iterdir()))
        found["threads"] += len(list((folder / "task").iterdir()))
    return found


def idle(server: Server) -> dict[str, int]:
    """What the server holds once it has closed what its clients closed."""
    end = time.monotonic() + 5
    while True:
        before = held(server.pid)
        time.sleep(0.2)
        if (after := held(server.pid))["files"] == before["files"] or time.monotonic() > end:
            return after


def grown(rounds: list[dict[str, int]], workers: int = 1) -> list[str]:
    """What is larger in all of the last quarter than it ever was in the second one."""
    quarter = len(rounds) // 4
    second, last = rounds[quarter : 2 * quarter], rounds[-quarter:]
    problems = []
    for name, limit in LIMITS.items():
        before, after = max(one[name] for one in second), min(one[name] for one in last)
        if after - before > limit * workers:
            problems.append(f"{name} grew from {before:,} to {after:,}, allowed are {limit * workers:,} more")
    return problems


@contextlib.contextmanager
def served(folder: pathlib.Path, workers: int) -> Iterator[Server]:
    """A server of tensors, text and sound."""
    unit, here = ROOT / "tests" / "unit" / "models.py", ROOT / "tests" / "serve" / "openai" / "models.py"
    models = {
        "own": packages.compiled(unit, "own"), "tiny": packages.compiled(here, "tiny"),
        "ctc": packages.compiled(pathlib.Path(speech_models.__file__), "ctc"),
    }  # fmt: skip
    words = [f"{name}={path}" for name, path in models.items()]
    with serve(folder, *words, "--kv-memory", "16MiB", "--workers", str(workers), "--log-format", "none") as server:
        yield server


def soak(folder: pathlib.Path, seconds: float, workers: int = 1) -> tuple[dict[str, Any], list[str]]:
    """What was seen, and what is wrong with it."""
    count = max(ROUNDS, round(seconds / 60))
    each = max(SHORTEST_ROUND, seconds / count)
    with served(folder, workers) as server:
        load = Load(server)
        load.run(0, each)  # pools of connections and memory get their sizes
        most = load.run(1, each)
        rounds, rates = [], []
        for number in range(count):
            rates.append(load.run(2 + number, each, SHARE * most))
            rounds.append(idle(server))
        ended = server.stop()
    problems = [*load.problems, *grown(rounds, workers)]
    if ended != 0:
        problems.append(f"the server ended with {ended}")
    problems += [
        f"no {name} was sent" for name in ("tensors", "completion", "sound", "refused") if not load.counts[name]
    ]
    seen = {
        "requests": dict(load.counts), "maximum_per_s": round(most, 1),
        "rate_per_s": round(float(np.median(rates)), 1), "late": load.late, "rounds": rounds,
    }  # fmt: skip
    return seen, problems


def main() -> None:
    """Soak and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen, problems = soak(pathlib.Path(folder), 60 * options.minutes, options.workers)
    print(json.dumps(seen, indent=1))
    print("\n".join(problems) or "soak: no error, nothing stays behind")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
