"""Method.submit on a GPU: the loop runs meanwhile, results are ready, arrays are ordered by the submitter's streams."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import untorch
from tests.gpu.models import N, close, reference
from tests.gpu.spin import Spin
from untorch.runtime.pinned import PinnedBuffers


def test_numpy_in_numpy_out(mlp: tuple[Path, nn.Module]) -> None:
    package, module = mlp

    async def main(program: untorch.Program) -> None:
        inputs = [np.full((1 + i % 4, 64), i / 10, np.float32) for i in range(40)]
        results = await asyncio.gather(*(program.forward.submit(x) for x in inputs))
        for x, y in zip(inputs, results, strict=True):
            assert isinstance(y, np.ndarray)
            close(y, reference(module, x))
        with pytest.raises(untorch.InvalidArgumentError):
            await program.forward.submit(inputs[0][:, :3].copy())

    with untorch.load(package, num_runners=2) as program:
        asyncio.run(main(program))


@pytest.mark.parametrize("own", [False, True], ids=["caller's stream", "own stream"])
def test_the_loop_runs_while_the_gpu_works(chain: Path, own: bool) -> None:
    """The input is filled on the submitter's busy torch stream: the call comes after it, on either stream."""
    stream = torch.cuda.Stream()

    async def main(program: untorch.Program) -> None:
        with torch.cuda.stream(stream), untorch.stream(None if own else stream):
            x, y = torch.ones(N, device="cuda"), torch.ones(N, device="cuda")
            await program.forward.submit(x, y)  # opens the method
            stream.synchronize()
            with Spin(stream) as spin:
                x.fill_(3.0)
                future = program.forward.submit(x, y)
                for _ in range(20):
                    await asyncio.sleep(0.005)
                assert spin.running and not future.done()
                spin.release()
                total, parts = await future
        # Nothing is left to wait for.
        got = torch.from_dlpack(total)
        assert (got == 23).all() and (torch.from_dlpack(parts["double"]) == 6).all()

    with untorch.load(chain) as program:
        asyncio.run(main(program))


def test_results_are_ready(chain: Path) -> None:
    async def main(program: untorch.Program) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), untorch.stream(stream):
            for i in range(20):
                x = torch.full((N,), float(i), device="cuda")
                total, _ = await program.forward.submit(x, torch.ones(N, device="cuda"))
                assert stream.query()
                again, _ = await program.forward.submit(total, torch.ones(N, device="cuda"))  # an untorch.Tensor
                assert (torch.from_dlpack(again) == i + 40).all()

    with untorch.load(chain) as program:
        asyncio.run(main(program))


def test_cancelled_calls_leave_the_program_usable(chain: Path) -> None:
    async def main(program: untorch.Program) -> None:
        x = np.ones(N, np.float32)
        futures = [program.forward.submit(x, x) for _ in range(30)]
        for future in futures[1::2]:
            future.cancel()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[1::2])
        for total, _ in results[::2]:  # type: ignore[misc]
            assert (total == 21).all()

    with untorch.load(chain) as program:
        asyncio.run(main(program))


def test_pinned_buffers() -> None:
    buffers = PinnedBuffers(0)
    x = np.arange(1 << 20, dtype=np.float32)
    copied = buffers.copy("x", x)
    assert torch.from_numpy(copied).is_pinned() and not torch.from_numpy(x).is_pinned()
    assert torch.equal(torch.from_numpy(copied).cuda().cpu(), torch.from_numpy(x))
    larger = buffers.copy("x", np.concatenate([x, x]))
    assert torch.from_numpy(larger).is_pinned()
    del buffers
    assert not torch.from_numpy(larger).is_pinned()
