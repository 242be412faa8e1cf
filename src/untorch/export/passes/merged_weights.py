"""One tensor of several weights: concatenated one weight at a time, and the parts moved into it, so memory stays level.

A part becomes a view of the whole: the caller's module keeps its values, shapes and strides, and its memory is needed
once. Parts that lie one behind the other already, as another method of the file has left them, are a view at once. So
all methods have one tensor, and the file stores it once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["byte_range", "merge_tensors"]


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the tensor's elements lie in memory: the first address, and the one behind the last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


@torch.no_grad()
def merge_tensors(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The parts one behind the other along ``dim``. Along dimension 0 they are views of the result afterwards."""
    if dim == 0 and (whole := _adjacent(parts)) is not None:
        return whole
    bytes_ = [_as_bytes(part.detach()) for part in parts]
    whole = torch.cat(bytes_, dim).view(parts[0].dtype)
    if dim == 0:
        start = 0
        for part in parts:
            if _can_move(part):
                part.data = whole[start : start + part.shape[0]]
            start += part.shape[0]
    return whole


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Not every device concatenates float8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor of which the parts are consecutive rows, if they are."""
    first = parts[0]
    storage, at, rows = first.untyped_storage()._cdata, first.storage_offset(), 0
    for part in parts:
        if part.untyped_storage()._cdata != storage or part.storage_offset() != at or not part.is_contiguous():
            return None
        at, rows = at + part.numel(), rows + part.shape[0]
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _can_move(part: torch.Tensor) -> bool:
    """Whether nobody but the tensor itself has its memory, as far as a tensor tells."""
    storage = part.untyped_storage()
    return (
        type(part) in (torch.Tensor, torch.nn.Parameter)
        and part.is_contiguous()
        and storage.nbytes() == part.numel() * part.element_size()
        and not part.is_inference()
        and not (part.device.type == "cpu" and part.is_shared())  # type: ignore[no-untyped-call]
    )
