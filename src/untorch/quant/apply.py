"""``quantize``: replaces the linear layers of a module by int4 ones, and reports what became of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from untorch.ops.int4 import GROUP_SIZES
from untorch.ops.int4_layout import pack_int4
from untorch.quant.linear import Int4Linear, padded_features
from untorch.quant.methods import METHODS, quantize_weight, relative_error
from untorch.quant.modules import module_nbytes, replace_modules
from untorch.quant.report import LayerReport, QuantizationReport
from untorch.quant.select import Selector, select, tensor_key
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["DTYPES", "Quantizer", "quantize"]

DTYPES = ("int4",)


def quantize(
    module: nn.Module,
    dtype: str = "int4",
    *,
    group_size: int = 128,
    method: str = "hqq",
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Replaces linear layers of ``module`` by ``Int4Linear``, in place, and reports each.

    Layers are taken that are an nn.Linear with a float32, bfloat16 or float16 weight, and not a subclass. Without
    ``include``, those that would not get smaller are left alone. Layers that share one weight share the packed one. If
    something else reads the weight too, such as a tied embedding, it stays there in floating point, and the report
    says so.

    Args:
        module: Changed in place. Its biases and everything else stay as they are.
        dtype: "int4": 16 values, a scale and a zero for each group, in the dtype of the weight.
        group_size: Inputs that share a scale: 32, 64, 128 or 256. Inputs that fill no group are padded.
        method: "hqq": the zeros are optimised so that outliers do not spoil the rest (half-quadratic quantisation).
            "rtn": rounded to the nearest of 16 steps between the group's least and largest value.
        include: Which layers: patterns of dotted names ("layers.*.mlp.*", as in a shell), or functions of (name,
            module). None: all.
        exclude: Which of them not, likewise.
        device: Where to compute, such as "cuda". None: where each weight lies. The result lies where the weight was.
        progress: Show the running layer when stderr is a terminal.

    Raises:
        InvalidArgumentError: An argument is unknown, a pattern matches nothing, nothing is left to quantise, or a
            weight is not finite.
    """
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"quantize: module: expected a torch.nn.Module, got {type(module).__name__}")
    if type(module) is nn.Linear:
        raise InvalidArgumentError(
            "quantize: module: an nn.Linear cannot be replaced in place: put it into another module, such as "
            "nn.Sequential(linear)"
        )
    quantizer = Quantizer(dtype, group_size=group_size, method=method, device=device)
    return quantizer.apply(module, include, exclude, progress=progress)


@dataclass(frozen=True)
class _Weight:
    """A quantised weight, as all layers that use it share it. ``source`` keeps the memory that its key names alive."""

    packed: torch.Tensor
    scale_and_zero: torch.Tensor
    error: float
    source: torch.Tensor


