"""The experts of transformers' mixture-of-experts models in NVFP4 and int4."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from untorch.ops.int4 import dequantize_int4
from untorch.ops.int4_moe import OPERATOR as INT4_MOE
from untorch.ops.int4_moe import check_weights
from untorch.ops.moe import check_numbers
from untorch.ops.nvfp4_layout import dequantize_nvfp4
from untorch.quant.modules import replace_modules
from untorch.quant.moe import NVFP4MoE
from untorch.quant.nvfp4 import NVFP4_METHODS, quantize_nvfp4_errors
from untorch.quant.swiglu import SwiGLU, swiglu_of
from untorch.runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from untorch.quant.schemes import QuantizedTensors

__all__ = [
    "ExpertsReport",
    "Int4Experts",
    "NVFP4Experts",
    "experts_of",
    "make_experts",
    "make_int4_experts",
    "obstacle",
    "quantize_experts",
]

_BIASES = ("gate_up_proj_bias", "down_proj_bias")


class NVFP4Experts(nn.Module):
    """Takes the place of transformers' modules of experts."""

    def __init__(self, moe: NVFP4MoE) -> None:
        super().__init__()
        self.moe = moe
        self.num_experts = moe.num_experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [M, K], top_k_index and top_k_weights [M, top_k]; gives [M, K].

        An index of num_experts, which is that of an expert elsewhere, adds nothing.
        """
        index = torch.where(top_k_index == self.num_experts, -1, top_k_index)
        y: torch.Tensor = self.moe(hidden_states, top_k_weights, index)
        return y

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights [E, 2·I, K], an expert's gate before its up, and [E, K, I] that this module multiplies with."""
        moe = self.moe
        e, k, width = moe.num_experts, moe.hidden_size, moe.intermediate_size
        halves = moe.w13_global.reshape(e, -1).expand(e, 2)
        upper = dequantize_nvfp4(
            moe.w13.reshape(e, 2, width, -1), moe.w13_scale.reshape(e, 2, width, -1), halves, dtype
        )
        return upper.reshape(e, 2 * width, k), dequantize_nvfp4(moe.w2, moe.w2_scale, moe.w2_global, dtype)


class Int4Experts(nn.Module):
    """Takes the place of transformers' modules of experts, with weights in int4.

    w13, w13_scale_and_zero: of all experts' gates and ups, [E · 2·I, K] packed as for ``Int4Linear``, an expert's gate
        before its up. w2, w2_scale_and_zero: [E · K, I].
    w13_bias, w2_bias: float32 [E, 2·I] and [E, K], or None.

    Raises InvalidArgumentError.
    """

    w13: torch.Tensor
    w13_scale_and_zero: torch.Tensor
    w2: torch.Tensor
    w2_scale_and_zero: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    def __init__(
        self,
        w13: torch.Tensor,
        w13_scale_and_zero: torch.Tensor,
        w2: torch.Tensor,
        w2_scale_and_zero: torch.Tensor,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        *,
        intermediate_size: int,
        group_size: int,
        method: str,
        swiglu: SwiGLU | None = None,
    ) -> None:
        super().__init__()
        swiglu = swiglu or SwiGLU()
        try:
            self.num_experts, self.hidden_size, _ = check_weights(
                "Int4Experts", w13, w13_scale_and_zero, w2, w2_scale_and_zero, group_size, intermediate_size
            )
            check_numbers("Int4Experts", swiglu.alpha, swiglu.beta, swiglu.limit)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        self.intermediate_size, self.group_size, self.method, self.swiglu = (
            intermediate_size, group_size, method, swiglu,
        )  # fmt: skip
        self.register_buffer("w13", w13)
        self.register_buffer("w13_scale_and_zero", w13_scale_and_zero)
        self.register_buffer("w2", w2)
        self.register_buffer("w2_scale_and_zero", w2_scale_and_zero)
        self.register_buffer("w13_bias", w13_bias)
        self.register_buffer("w2_bias", w2_bias)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [.., K], top_k_index and top_k_weights [.., top_k]; gives [.., K].

        An index of num_experts, which is that of an expert elsewhere, adds nothing.
        """
        if hidden_states.shape[-1] != self.hidden_size:
            raise InvalidArgumentError(
                f"Int4Experts: expected {self.hidden_size} features in the last dimension, got "
                f"{tuple(hidden_states.shape)}"
            )
        index = torch.where(top_k_index == self.num_experts, -1, top_k_index)
        if index.dtype == torch.int64:  # a conversion alone would make some expert of an id that is out of range
            index = index.clamp(-2, self.num_experts)
        tokens = math.prod(hidden_states.shape[:-1])
        y: torch.Tensor = INT4_MOE(
            hidden_states.reshape(tokens, self.hidden_size).contiguous(),
            top_k_weights.reshape(tokens, -1).to(torch.float32).contiguous(),
            index.reshape(tokens, -1).to(torch.int32).contiguous(),
            self.w13, self.w13_scale_and_zero, self.w2, self.w2_scale_and_zero, self.group_size, self.intermediate_size,
            self.w13_bias, self.w2_bias, self.swiglu.alpha, self.swiglu.beta, self.swiglu.limit,
        )  # fmt: skip
        return y.view(hidden_states.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights [E, 2·I, K], an expert's gate before its up, and [E, K, I] that this module multiplies with."""
        e, k, width, group = self.num_experts, self.hidden_size, self.intermediate_size, self.group_size
        upper = dequantize_int4(self.w13, self.w13_scale_and_zero, group, dtype)[:, :k]
        lower = dequantize_int4(self.w2, self.w2_scale_and_zero, group, dtype)[:, :width]
        return upper.reshape(e, 2 * width, k), lower.reshape(e, k, width)

    @property
    def weight_nbytes(self) -> int:
        """The bytes of the packed weights with scales and zeros; biases do not count."""
        tensors = (self.w13, self.w13_scale_and_zero, self.w2, self.w2_scale_and_zero)
        return sum(t.numel() * t.element_size() for t in tensors)

    def extra_repr(self) -> str:
        """The sizes and the method."""
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, group_size={self.group_size}, method={self.method!r}"
        )


