"""A kernel that only reads two tensors: the bandwidth that a memory-bound kernel of one launch can reach."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def _read(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803 - Triton's way
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(a_ptr + i).to(tl.float32) + tl.load(b_ptr + i).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(values, 0))


def reader(pairs: list[tuple[torch.Tensor, torch.Tensor]], block: int) -> Callable[[int], None]:
    """Call i reads pair i modulo the number of pairs, one program per ``block`` elements; sizes are multiples of it."""
    programs = pairs[0][0].numel() // block
    sums = torch.empty(programs, device=pairs[0][0].device)
    return lambda i: _read[(programs,)](*pairs[i % len(pairs)], sums, BLOCK=block, num_warps=8)
