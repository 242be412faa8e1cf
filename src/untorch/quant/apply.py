"""``quantize``: replaces linear layers and experts of a module by quantised ones, and reports what became of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from untorch.quant.experts import NVFP4Experts, make_experts, obstacle
from untorch.quant.modules import module_nbytes, replace_modules
from untorch.quant.report import LayerReport, QuantizationReport
from untorch.quant.schemes import QuantizedLinear, QuantizedTensors, make_scheme
from untorch.quant.select import Selector, select, tensor_key
from untorch.quant.swiglu import swiglu_of
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["Quantizer", "quantize"]


def quantize(
    module: nn.Module,
    dtype: str = "int4",
    *,
    group_size: int | None = None,
    method: str | None = None,
    prefill: str = "exact",
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Replaces linear layers of ``module`` by ``Int4Linear``, ``Int8Linear`` or ``NVFP4Linear``, in place, and reports
    each; for nvfp4 also the experts of transformers' models by ``NVFP4Experts``, see ``quantize_experts``.

    Layers are taken that are an nn.Linear with a float32, bfloat16 or float16 weight, and not a subclass. Without
    ``include``, those that would not get smaller are left alone. Layers that share one weight share the packed one. If
    something else reads the weight too, such as a tied embedding, it stays there in floating point, and the report
    says so.

    Args:
        module: Changed in place. Its biases and everything else stay as they are.
        dtype: "int4": 16 values, a scale and a zero for each group, in the dtype of the weight. "int8": a scale an
            output; activations are quantised too, a row at a time when the layer is called, and CPUs multiply in
            integers. "nvfp4": floating point of four bits, a scale in float8_e4m3fn for each 16 inputs, and a scale of
            all.
        group_size: For int4, inputs that share a scale: 32, 64, 128 (None) or 256. For nvfp4 16, which cannot be
            chosen; int8 has no groups. Inputs that fill no group are padded.
        method: For int4 "hqq" (None): the zeros are optimised so that outliers do not spoil the rest (half-quadratic
            quantisation). "rtn": rounded to the nearest of 16 steps between the group's least and largest value.
            For int8 "rtn" (None): to the nearest of 255 steps, the output's largest magnitude at the end.
            For nvfp4 "search" (None): each scale is that of the least squared error. "rtn": the scale that makes the
            largest value 6, E2M1's largest.
        prefill: For nvfp4, how GPUs may compute linear layers at large M. "exact": with the activations as they
            are. "fp8": faster, activations and weights rounded to float8_e4m3fn, in rows with a scale each, from
            compute capability 8.9 on. "fp4": activations rounded to NVFP4, on sm_100, sm_103, sm_120 and sm_121. Other
            GPUs refuse the layers. Small M, experts, and the CPU are always exact.
        include: Which layers and experts: patterns of dotted names ("layers.*.mlp.*", as in a shell), or functions of
            (name, module). None: all.
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
    quantizer = Quantizer(dtype, group_size=group_size, method=method, prefill=prefill, device=device)
    return quantizer.apply(module, include, exclude, progress=progress)


@dataclass(frozen=True)
class _Weight:
    """A quantised weight, as all layers that use it share it. ``source`` keeps the memory that its key names alive."""

    quantized: QuantizedTensors
    source: torch.Tensor


class Quantizer:
    """Quantises modules one after the other; a weight that several of them use is quantised once."""

    def __init__(
        self,
        dtype: str,
        *,
        group_size: int | None = None,
        method: str | None = None,
        prefill: str = "exact",
        device: str | torch.device | None = None,
    ) -> None:
        self._scheme = make_scheme(dtype, group_size, method, prefill)
        self._device = None if device is None else _usable(device)
        self._weights: dict[tuple[object, ...], _Weight] = {}
        self._layers: dict[int, tuple[nn.Linear, QuantizedLinear]] = {}
        self._experts: dict[tuple[object, ...], tuple[NVFP4Experts, tuple[LayerReport, ...], nn.Module]] = {}

    def apply(
        self,
        module: nn.Module,
        include: Selector | Sequence[Selector] | None = None,
        exclude: Selector | Sequence[Selector] | None = None,
        *,
        progress: bool = False,
        on_layer: Callable[[str], None] | None = None,
        others: Sequence[tuple[nn.Module, list[str]]] = (),
    ) -> QuantizationReport:
        """As ``quantize``. ``on_layer`` is told each layer when it begins.

        others: modules that are quantised elsewhere: patterns may name them, and there need be nothing else.
        """
        start = time.perf_counter()
        before = module_nbytes(module)
        selection = select(
            module, include, exclude, self._pays, lambda part: self._cannot(part, part is module),
            self._scheme.obstacle, others,
        )  # fmt: skip
        if not selection.chosen and not selection.experts and not others:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in selection.skipped.items())
            raise InvalidArgumentError(f"quantize: nothing to quantise: {reasons or 'the module has no linear layer'}")
        groups: dict[tuple[object, ...], list[tuple[nn.Linear, list[str]]]] = {}
        for linear, names in selection.chosen:
            groups.setdefault(tensor_key(linear.weight), []).append((linear, names))
        kept = _other_readers(module, [linear for linear, _ in selection.chosen])
        layers = []
        replacements: dict[int, nn.Module] = {}
        count = len(groups) + len(selection.experts)
        with _steps(progress, on_layer) as step:
            for number, (key, members) in enumerate(groups.items(), 1):
                step(f"{number} of {count}: {members[0][1][0]}")
                layers.append(self._quantize(key, members, tuple(kept.get(key, ()))))
            for number, (part, names) in enumerate(selection.experts, len(groups) + 1):
                step(f"{number} of {count}: {names[0]}")
                replacements[id(part)], reports = self._quantize_experts(names, part)
                layers += reports
        replacements |= {id(linear): self._layers[id(linear)][1] for linear, _ in selection.chosen}
        replace_modules(module, replacements)
        root = self.replacement(module)
        after = module_nbytes(module if root is None else root)
        return QuantizationReport(tuple(layers), selection.skipped, before, after, time.perf_counter() - start)

    def replacement(self, module: nn.Module) -> QuantizedLinear | None:
        """What a linear layer was replaced by, if this object replaced it: needed if it is the whole module."""
        found = self._layers.get(id(module))
        return None if found is None else found[1]

    def _pays(self, linear: nn.Linear) -> str:
        n, k = self._scheme.padded(linear.in_features, linear.out_features)
        size = linear.weight.element_size()
        before, after = linear.weight.numel() * size, self._scheme.nbytes(n, k, size)
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
                layer = self._scheme.layer(linear, made.quantized.tensors)
                self._layers[id(linear)] = linear, layer.train(linear.training)
        n, k = self._scheme.padded(weight.shape[1], weight.shape[0])
        return LayerReport(
            names=names,
            shape=(weight.shape[0], weight.shape[1]),
            packed_shape=(n, k),
            dtype=str(weight.dtype).removeprefix("torch."),
            group_size=self._scheme.group_size(weight.shape[1]),
            method=self._scheme.method,
            error=made.quantized.error,
            nbytes_before=weight.numel() * weight.element_size(),
            nbytes_after=self._layers[id(members[0][0])][1].weight_nbytes,
            kept_by=kept_by,
            rtn_error=made.quantized.rtn_error,
            prefill=self._scheme.prefill,
        )

    def _cannot(self, experts: nn.Module, is_root: bool) -> str:
        """Why experts are left alone, or ""."""
        if not self._scheme.serves_experts:
            return "experts stay in floating point: only nvfp4 has GEMMs for them"
        if is_root:
            return "experts cannot be replaced in place: give what has them"
        return obstacle(experts)

    def _quantize_experts(self, names: list[str], experts: nn.Module) -> tuple[NVFP4Experts, tuple[LayerReport, ...]]:
        """What takes their place, for equal weights the same, and a report for each of the two weights."""
        given = dict(experts.named_parameters())
        key = swiglu_of(experts), *(tensor_key(tensor) for tensor in given.values())
        if key not in self._experts:
            for field, tensor in given.items():
                if not bool(torch.isfinite(tensor).all()):
                    raise InvalidArgumentError(f"quantize: {names[0]}: its {field} has values that are not finite")
            made, report = make_experts(names[0], experts, self._scheme.method == "search", self._device)
            moe = made.moe
            parts = {  # in [n, k], whichever way round they were
                "gate_up_proj": (report.error_gate_up, (moe.w13, moe.w13_scale, moe.w13_global)),
                "down_proj": (report.error_down, (moe.w2, moe.w2_scale, moe.w2_global)),
            }
            reports = []
            for field, (error, tensors) in parts.items():
                weight, packed = given[field], tensors[0]
                shape = (packed.shape[0] * packed.shape[1], 2 * packed.shape[2])
                nbytes = [sum(t.numel() * t.element_size() for t in each) for each in ((weight,), tensors)]
                every = tuple(f"{name}.{field}" for name in names)
                reports.append(
                    LayerReport(
                        every, shape, shape, str(weight.dtype).removeprefix("torch."),
                        self._scheme.group_size(shape[1]),
                        self._scheme.method, error, nbytes[0], nbytes[1],
                    )
                )  # fmt: skip
            self._experts[key] = made.train(experts.training), tuple(reports), experts
        made, found, _ = self._experts[key]
        return made, found

    def _make(self, weight: torch.Tensor, name: str) -> _Weight:
        there = weight if self._device is None else weight.to(self._device)
        if not bool(torch.isfinite(there).all()):
            raise InvalidArgumentError(f"quantize: {name}: its weight has values that are not finite")
        made = self._scheme.quantize(there)
        tensors = tuple(tensor.to(weight.device) for tensor in made.tensors)
        return _Weight(replace(made, tensors=tensors), weight)


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
    from untorch.progress import Progress

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