class Quantizer:
    """Quantises modules one after the other; a weight that several of them use is quantised once."""

    def __init__(self, dtype: str, *, group_size: int, method: str, device: str | torch.device | None = None) -> None:
        if dtype not in DTYPES:
            raise InvalidArgumentError(f"quantize: dtype: expected 'int4', got {dtype!r}")
        if isinstance(group_size, bool) or group_size not in GROUP_SIZES:
            raise InvalidArgumentError(f"quantize: group_size: expected 32, 64, 128 or 256, got {group_size!r}")
        if method not in METHODS:
            known = ", ".join(repr(name) for name in METHODS)
            raise InvalidArgumentError(f"quantize: method: expected one of {known}, got {method!r}")
        self._group_size, self._method = int(group_size), method
        self._device = None if device is None else _usable(device)
        self._weights: dict[tuple[object, ...], _Weight] = {}
        self._layers: dict[int, tuple[nn.Linear, Int4Linear]] = {}

    def apply(
        self,
        module: nn.Module,
        include: Selector | Sequence[Selector] | None = None,
        exclude: Selector | Sequence[Selector] | None = None,
        *,
        progress: bool = False,
        on_layer: Callable[[str], None] | None = None,
    ) -> QuantizationReport:
        """As ``quantize``. ``on_layer`` is told each layer when it begins."""
        start = time.perf_counter()
        before = module_nbytes(module)
        selection = select(module, include, exclude, self._pays)
        if not selection.chosen:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in selection.skipped.items())
            raise InvalidArgumentError(f"quantize: nothing to quantise: {reasons or 'the module has no linear layer'}")
        groups: dict[tuple[object, ...], list[tuple[nn.Linear, list[str]]]] = {}
        for linear, names in selection.chosen:
            groups.setdefault(tensor_key(linear.weight), []).append((linear, names))
        kept = _other_readers(module, [linear for linear, _ in selection.chosen])
        layers = []
        with _steps(progress, on_layer) as step:
            for number, (key, members) in enumerate(groups.items(), 1):
                step(f"{number} of {len(groups)}: {members[0][1][0]}")
                layers.append(self._quantize(key, members, tuple(kept.get(key, ()))))
        replacements = {id(linear): self._layers[id(linear)][1] for linear, _ in selection.chosen}
        replace_modules(module, replacements)
        root = self.replacement(module)
        after = module_nbytes(module if root is None else root)
        return QuantizationReport(tuple(layers), selection.skipped, before, after, time.perf_counter() - start)

    def replacement(self, module: nn.Module) -> Int4Linear | None:
        """What a linear layer was replaced by, if this object replaced it: needed if it is the whole module."""
        found = self._layers.get(id(module))
        return None if found is None else found[1]

    def _pays(self, linear: nn.Linear) -> str:
        n, k = padded_features(linear.in_features, linear.out_features, self._group_size)
        size = linear.weight.element_size()
        before, after = linear.weight.numel() * size, n * k // 2 + n * (k // self._group_size) * 2 * size
        return "" if after < before else f"it would grow from {before} to {after} bytes"

    def _quantize(
        self,
        key: tuple[object, ...],
        members: list[tuple[nn.Linear, list[str]]],
        kept_by: tuple[str, ...],
    ) -> LayerReport:
        names = tuple(name for _, each in members for name in each)
        weight = members[0][0].weight.detach()
        made = self._weights.get(key)
        if made is None:
            made = self._weights[key] = self._make(weight, names[0])
        for linear, _ in members:
            if id(linear) not in self._layers:
                layer = Int4Linear(
                    made.packed, made.scale_and_zero, linear.bias, in_features=linear.in_features,
                    out_features=linear.out_features, group_size=self._group_size, method=self._method,
                )  # fmt: skip
                self._layers[id(linear)] = linear, layer.train(linear.training)
        n, k = padded_features(weight.shape[1], weight.shape[0], self._group_size)
        return LayerReport(
            names=names,
            shape=(weight.shape[0], weight.shape[1]),
            packed_shape=(n, k),
            dtype=str(weight.dtype).removeprefix("torch."),
            group_size=self._group_size,
            method=self._method,
            error=made.error,
            nbytes_before=weight.numel() * weight.element_size(),
            nbytes_after=self._layers[id(members[0][0])][1].weight_nbytes,
            kept_by=kept_by,
        )

    def _make(self, weight: torch.Tensor, name: str) -> _Weight:
        n, k = padded_features(weight.shape[1], weight.shape[0], self._group_size)
        there = weight if self._device is None else weight.to(self._device)
        if not bool(torch.isfinite(there).all()):
            raise InvalidArgumentError(f"quantize: {name}: its weight has values that are not finite")
        values, scale_and_zero = quantize_weight(there, self._group_size, self._method, k)
        error = relative_error(there, values, scale_and_zero, self._group_size)
        padded = nn.functional.pad(values, (0, 0, 0, n - weight.shape[0]), value=8)
        scale_and_zero = nn.functional.pad(scale_and_zero, (0, 0, 0, n - weight.shape[0]))
        return _Weight(pack_int4(padded).to(weight.device), scale_and_zero.to(weight.device), error, weight)


def _usable(device: str | torch.device) -> torch.device:
    try:
        torch.zeros(1, device=device).cpu()
        return torch.device(device)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgumentError(f"quantize: device: {str(device)!r} cannot be used here: {reason}") from error


@contextlib.contextmanager
def _steps(progress: bool, on_layer: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Shows the running layer as export shows its steps, or tells it to ``on_layer``."""
    from untorch.export.progress import Progress

    with Progress(progress).step("quantise") as show:
        yield on_layer or show


def _other_readers(module: nn.Module, chosen: list[nn.Linear]) -> dict[tuple[object, ...], list[str]]:
    """For each weight that is quantised: the parameters and buffers of the module that still need it as it is."""
    replaced = {id(linear) for linear in chosen}
    storages = {linear.weight.untyped_storage()._cdata: tensor_key(linear.weight) for linear in chosen}
    found: dict[tuple[object, ...], list[str]] = {}
    for prefix, part in module.named_modules():
        tensors = [*part._parameters.items(), *part._buffers.items()]
        for name, tensor in tensors:
            if tensor is None or (id(part) in replaced and name == "weight"):
                continue
            if key := storages.get(tensor.untyped_storage()._cdata):
                found.setdefault(key, []).append(f"{prefix}.{name}" if prefix else name)
    return found