@dataclass(frozen=True)
class ExpertsReport:
    """One module: its name, its weights' bytes before and after, biases left out, and the relative errors of all
    experts' weights together.
    """

    name: str
    nbytes_before: int
    nbytes_after: int
    error_gate_up: float
    error_down: float


def quantize_experts(module: nn.Module, *, method: str = "search") -> list[ExpertsReport]:
    """Replaces the experts of ``module`` by ``NVFP4Experts``, in place, and reports each.

    Taken are modules with parameters gate_up_proj [E, 2·I, K] and down_proj [E, K, I], as transformers has them for
    Qwen3-MoE, Mixtral and others, or [E, K, 2·I] and [E, I, K], as for gpt-oss, with both biases or none, which become
    float32. Between them is SiLU or what ``NVFP4MoE`` describes: the module's ``_apply_gate`` is called with numbers to
    see that, and whether gate and up take turns; without one, its act_fn must be a SiLU. The gate's and up's rows have
    a global scale each. ``method`` is "search" or "rtn", as for linear layers.

    Raises InvalidArgumentError where there are none, where they are of another kind, or for an unknown method.
    """
    if method not in NVFP4_METHODS:
        raise InvalidArgumentError(f"quantize_experts: method: expected one of {NVFP4_METHODS}, got {method!r}")
    found = {names[0]: child for child, names in experts_of(module)}
    if not found:
        raise InvalidArgumentError("quantize_experts: module: it has no experts with gate_up_proj and down_proj")
    if "" in found:
        raise InvalidArgumentError("quantize_experts: module: experts cannot be replaced in place: give what has them")
    for name, experts in found.items():
        if reason := obstacle(experts):
            raise InvalidArgumentError(f"quantize_experts: {name}: {reason}")
    made: dict[int, nn.Module] = {}
    reports = []
    for name, experts in found.items():
        made[id(experts)], report = make_experts(name, experts, method == "search")
        reports.append(report)
    replace_modules(module, made)
    return reports


