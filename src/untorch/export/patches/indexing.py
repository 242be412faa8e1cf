"""Indexing of tensors by operators alone: ``x[..., 0]`` and ``x[mask] = 1`` as calls of ``torch.ops.aten``."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["read_index", "write_index"]

_aten = torch.ops.aten


def read_index(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``tensor[index]`` for what is no Python bool: numbers, slices, None, ..., lists and tensors."""
    view, tensors = _view_and_tensors(tensor, index)
    if tensors:
        result: torch.Tensor = _aten.index.Tensor(view, tensors)
        return result
    return _aten.alias.default(view) if view is tensor else view


def write_index(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """``tensor[index] = value`` for the same indices."""
    view, tensors = _view_and_tensors(tensor, index)
    if not isinstance(value, torch.Tensor):
        value = _aten.full.default([], value, dtype=tensor.dtype, device=tensor.device)
    elif value.device != tensor.device:
        value = _aten._to_copy.default(value, device=tensor.device)
    while value.dim() > 0 and isinstance(value.shape[0], int) and value.shape[0] == 1:  # broadcasting gives them back
        value = _aten.squeeze.dim(value, 0)
    if tensors:
        _aten.index_put_.default(view, tensors, value)
    else:
        _aten.copy_.default(view, value)


def _view_and_tensors(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """What numbers, slices and None make of the tensor, and the tensors that index the result's dimensions."""
    view, dim = tensor, 0
    tensors: list[torch.Tensor | None] = []
    items = _items(tensor, index)
    for i, item in enumerate(items):
        if item is None:
            view = _aten.unsqueeze.default(view, dim)
            dim += 1
        elif isinstance(item, slice):
            if item != slice(None):
                step = 1 if item.step is None else item.step
                view = _aten.slice.Tensor(view, dim, item.start, item.stop, step)
            dim += 1
        elif isinstance(item, torch.Tensor):
            # A mask of several dimensions is one index for each; the operator does that where nothing follows.
            splits = item.dtype == torch.bool and item.dim() > 1 and i + 1 < len(items)
            parts = _aten.nonzero.default(item).unbind(1) if splits else (item,)
            tensors += [None] * (dim - len(tensors))
            tensors += parts
            dim += len(parts)
        else:
            view = _aten.select.int(view, dim, item)
    return view, tensors


def _items(tensor: torch.Tensor, index: Any) -> list[Any]:
    """The index with lists as tensors, and slices in the place of an ellipsis."""
    given = [torch.tensor(i) if isinstance(i, list) else i for i in (index if isinstance(index, tuple) else (index,))]
    for item in given:
        if isinstance(item, bool):
            raise TypeError(f"an index of type bool is not supported while a model is cross-compiled: {index}")
    used = sum(
        item.dim() if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1
        for item in given
        if item is not None and item is not Ellipsis
    )
    at = next((i for i, item in enumerate(given) if item is Ellipsis), None)
    if at is not None:
        given[at : at + 1] = [slice(None)] * (tensor.dim() - used)
    while given and isinstance(given[-1], slice) and given[-1] == slice(None):
        given.pop()
    return given
