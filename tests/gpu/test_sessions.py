"""Sessions on the GPU: buffers of their own on shared weights, on streams, in graphs, on threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from tests.gpu.models import exported
from tests.gpu.spin import Spin, in_threads

ROWS, WIDTH = 16, 64


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.register_buffer("rows", torch.full((ROWS, WIDTH), 0.25))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))


class Put(Cache):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.filled.clone()
        self.rows.index_copy_(0, self.filled.reshape(1), (x @ self.weight)[None])
        self.filled += 1
        return before


class Get(Cache):
    def forward(self, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows * scale, self.filled + 0


@pytest.fixture(scope="module")
def cache(folder: Path) -> Path:
    x, one = torch.ones(WIDTH), torch.ones(())
    return exported(folder, "cache", {"put": (Put(), (x,)), "get": (Get(), (one,))}, None)


def row(x: torch.Tensor) -> torch.Tensor:
    return x.cpu() @ Put().weight.detach()


def rows_of(session: untorch.Session) -> tuple[torch.Tensor, int]:
    rows, filled = session.get(np.ones((), np.float32))
    return torch.as_tensor(rows), int(filled)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_sessions_are_apart(cache: Path) -> None:
    x = torch.randn(WIDTH, device="cuda")
    with untorch.load(cache) as program:
        first, second = program.session(), program.session()
        for i in range(3):
            assert int(first.put(x * (i + 1)).numpy()) == i
        second.put(-x)
        rows, filled = rows_of(first)
        assert filled == 3
        for i in range(3):
            close(rows[i], row(x * (i + 1)))
        assert (rows[3:] == 0.25).all()
        rows, filled = rows_of(second)
        assert filled == 1
        close(rows[0], row(-x))
        fork = first.fork()
        fork.put(x * 9)
        first.reset()
        assert rows_of(first)[1] == 0 and (rows_of(first)[0] == 0.25).all()
        rows, filled = rows_of(fork)
        assert filled == 4
        close(rows[3], row(x * 9))
        assert rows_of(program)[1] == 0  # type: ignore[arg-type]


def test_calls_of_a_session_are_in_order_over_streams(cache: Path) -> None:
    """A busy stream holds up what the session does next on another one, and nobody waits for it on the CPU."""
    with untorch.load(cache) as program:
        session, other = program.session(), program.session()
        x = torch.randn(WIDTH, device="cuda")
        doubled = x * 2  # torch loads its kernel, which would wait for the one that spins
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        for stream in (first, second):
            with untorch.stream(stream):
                session.put(x)
                other.put(x)
        torch.cuda.synchronize()
        session.reset()
        torch.cuda.synchronize()
        with Spin(first) as spin:
            with untorch.stream(first):
                session.put(x)
            with untorch.stream(second):
                session.put(doubled)
                copy = session.fork()
            assert spin.running
        rows, filled = rows_of(session)
        assert filled == 2 and rows_of(copy)[1] == 2
        close(rows[1], row(doubled))


def test_a_graph_belongs_to_its_session(cache: Path) -> None:
    with untorch.load(cache) as program:
        sessions = [program.session() for _ in range(2)]
        x = torch.randn(WIDTH, device="cuda")
        torch.cuda.synchronize()
        graphs = [session.put.graph(x) for session in sessions]
        for i in range(8):
            graphs[i % 2 if i < 6 else 0](x * (i + 1))
            if i == 3:
                sessions[1].put(x * 100)
        rows, filled = rows_of(sessions[0])
        assert filled == 5
        for place, i in enumerate((0, 2, 4, 6, 7)):
            close(rows[place], row(x * (i + 1)))
        rows, filled = rows_of(sessions[1])
        assert filled == 4
        for place, value in enumerate((2, 4, 100, 6)):
            close(rows[place], row(x * value))
        for session, graph in zip(sessions, graphs, strict=True):
            session.reset()
            graph(x)
            rows, filled = rows_of(session)
            assert filled == 1
            close(rows[0], row(x))


def test_sessions_on_threads(cache: Path) -> None:
    with untorch.load(cache) as program:

        def work(number: int) -> None:
            sessions = [program.session() for _ in range(3)]
            x = torch.full((WIDTH,), float(number + 1), device="cuda")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream), untorch.stream(stream):
                for i in range(ROWS):
                    for s, session in enumerate(sessions):
                        session.put(x * (i + 10 * s))
                for s, session in enumerate(sessions):
                    rows, filled = rows_of(session)
                    assert filled == ROWS
                    close(rows, torch.stack([row(x * (i + 10 * s)) for i in range(ROWS)]))

        in_threads(4, work)


def test_memory(cache: Path) -> None:
    """Weights once for all sessions, buffers for each."""
    with untorch.load(cache) as program:
        sessions = [program.session() for _ in range(3)]
        x = torch.ones(WIDTH, device="cuda")
        for session in sessions:
            session.put(x)
            assert session.nbytes == ROWS * WIDTH * 4 + 8
        assert program.memory()["state"] == 0