def experts_of(module: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Every module of experts once, of any kind, with all names under which it is reached, "" for the module."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if all(isinstance(getattr(part, field, None), nn.Parameter) for field in ("gate_up_proj", "down_proj")):
            found.setdefault(id(part), (part, []))[1].append(name)
    return list(found.values())


def obstacle(experts: nn.Module) -> str:
    """Why neither NVFP4Experts nor Int4Experts can take their place, or ""."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    assert isinstance(gate_up, nn.Parameter)
    assert isinstance(down, nn.Parameter)
    others = [other for other, _ in experts.named_parameters() if other not in ("gate_up_proj", "down_proj")]
    sizes = _sizes(gate_up, down)
    if sizes is None:
        return (
            f"expected gate_up_proj [E, 2·I, K] and down_proj [E, K, I], or [E, K, 2·I] and [E, I, K], got "
            f"{list(gate_up.shape)} and {list(down.shape)}"
        )
    e, k, width, _ = sizes
    if k % 16 or width % 16:
        return f"expected K and I to be multiples of 16, got K = {k} and I = {width}"
    if (others and set(others) != set(_BIASES)) or swiglu_of(experts) is None:
        return (
            "expected experts of two GEMMs, with both biases or none and with SiLU or gpt-oss's activation between, "
            f"got {type(experts).__name__} with act_fn {type(getattr(experts, 'act_fn', None)).__name__}"
            f"{' and ' + ', '.join(others) if others else ''}"
        )
    if others and (shapes := [list(getattr(experts, name).shape) for name in _BIASES]) != [[e, 2 * width], [e, k]]:
        return f"expected biases [{e}, {2 * width}] and [{e}, {k}], got {shapes[0]} and {shapes[1]}"
    return ""


def _sizes(gate_up: torch.Tensor, down: torch.Tensor) -> tuple[int, int, int, bool] | None:
    """E, K and I of weights that fit each other, and whether both are transposed."""
    if gate_up.dim() != 3 or down.dim() != 3:
        return None
    e, first, last = gate_up.shape
    if first % 2 == 0 and down.shape == (e, last, first // 2):
        return e, last, first // 2, False
    return (e, first, last // 2, True) if last % 2 == 0 and down.shape == (e, last // 2, first) else None


def make_experts(
    name: str, experts: nn.Module, search: bool, device: torch.device | None = None
) -> tuple[NVFP4Experts, ExpertsReport]:
    """What takes their place, where there is no obstacle, and the report. ``device`` computes, if given."""
    tensors = {field: parameter.detach() for field, parameter in experts.named_parameters()}
    home = tensors["gate_up_proj"].device
    gate_up, down = (tensors[field].to(device or home) for field in ("gate_up_proj", "down_proj"))
    swiglu, sizes = swiglu_of(experts), _sizes(gate_up, down)
    assert swiglu is not None
    assert sizes is not None
    if sizes[3]:
        gate_up, down = gate_up.mT, down.mT.contiguous()
    gate_up = _gate_first(gate_up, swiglu.interleaved)
    upper, lower_bias = (tensors[field].float() if field in tensors else None for field in _BIASES)
    e, rows, k = gate_up.shape
    halves, upper_error, _ = quantize_nvfp4_errors(gate_up.reshape(e, 2, rows // 2, k), search)
    lower, lower_error, _ = quantize_nvfp4_errors(down, search)
    moe = NVFP4MoE(
        halves.packed.reshape(e, rows, k // 2), halves.block_scale.reshape(e, rows, k // 16), lower.packed,
        lower.block_scale, halves.global_scale, lower.global_scale,
        None if upper is None else _gate_first(upper, swiglu.interleaved).to(gate_up.device, copy=True),
        None if lower_bias is None else lower_bias.to(gate_up.device, copy=True), swiglu_alpha=swiglu.alpha,
        swiglu_beta=swiglu.beta, swiglu_limit=swiglu.limit,
    )  # fmt: skip
    before = sum(p.numel() * p.element_size() for p in (gate_up, down))
    report = ExpertsReport(name, before, moe.weight_nbytes, upper_error, lower_error)
    return NVFP4Experts(moe).to(home), report


def make_int4_experts(
    experts: nn.Module,
    quantize: Callable[[torch.Tensor], QuantizedTensors],
    group_size: int,
    method: str,
    device: torch.device | None = None,
) -> tuple[Int4Experts, tuple[float, float]]:
    """What takes their place, where there is no obstacle, and the errors of the two weights.

    quantize: of a weight [n, k], as for linear layers. ``device`` computes, if given.
    """
    tensors = {field: parameter.detach() for field, parameter in experts.named_parameters()}
    swiglu, sizes = swiglu_of(experts), _sizes(tensors["gate_up_proj"], tensors["down_proj"])
    assert swiglu is not None
    assert sizes is not None
    home = tensors["gate_up_proj"].device
    gate_up, down = (tensors[field].to(device or home) for field in ("gate_up_proj", "down_proj"))
    if sizes[3]:
        gate_up, down = gate_up.mT, down.mT
    upper = quantize(_gate_first(gate_up, swiglu.interleaved).flatten(0, 1))
    lower = quantize(down.flatten(0, 1))
    bias, lower_bias = (tensors[field].float() if field in tensors else None for field in _BIASES)
    (w13, w13_scales), (w2, w2_scales) = upper.tensors, lower.tensors
    made = Int4Experts(
        w13, w13_scales, w2, w2_scales,
        None if bias is None else _gate_first(bias, swiglu.interleaved).to(gate_up.device, copy=True),
        None if lower_bias is None else lower_bias.to(gate_up.device, copy=True),
        intermediate_size=sizes[2], group_size=group_size, method=method, swiglu=swiglu,
    )  # fmt: skip
    return made.to(home), (upper.error, lower.error)


def _gate_first(tensor: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[E, 2·I, ..] with the gate's rows before those of up, contiguous."""
    return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1) if interleaved else tensor.contiguous()
