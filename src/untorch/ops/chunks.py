"""Chunks of rows, for element-wise work over large matrices: enough for all threads, few enough for the caches."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["chunks"]

# Values of a chunk. malloc keeps the memory of smaller intermediate results: from 32 MiB on, the system gives and takes
# the pages of each.
_CHUNK, _CHUNK_MOST = 1 << 19, 1 << 21
_CHUNK_GPU = 1 << 25


def chunks(tensor: torch.Tensor, k: int, multiple: int = 1) -> Iterator[slice]:
    """Chunks of rows of ``tensor``, if each row has ``k`` values; of so many rows, but for the last, or a multiple."""
    on_cpu = tensor.device.type == "cpu"
    size = min(_CHUNK * torch.get_num_threads(), _CHUNK_MOST) if on_cpu else _CHUNK_GPU
    rows = multiple * max(1, size // max(1, k * multiple))
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, min(start + rows, tensor.shape[0]))
