"""``quantize_experts``: the experts of transformers' mixture-of-experts models in NVFP4."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from untorch.quant.modules import replace_modules
from untorch.quant.moe import NVFP4MoE
from untorch.quant.nvfp4 import NVFP4_METHODS, NVFP4Weight, nvfp4_error, quantize_nvfp4
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["ExpertsReport", "NVFP4Experts", "experts_of", "make_experts", "obstacle", "quantize_experts"]

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

    Taken are modules with parameters gate_up_proj [E, 2·I, K] and down_proj [E, K, I] and SiLU as their act_fn, as
    transformers has them for Qwen3-MoE, Mixtral and others, and those of gpt-oss: gate_up_proj [E, K, 2·I], down_proj
    [E, I, K], a bias for each, and an ``_apply_gate`` that gives (clamp(up) + 1) · g · sigmoid(alpha · g). Biases
    become float32. The gate's and up's rows have a global scale each. ``method`` is "search" or "rtn", as for linear
    layers.

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
    """Why NVFP4Experts cannot take their place, or ""."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    assert isinstance(gate_up, nn.Parameter)
    assert isinstance(down, nn.Parameter)
    others = [other for other, _ in experts.named_parameters() if other not in ("gate_up_proj", "down_proj")]
    biased = set(others) == set(_BIASES)
    rows, columns = (2, 1) if biased else (1, 2)  # of gate_up_proj's dimensions
    fits = gate_up.dim() == 3 and down.dim() == 3 and gate_up.shape[rows] % 2 == 0
    if fits:
        e, k, width = gate_up.shape[0], gate_up.shape[columns], gate_up.shape[rows] // 2
        fits = down.shape == ((e, width, k) if biased else (e, k, width))
    if not fits:
        expected = "gate_up_proj [E, K, 2·I] and down_proj [E, I, K]" if biased else (
            "gate_up_proj [E, 2·I, K] and down_proj [E, K, I]"
        )  # fmt: skip
        return f"expected {expected}, got {list(gate_up.shape)} and {list(down.shape)}"
    if k % 16 or width % 16:
        return f"expected K and I to be multiples of 16, got K = {k} and I = {width}"
    if biased:
        shapes = [list(getattr(experts, name).shape) for name in _BIASES]
        if shapes != [[e, 2 * width], [e, k]]:
            return f"expected biases [{e}, {2 * width}] and [{e}, {k}], got {shapes[0]} and {shapes[1]}"
        if _swiglu_of(experts) is None:
            return (
                f"expected biased experts to have alpha, limit and an _apply_gate that gives (clamp(up, -limit, limit) "
                f"+ 1) · g · sigmoid(alpha · g) with g = min(gate, limit), got {type(experts).__name__}, which has not"
            )
        return ""
    activation = getattr(experts, "act_fn", None)
    if others or type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        return (
            f"expected experts of two products, without biases and with SiLU between or as gpt-oss has them, got "
            f"{type(experts).__name__} with act_fn {type(activation).__name__}"
            f"{' and ' + ', '.join(others) if others else ''}"
        )
    return ""


@dataclass(frozen=True)
class _SwiGLU:
    """What is between gpt-oss's products. ``interleaved``: gate and up take turns, else the gate comes first."""

    alpha: float
    limit: float
    interleaved: bool


def _swiglu_of(experts: nn.Module) -> _SwiGLU | None:
    """Of experts with biases; None where their ``_apply_gate`` is another function, by its values."""
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    apply_gate = getattr(experts, "_apply_gate", None)
    if not isinstance(alpha, int | float) or not isinstance(limit, int | float) or not callable(apply_gate):
        return None
    if not (math.isfinite(alpha) and limit > 0):
        return None
    values = torch.tensor([-2.0, -0.6, -0.1, 0.0, 0.2, 0.7, 3.0], dtype=torch.float64) * min(limit, 10.0)
    gate, up = (grid.flatten() for grid in torch.meshgrid(values, values, indexing="ij"))
    clamped = gate.clamp(max=limit)
    expected = (up.clamp(-limit, limit) + 1) * clamped * torch.sigmoid(alpha * clamped)
    for interleaved in (True, False):
        given = torch.stack((gate, up), -1).flatten() if interleaved else torch.cat((gate, up))
        try:
            with torch.no_grad():
                found = apply_gate(given[None])
        except Exception:  # somebody else's function, with a contract of its own
            return None
        if found.shape == (1, gate.numel()) and torch.allclose(found[0], expected, rtol=1e-6, atol=1e-6):
            return _SwiGLU(float(alpha), float(limit), interleaved)
    return None


def make_experts(
    name: str, experts: nn.Module, search: bool, device: torch.device | None = None
) -> tuple[NVFP4Experts, ExpertsReport]:
    """What takes their place, where there is no obstacle, and the report. ``device`` computes, if given."""
    tensors = {field: parameter.detach() for field, parameter in experts.named_parameters()}
    home = tensors["gate_up_proj"].device
    gate_up, down = (tensors[field].to(device or home) for field in ("gate_up_proj", "down_proj"))
    options: dict[str, Any] = {}
    if (swiglu := _swiglu_of(experts)) is not None and _BIASES[0] in tensors:
        gate_up, down = _gate_first(gate_up.mT, swiglu.interleaved), down.mT.contiguous()
        upper, lower_bias = (tensors[field].to(gate_up.device, torch.float32) for field in _BIASES)
        options = {
            "w13_bias": _gate_first(upper, swiglu.interleaved), "w2_bias": lower_bias.contiguous(),
            "swiglu_alpha": swiglu.alpha, "swiglu_beta": 1.0, "swiglu_limit": swiglu.limit,
        }  # fmt: skip
    e, rows, k = gate_up.shape
    halves = quantize_nvfp4(gate_up.reshape(e, 2, rows // 2, k), search=search)
    lower = quantize_nvfp4(down, search=search)
    moe = NVFP4MoE(
        halves.packed.reshape(e, rows, k // 2), halves.block_scale.reshape(e, rows, k // 16), lower.packed,
        lower.block_scale, halves.global_scale, lower.global_scale, **options,
    )  # fmt: skip
    report = ExpertsReport(
        name, sum(p.numel() * p.element_size() for p in (gate_up, down)), moe.weight_nbytes,
        _error(gate_up.reshape(2 * e, rows // 2, k), halves), _error(down, lower),
    )  # fmt: skip
    return NVFP4Experts(moe).to(home), report


def _gate_first(tensor: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[E, 2·I, ..] with the gate's rows before those of up, a copy."""
    if interleaved:
        return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
    return tensor.clone(memory_format=torch.contiguous_format)


def _error(weight: torch.Tensor, made: NVFP4Weight) -> float:
    """‖W' − W‖ / ‖W‖ over all matrices [.., n, k] of ``weight``."""
    matrices = weight.flatten(0, -3)
    parts = zip(
        matrices, made.packed.flatten(0, -3), made.block_scale.flatten(0, -3), made.global_scale.flatten(), strict=True
    )
    wrong, whole = 0.0, 0.0
    for matrix, packed, scale, world in parts:
        norm = float(matrix.double().square().sum())
        wrong += nvfp4_error(matrix, NVFP4Weight(packed, scale, world)) ** 2 * norm
        whole += norm
    return float((wrong / whole) ** 0.5) if whole else 0.0
