"""Patches of tracing: positions that are tensors, ``cache[:, position] = x`` and ``x.narrow(0, position, 4)``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from untorch.export.patches.indexing import read_index, write_index
from untorch.export.patches.registry import patch, replaced

__all__ = ["tensor_positions"]

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@patch(
    "torch._export.non_strict_utils._NonStrictTorchFunctionHandler._override",
    versions="2.11–2.15",
    why="torch.export reads x[i] with a position that is a tensor, but makes a Python number of it in x[i] = 1, "
    "x[:i] = 1, x[[i, 0]] and x.narrow(0, i, 1), and refuses the model.",
    test="test_tensor_indices.py::test_torch_still_refuses_positions",
)
@contextlib.contextmanager
def tensor_positions() -> Iterator[None]:
    """Positions that are tensors without dimensions stay tensors, or become symbols."""
    from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler

    original: Any = _NonStrictTorchFunctionHandler._override

    def override(self: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__setitem__", "__getitem__") and isinstance(args[0], torch.Tensor) and _has_position(args[1]):
            index = tuple(_plain(item) for item in _as_tuple(args[1]))
            has_arrays = any(_is_array(item) for item in index)
            if has_arrays:  # a position removes its dimension first
                index = tuple(item.item() if _is_position(item) else item for item in index)
            if name == "__setitem__":
                return write_index, (args[0], index, _apart(args[2], args[0])), kwargs
            if has_arrays:
                return read_index, (args[0], index), kwargs
            args = (args[0], index)
        elif name == "narrow" and len(args) == 4 and _is_position(args[2]):
            args = (*args[:2], args[2].item(), args[3])
        return original(self, func, args, kwargs)

    with replaced(_NonStrictTorchFunctionHandler, "_override", override):
        yield


def _as_tuple(index: Any) -> tuple[Any, ...]:
    """One item a dimension; a list with tensors that is the whole index counts as a tuple, as in eager PyTorch."""
    is_tuple = isinstance(index, tuple) or (isinstance(index, list) and any(isinstance(i, torch.Tensor) for i in index))
    return tuple(index) if is_tuple else (index,)


def _apart(value: Any, tensor: torch.Tensor) -> Any:
    """The value in other memory than the tensor: x[i] += 1 writes what it has read there."""
    if not isinstance(value, torch.Tensor) or value.device != tensor.device:
        return value
    return value.clone() if value.untyped_storage()._cdata == tensor.untyped_storage()._cdata else value


def _is_position(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in _INTEGERS


def _is_array(item: Any) -> bool:
    return isinstance(item, list) or (isinstance(item, torch.Tensor) and not _is_position(item))


def _has_position(index: Any) -> bool:
    """Whether a position is a tensor, by itself, in a slice or in a list."""
    items = _as_tuple(index)
    if any(isinstance(item, bool) for item in items):  # a mask without dimensions
        return False
    for item in items:
        inner = item if isinstance(item, list) else (item.start, item.stop) if isinstance(item, slice) else (item,)
        if any(_is_position(one) for one in inner):
            return True
    return False


def _plain(item: Any) -> Any:
    """Slices with numbers or symbols, and lists as tensors."""
    if isinstance(item, slice):
        start, stop = (bound.item() if _is_position(bound) else bound for bound in (item.start, item.stop))
        return slice(start, stop, item.step)
    if isinstance(item, list) and any(_is_position(one) for one in item):
        return torch.stack([torch.as_tensor(one) for one in item])
    return item
