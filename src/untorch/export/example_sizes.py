"""Example inputs that torch.export can generalise: a dynamic dimension of size one becomes two.

torch.export takes a size of one for a constant: it broadcasts, and does not become a symbol. The sizes of later calls
are those that dynamic_shapes allows, one among them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["Examples", "double_sizes_of_one", "dynamic_dims"]

_SIZE = 2


@dataclass
class Examples:
    """A method's example inputs and dynamic shapes as torch.export gets them.

    doubled: the dimensions that grew, by name. grown: the caller's tensors, each with what takes its place.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    dynamic_shapes: Any
    doubled: list[str] = field(default_factory=list)
    grown: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


def double_sizes_of_one(
    name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dynamic_shapes: Any
) -> Examples:
    """The examples of method ``name``, with two in the place of one where a size is dynamic.

    Warns of sizes of one that are Dim.AUTO: torch.export makes them static.
    """
    same = Examples(args, kwargs, dynamic_shapes)
    if not dynamic_shapes:
        return same
    found, dynamic_shapes = dynamic_dims(model, args, kwargs, dynamic_shapes)
    sizes = _root_sizes(found)
    grown: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    automatic: list[str] = []
    doubled: list[str] = []
    for path, tensor, dims in found:
        shape = list(tensor.shape)
        for index, dim in dims.items():
            place = f"{path}.shape[{index}]"
            if _is_hint(dim, "AUTO"):
                automatic += [place] if shape[index] == 1 else []
                continue
            wanted = _wanted_size(dim, shape[index], sizes)
            if wanted != shape[index]:
                shape[index] = wanted
                doubled.append(f"{place}{_named(dim)}")
        if shape != list(tensor.shape):
            grown[id(tensor)] = (tensor, _repeated(tensor, shape))
    if automatic:
        warnings.warn(
            f"export: method {name!r}: {', '.join(automatic)} {'are' if len(automatic) > 1 else 'is'} Dim.AUTO with an "
            f"example of size one, which torch.export takes for a constant: pass an example of size two or Dim.DYNAMIC",
            UserWarning,
            stacklevel=2,
        )
    if not doubled:
        return same
    new_args, new_kwargs = pytree.tree_map(lambda leaf: grown.get(id(leaf), (leaf, leaf))[1], (args, kwargs))
    return Examples(new_args, new_kwargs, dynamic_shapes, doubled, list(grown.values()))


_Found = list[tuple[str, torch.Tensor, dict[int, Any]]]


def dynamic_dims(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dynamic_shapes: Any
) -> tuple[_Found, Any]:
    """Each tensor with its path and what dynamic_shapes has for its dimensions; nothing where they do not fit.

    Also the dynamic shapes as a tree: a ShapesCollection knows tensors by identity.
    """
    from torch.export import dynamic_shapes as torch_shapes

    found: _Found = []
    names: list[str] = []

    def visit(path: Any, leaf: Any, shape: Any) -> None:
        if not isinstance(leaf, torch.Tensor) or not shape:
            return
        entries = shape.items() if isinstance(shape, Mapping) else enumerate(shape)
        first, *rest = path
        name = getattr(first, "key", None) or names[getattr(first, "idx", 0)]
        found.append((f"{name}{pytree.keystr(tuple(rest))}", leaf, {i: dim for i, dim in entries if i < leaf.dim()}))

    try:
        if isinstance(dynamic_shapes, torch_shapes.ShapesCollection):
            collection: Any = dynamic_shapes
            dynamic_shapes = collection.dynamic_shapes(model, args, kwargs)
        combined: Any = torch_shapes._combine_args(model, args, kwargs)
        names += combined
        if isinstance(dynamic_shapes, tuple | list):
            combined = type(dynamic_shapes)(combined.values())
        elif not isinstance(dynamic_shapes, Mapping):
            return [], dynamic_shapes
        torch_shapes._tree_map_with_path(visit, combined, dynamic_shapes, tree_name="inputs")
    except Exception:  # torch.export says what is wrong with them
        return [], dynamic_shapes
    return found, dynamic_shapes


def _root_sizes(found: _Found) -> dict[str, int]:
    """The size of each named dimension that is one and may be larger: two."""
    sizes: dict[str, int] = {}
    for _, tensor, dims in found:
        for index, dim in dims.items():
            if _is_named(dim) and not hasattr(dim, "root") and tensor.shape[index] == 1 and _may_be_two(dim):
                sizes[dim.__name__] = _SIZE
    return sizes


def _wanted_size(dim: Any, size: int, sizes: dict[str, int]) -> int:
    if _is_hint(dim, "DYNAMIC"):
        return _SIZE if size == 1 and _may_be_two(dim) else size
    if not _is_named(dim):
        return size
    root = getattr(dim, "root", dim)
    if root.__name__ not in sizes:
        return size
    return int(dim.fn(sizes[root.__name__])) if root is not dim else sizes[root.__name__]


def _is_hint(dim: Any, kind: str) -> bool:
    return getattr(getattr(dim, "type", None), "name", None) == kind


def _is_named(dim: Any) -> bool:
    return isinstance(dim, torch.export.Dim) and hasattr(dim, "__name__") and not isinstance(dim, int)


def _may_be_two(dim: Any) -> bool:
    largest = getattr(dim, "max", None)
    return largest is None or largest >= _SIZE


def _named(dim: Any) -> str:
    return f" ({dim.__name__})" if _is_named(dim) else ""


def _repeated(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The tensor's values again along the dimensions that grow, in its memory layout."""
    value = tensor.detach()
    for index, size in enumerate(shape):
        if size != value.shape[index]:
            value = value.repeat_interleave(-(-size // value.shape[index]), index).narrow(index, 0, size)
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), tensor.shape[i] > 1, -i), reverse=True)
    laid_out = torch.empty([shape[i] for i in order], dtype=tensor.dtype, device=tensor.device)
    result = laid_out.permute([order.index(i) for i in range(tensor.dim())])
    result.copy_(value)
    return result.requires_grad_(tensor.requires_grad)
