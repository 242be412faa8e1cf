"""Calls from several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tests.native.shim import use_torch_stream

Given = TypeVar("Given")


def differing(compute: Callable[[Given], torch.Tensor], given: Sequence[Given], times: int = 50) -> list[int]:
    """Of which inputs a thread, each on a stream of its own, got other bits than this one.

    ``compute`` may give the same memory again.
    """
    use_torch_stream()
    want = [compute(one).clone() for one in given]
    torch.cuda.synchronize()
    wrong: set[int] = set()

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            use_torch_stream()
            for _ in range(times):
                if not torch.equal(compute(given[i]), want[i]):
                    wrong.add(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(wrong)
