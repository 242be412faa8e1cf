"""Which linear layers and experts of a module are quantised: names, patterns and predicates, and who else reads a
weight.
"""

from __future__ import annotations

import dis
import fnmatch
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from untorch.quant.attention import ProjectedAttention
from untorch.quant.experts import experts_of
from untorch.quant.exposed import reads_weights
from untorch.runtime.errors import InvalidArgumentError

__all__ = [
    "Selection",
    "Selector",
    "convolutions",
    "embeddings_of",
    "left_convolutions",
    "linears",
    "select",
    "tensor_key",
]

Selector = str | Callable[[str, nn.Module], bool]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Selection:
    """What to quantise with all its names: ``chosen`` linear layers and embeddings, ``experts`` modules of several;
    ``skipped``: name to reason.
    """

    chosen: list[tuple[nn.Linear | nn.Embedding, list[str]]]
    skipped: dict[str, str]
    experts: list[tuple[nn.Module, list[str]]]


def linears(module: nn.Module) -> list[tuple[nn.Linear, list[str]]]:
    """Every linear layer once, subclasses too, each with all names under which it is reached, "" for the module."""
    found: dict[int, tuple[nn.Linear, list[str]]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, nn.Linear):
            found.setdefault(id(part), (part, []))[1].append(name)
    return list(found.values())


def embeddings_of(module: nn.Module) -> list[tuple[nn.Embedding, list[str]]]:
    """Every table of embeddings once, subclasses too, each with all its names."""
    found: dict[int, tuple[nn.Embedding, list[str]]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, nn.Embedding):
            found.setdefault(id(part), (part, []))[1].append(name)
    return list(found.values())


