"""``quantize_experts``: the experts of transformers' mixture-of-experts models in NVFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from untorch.quant.modules import replace_modules
from untorch.quant.moe import NVFP4MoE
from untorch.quant.nvfp4 import NVFP4_METHODS, NVFP4Weight, nvfp4_error, quantize_nvfp4
from untorch.runtime.errors import InvalidArgumentError

__all__ = ["ExpertsReport", "NVFP4Experts", "experts_of", "make_experts", "obstacle", "quantize_experts"]


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
    """One module: its name, its bytes before and after, and the relative errors of all experts' weights together."""

    name: str
    nbytes_before: int
    nbytes_after: int
    error_gate_up: float
    error_down: float


def quantize_experts(module: nn.Module, *, method: str = "search") -> list[ExpertsReport]:
    """Replaces the experts of ``module`` by ``NVFP4Experts``, in place, and reports each.

    Taken are modules with parameters gate_up_proj [E, 2·I, K] and down_proj [E, K, I] and SiLU as their act_fn, as
    transformers has them for Qwen3-MoE, Mixtral and others. The gate's and up's rows have a global scale each.
    ``method`` is "search" or "rtn", as for linear layers.

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
    fits = gate_up.dim() == 3 and down.dim() == 3 and gate_up.shape[1] % 2 == 0
    if not fits or down.shape != (gate_up.shape[0], gate_up.shape[2], gate_up.shape[1] // 2):
        return (
            f"expected gate_up_proj [E, 2·I, K] and down_proj [E, K, I], got {list(gate_up.shape)} and "
            f"{list(down.shape)}"
        )
    if gate_up.shape[1] // 2 % 16 or gate_up.shape[2] % 16:
        return f"expected K and I to be multiples of 16, got K = {gate_up.shape[2]} and I = {gate_up.shape[1] // 2}"
    others = [other for other, _ in experts.named_parameters() if other not in ("gate_up_proj", "down_proj")]
    activation = getattr(experts, "act_fn", None)
    if others or type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        return (
            f"expected experts of two products without biases and with SiLU between, got {type(experts).__name__} with "
            f"act_fn {type(activation).__name__}{' and ' + ', '.join(others) if others else ''}"
        )
    return ""


def make_experts(
    name: str, experts: nn.Module, search: bool, device: torch.device | None = None
) -> tuple[NVFP4Experts, ExpertsReport]:
    """What takes their place, where there is no obstacle, and the report. ``device`` computes, if given."""
    weights = [getattr(experts, part).detach() for part in ("gate_up_proj", "down_proj")]
    home = weights[0].device
    gate_up, down = (weight.to(device or home) for weight in weights)
    e, rows, k = gate_up.shape
    halves = quantize_nvfp4(gate_up.reshape(e, 2, rows // 2, k), search=search)
    lower = quantize_nvfp4(down, search=search)
    moe = NVFP4MoE(
        halves.packed.reshape(e, rows, k // 2), halves.block_scale.reshape(e, rows, k // 16), lower.packed,
        lower.block_scale, halves.global_scale, lower.global_scale,
    )  # fmt: skip
    report = ExpertsReport(
        name, sum(p.numel() * p.element_size() for p in (gate_up, down)), moe.weight_nbytes,
        _error(gate_up.reshape(2 * e, rows // 2, k), halves), _error(down, lower),
    )  # fmt: skip
    return NVFP4Experts(moe).to(home), report


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
