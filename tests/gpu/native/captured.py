"""Captures a shim's call in a CUDA graph."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.native.shim import delete, handle, lib, raise_on, use_torch_stream


@contextlib.contextmanager
def captured(
    shim: str, operands: Sequence[torch.Tensor], rest: Sequence[Any], out: torch.Tensor
) -> Iterator[torch.cuda.CUDAGraph]:
    """The graph of the first call of ``shim``, with tensors and what follows them, and of its result's copy to ``out``."""
    graph, made = torch.cuda.CUDAGraph(), ctypes.c_void_p()
    handles = [handle(tensor) for tensor in (*operands, out)]
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        use_torch_stream()
        raise_on(getattr(lib, shim)(*handles[:-1], *rest, ctypes.byref(made)))
        raise_on(lib.aoti_torch_copy_(handles[-1], made, ctypes.c_int32(0)))
    use_torch_stream()
    try:
        yield graph
    finally:
        for made_here in [*handles, made]:
            delete(made_here)