def convolutions(module: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Every 1-D and 2-D convolution once, each with all its names."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, nn.Conv1d | nn.Conv2d):
            found.setdefault(id(part), (part, []))[1].append(name)
    return list(found.values())


def left_convolutions(
    module: nn.Module,
    include: Selector | Sequence[Selector] | None,
    exclude: Selector | Sequence[Selector] | None,
) -> dict[str, str]:
    """The convolutions that ``include`` and ``exclude`` leave alone, by all their names, with the reason."""
    found = convolutions(module)
    candidates = [*linears(module), *experts_of(module), *found]
    wanted, unwanted = _matcher("include", include, candidates), _matcher("exclude", exclude, candidates)
    left: dict[str, str] = {}
    for part, names in found:
        if include is not None and not wanted(part, names):
            left |= dict.fromkeys(names, "not in include")
        elif exclude is not None and unwanted(part, names):
            left |= dict.fromkeys(names, "in exclude")
    return left


def select(
    module: nn.Module,
    include: Selector | Sequence[Selector] | None,
    exclude: Selector | Sequence[Selector] | None,
    pays: Callable[[nn.Linear | nn.Embedding], str],
    experts_obstacle: Callable[[nn.Module], str],
    layer_obstacle: Callable[[nn.Linear | nn.Embedding], str],
    others: Sequence[tuple[nn.Module, list[str]]] = (),
    only: Collection[int] | None = None,
    embeddings: bool = False,
) -> Selection:
    """What to quantise. A pattern that matches neither linear layer nor experts is an InvalidArgumentError with all
    names.

    ``pays`` gives a reason why a layer is left alone unless ``include`` names it, or "". ``experts_obstacle`` gives one
    why experts cannot be replaced, ``layer_obstacle`` one why a layer cannot be quantised in the wanted dtype.
    ``others`` are modules that patterns may name as well. ``only``: the layers that there are, by id; None: all.
    ``embeddings``: tables of embeddings as well.
    """
    layers: list[tuple[nn.Linear | nn.Embedding, list[str]]] = [*linears(module)]
    if embeddings:
        layers += embeddings_of(module)
    experts = experts_of(module)
    if only is not None:
        layers = [entry for entry in layers if id(entry[0]) in only]
        experts = [entry for entry in experts if id(entry[0]) in only]
    candidates: list[tuple[nn.Module, list[str]]] = [*layers, *experts, *others]
    wanted = _matcher("include", include, candidates)
    unwanted = _matcher("exclude", exclude, candidates)
    readers = _readers_of_weights(module)
    selection = Selection([], {}, [])

    def left_alone(part: nn.Module, names: list[str], obstacle: str) -> bool:
        reason = obstacle
        if include is not None and not wanted(part, names):
            reason = "not in include"
        elif exclude is not None and unwanted(part, names):
            reason = "in exclude"
        if reason:
            selection.skipped[names[0] or "(the module itself)"] = reason
        return bool(reason)

    for layer, names in layers:
        obstacle = _obstacle(layer, readers.get(id(layer))) or layer_obstacle(layer)
        if not left_alone(layer, names, obstacle or (pays(layer) if include is None else "")):
            selection.chosen.append((layer, names))
    if only is None:
        for name, part in module.named_modules():
            if isinstance(part, nn.MultiheadAttention) and not isinstance(part, ProjectedAttention):
                reason = f"it is a parameter of a {type(part).__name__}, which has forward hooks or extends its forward"
                selection.skipped[f"{name}.in_proj" if name else "in_proj"] = reason
    for part, names in experts:
        if not left_alone(part, names, experts_obstacle(part)):
            selection.experts.append((part, names))
    return selection


def tensor_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same stretch of memory in the same form, such as tied parameters."""
    return (
        tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype,
    )  # fmt: skip


def _matcher(
    option: str, selectors: Selector | Sequence[Selector] | None, candidates: list[tuple[nn.Module, list[str]]]
) -> Callable[[nn.Module, list[str]], bool]:
    listed: Iterable[Selector] = [selectors] if isinstance(selectors, str) or callable(selectors) else selectors or ()
    listed = list(listed)
    for selector in listed:
        if isinstance(selector, str):
            if not any(fnmatch.fnmatchcase(name, selector) for _, names in candidates for name in names):
                known = ", ".join(name for _, names in candidates for name in names if name) or "none"
                raise InvalidArgumentError(f"{option}: {selector!r} matches no linear layer; there are: {known}")
        elif not callable(selector):
            raise InvalidArgumentError(
                f"{option}: expected name patterns or functions of (name, module), got {type(selector).__name__}"
            )

    def matches(part: nn.Module, names: list[str]) -> bool:
        return any(
            fnmatch.fnmatchcase(name, selector) if isinstance(selector, str) else bool(selector(name, part))
            for selector in listed
            for name in names
        )

    return matches


def _readers_of_weights(module: nn.Module) -> dict[int, str]:
    """Linear layers whose weight another module reads by itself, by id."""
    found: dict[int, str] = {}
    for part in module.modules():
        # A module may say so itself: names of linear layers below it.
        for name in getattr(part, "weights_read", ()):
            found[id(part.get_submodule(name))] = f"{type(part).__name__} reads its weight without calling it"
        # Its inference path passes the weights to one operator for the whole layer.
        if reads_weights(part):
            assert isinstance(part, nn.TransformerEncoderLayer)
            for linear in (part.linear1, part.linear2):
                found[id(linear)] = f"{type(part).__name__} reads its weight without calling it"
        elif not type(part).__module__.startswith("torch.nn."):
            for name in _weights_read_by(type(part).forward):
                if isinstance(child := getattr(part, name, None), nn.Module):
                    found[id(child)] = f"{type(part).__name__} reads its weight without calling it"
    return found


@cache
def _weights_read_by(forward: Callable[..., Any]) -> frozenset[str]:
    """The names NAME of ``self.NAME.weight`` in it: of T5's ``wo``, whose dtype it asks for, and of Swin's layers."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return frozenset()
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    return frozenset(
        str(first.argval)
        for first, second in itertools.pairwise(steps)
        if first.opname == second.opname == "LOAD_ATTR" and second.argval == "weight"
    )


def _obstacle(linear: nn.Linear | nn.Embedding, reader: str | None) -> str:
    """Why the layer cannot be replaced, or ""."""
    if isinstance(linear, nn.Embedding):
        if type(linear) is not nn.Embedding:
            return f"it is a {type(linear).__name__}, not an nn.Embedding: something may extend its forward"
        if linear.max_norm is not None:
            return "it has max_norm, which changes its rows when it is called"
    elif type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, not an nn.Linear: something may read its weight or extend its forward"
    if reader is not None:
        return reader
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it has forward hooks, which a replacement would lose"
    weight = linear.weight
    if type(weight) is not nn.Parameter or weight.layout != torch.strided:
        return f"its weight is a {type(weight).__name__} with the layout {weight.layout}, expected a plain parameter"
    if weight.dtype not in _DTYPES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, expected float32, bfloat16 or float16"
    if weight.is_meta:
        return "its weight is on the meta device: load it first"
    return "it has no weights" if weight.numel() == 0 else ""
