"""``Quantizer``: replaces linear layers, embeddings and experts by quantised ones, and reports what became of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from untorch.quant.embedding import QuantizedEmbedding
from untorch.quant.experts import obstacle
from untorch.quant.methods import is_finite
from untorch.quant.modules import module_nbytes, replace_modules
from untorch.quant.report import LayerReport, QuantizationReport
from untorch.quant.schemes import QuantizedLinear, QuantizedTensors, Target, make_scheme
from untorch.quant.select import Selector, select, tensor_key
from untorch.quant.swiglu import swiglu_of
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["Quantizer", "show_steps"]


@dataclass(frozen=True)
class _Weight:
    """A quantised weight, as all layers that use it share it. ``source`` keeps the memory that its key names alive."""

    quantized: QuantizedTensors
    source: torch.Tensor


class Quantizer:
    """Quantises modules one after the other; a weight that several of them use is quantised once.

    target: the type of the device that the modules are for, "cpu" or "cuda". device: what quantises them, if given.
    keep: gives the tensor that a layer keeps for one that was made, with the same values.
    """

    def __init__(
        self,
        dtype: str,
        *,
        group_size: int | None = None,
        method: str | None = None,
        prefill: str = "exact",
        device: str | torch.device | None = None,
        target: Target = "cpu",
        keep: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._scheme = make_scheme(dtype, group_size, method, prefill, target)
        self._device = None if device is None else _usable(device)
        self._keep = keep or (lambda tensor: tensor)
        self._weights: dict[tuple[object, ...], _Weight] = {}
        self._layers: dict[int, tuple[nn.Linear | nn.Embedding, QuantizedLinear | QuantizedEmbedding]] = {}
        self._input_factors: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._experts: dict[tuple[object, ...], tuple[nn.Module, tuple[LayerReport, ...], nn.Module]] = {}

    def apply(
        self,
        module: nn.Module,
        include: Selector | Sequence[Selector] | None = None,
        exclude: Selector | Sequence[Selector] | None = None,
        *,
        progress: bool = False,
        on_layer: Callable[[str], None] | None = None,
        others: Sequence[tuple[nn.Module, list[str]]] = (),
        only: Collection[int] | None = None,
        even_if_larger: bool = False,
        embeddings: bool = False,
        smooth: Mapping[int, torch.Tensor] | None = None,
    ) -> QuantizationReport:
        """As ``untorch.quant.quantize``. ``on_layer`` is told each layer when it begins.

        others: modules that are quantised elsewhere: patterns may name them, and there need be nothing else.
        only: the layers that there are for this call, by id; the report does not name others, and none need be left.
        even_if_larger: with ``only``, take layers that would grow, too.
        embeddings: tables of embeddings as well.
        smooth: for int8 on CPUs, the factors of ``smoothing_factors``, by the id of the layer.
        """
        start = time.perf_counter()
        smooth = smooth or {}
        before = module_nbytes(module)
        selection = select(
            module, include, exclude, (lambda linear: "") if even_if_larger else self._pays,
            lambda part: self._cannot(part, part is module), self._scheme.obstacle, others, only,
            embeddings,
        )  # fmt: skip
        if not selection.chosen and not selection.experts and not others and only is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in selection.skipped.items())
            raise InvalidArgumentError(f"quantize: nothing to quantise: {reasons or 'the module has no linear layer'}")
        groups: dict[tuple[object, ...], list[tuple[nn.Linear | nn.Embedding, list[str]]]] = {}
        for linear, names in selection.chosen:
            groups.setdefault(tensor_key(linear.weight), []).append((linear, names))
        factors = {
            tensor_key(linear.weight): smooth[id(linear)] for linear, _ in selection.chosen if id(linear) in smooth
        }
        kept = _other_readers(module, [linear for linear, _ in selection.chosen])
        layers = []
        replacements: dict[int, nn.Module] = {}
        count = len(groups) + len(selection.experts)
        with show_steps(progress, on_layer) as step:
            for number, (key, members) in enumerate(groups.items(), 1):
                step(f"{number} of {count}: {members[0][1][0]}")
                layers.append(self._quantize(key, members, tuple(kept.get(key, ())), factors.get(key)))
            for number, (part, names) in enumerate(selection.experts, len(groups) + 1):
                step(f"{number} of {count}: {names[0]}")
                replacements[id(part)], reports = self._quantize_experts(names, part)
                layers += reports
        replacements |= {id(linear): self._layers[id(linear)][1] for linear, _ in selection.chosen}
        replace_modules(module, replacements)
        root = self.replacement(module)
        after = module_nbytes(module if root is None else root)
        return QuantizationReport(tuple(layers), selection.skipped, before, after, time.perf_counter() - start)

    def replacement(self, module: nn.Module) -> QuantizedLinear | QuantizedEmbedding | None:
        """What a linear layer was replaced by, if this object replaced it: needed if it is the whole module."""
        found = self._layers.get(id(module))
        return None if found is None else found[1]

    def _pays(self, linear: nn.Linear | nn.Embedding) -> str:
        n, k = self._scheme.padded(linear.weight.shape[1], linear.weight.shape[0])
        size = linear.weight.element_size()
        before, after = linear.weight.numel() * size, self._scheme.nbytes(n, k, size)
        return "" if after < before else f"it would grow from {before} to {after} bytes"

    def _quantize(
        self,
        key: tuple[object, ...],
        members: list[tuple[nn.Linear | nn.Embedding, list[str]]],
        kept_by: tuple[str, ...],
        factor: torch.Tensor | None = None,
    ) -> LayerReport:
        names = tuple(name for _, each in members for name in each)
        weight = members[0][0].weight.detach()
        if factor is not None:
            key = *key, id(factor)
        made = self._weights.get(key)
        if made is None:
            made = self._weights[key] = self._make(weight, names[0], factor)
        for linear, _ in members:
            if id(linear) not in self._layers:
                tensors = made.quantized.tensors
                if factor is not None:
                    tensors = *tensors, self._input_factor(factor, weight.dtype)
                layer: QuantizedLinear | QuantizedEmbedding
                if isinstance(linear, nn.Embedding):
                    layer = self._scheme.embedding(linear, tensors)
                else:
                    layer = self._scheme.layer(linear, tensors)
                self._layers[id(linear)] = linear, layer.train(linear.training)
        n, k = self._scheme.padded(weight.shape[1], weight.shape[0])
        return LayerReport(
            names=names,
            shape=(weight.shape[0], weight.shape[1]),
            packed_shape=(n, k),
            dtype=str(weight.dtype).removeprefix("torch."),
            group_size=self._scheme.group_size(weight.shape[1]),
            method=self._scheme.method if factor is None else f"{self._scheme.method}, smooth",
            error=made.quantized.error,
            nbytes_before=weight.numel() * weight.element_size(),
            nbytes_after=max(self._layers[id(part)][1].weight_nbytes for part, _ in members),
            kept_by=kept_by,
            rtn_error=made.quantized.rtn_error,
            prefill=self._scheme.prefill,
            quantized_dtype=self._scheme.dtype,
        )

    def _cannot(self, experts: nn.Module, is_root: bool) -> str:
        """Why experts are left alone, or ""."""
        if reason := self._scheme.experts_obstacle():
            return reason
        if is_root:
            return "experts cannot be replaced in place: give what has them"
        return obstacle(experts)

    def _quantize_experts(self, names: list[str], experts: nn.Module) -> tuple[nn.Module, tuple[LayerReport, ...]]:
        """What takes their place, for equal weights the same, and a report for each of the two weights."""
        given = dict(experts.named_parameters())
        key = swiglu_of(experts), *(tensor_key(tensor) for tensor in given.values())
        if key not in self._experts:
            for field, tensor in given.items():
                if not is_finite(tensor):
                    raise InvalidArgumentError(f"quantize: {names[0]}: its {field} has values that are not finite")
            made = self._scheme.experts(names[0], experts, self._device)
            reports = []
            for field, (error, shape, tensors) in made.parts.items():
                weight = given[field]
                nbytes = [sum(t.numel() * t.element_size() for t in each) for each in ((weight,), tensors)]
                every = tuple(f"{name}.{field}" for name in names)
                reports.append(
                    LayerReport(
                        every, shape, self._scheme.padded(shape[1], shape[0]),
                        str(weight.dtype).removeprefix("torch."), self._scheme.group_size(shape[1]),
                        self._scheme.method, error, nbytes[0], nbytes[1], quantized_dtype=self._scheme.dtype,
                    )
                )  # fmt: skip
            for part in made.module.modules():
                part._buffers.update({n: self._keep(t) for n, t in part._buffers.items() if t is not None})
            self._experts[key] = made.module.train(experts.training), tuple(reports), experts
        module, found, _ = self._experts[key]
        return module, found

    def _input_factor(self, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """1 / s, the same tensor for all layers that share s."""
        kind = id(factor), dtype
        if kind not in self._input_factors:
            self._input_factors[kind] = factor, (1 / factor).to(dtype)
        return self._input_factors[kind][1]

    def _make(self, weight: torch.Tensor, name: str, factor: torch.Tensor | None = None) -> _Weight:
        there = weight if self._device is None else weight.to(self._device)
        if factor is not None:
            there = there.float() * factor.to(there.device)
        if not is_finite(there):
            raise InvalidArgumentError(f"quantize: {name}: its weight has values that are not finite")
        made = self._scheme.quantize(there)
        tensors = tuple(self._keep(tensor.to(weight.device)) for tensor in made.tensors)
        return _Weight(replace(made, tensors=tensors), weight)


def _usable(device: str | torch.device) -> torch.device:
    try:
        torch.zeros(1, device=device).cpu()
        return torch.device(device)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgumentError(f"quantize: device: {str(device)!r} cannot be used here: {reason}") from error


@contextlib.contextmanager
def show_steps(progress: bool, on_layer: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Shows the running layer as export shows its steps, or tells it to ``on_layer``."""
    from untorch.progress import Progress

    with Progress(progress).step("quantise") as show:
        yield on_layer or show


def _other_readers(module: nn.Module, chosen: list[nn.Linear | nn.Embedding]) -> dict[tuple[object, ...], list[str]]:
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
