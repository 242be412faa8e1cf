"""NVFP4 MoE for the tests: expert weights, routing, a float64 reference, and what ``nvfp4_moe`` refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.native.nvfp4_weights import BF16, E4M3, F16, F32, I32, random_weight
from tests.native.shim import Opt
from tests.native.test_w4a8 import multiplied
from untorch.ops.nvfp4_layout import dequantize_nvfp4

NAMES = ("hidden_states", "topk_weights", "topk_ids", "w13", "w13_scale", "w2", "w2_scale", "w13_global", "w2_global")
ROUNDING = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}

Args = tuple[Any, ...]


@dataclass(frozen=True)
class SwiGLU:
    """The arguments of ``nvfp4_moe`` that follow the weights. As they are: SiLU without biases."""

    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def arguments(self) -> Args:
        """For ``call``."""
        return Opt(self.w13_bias), Opt(self.w2_bias), self.alpha, self.beta, Opt(self.limit, "double")

    def cuda(self) -> SwiGLU:
        """The same with its biases on the GPU."""
        upper, lower = (None if bias is None else bias.cuda() for bias in (self.w13_bias, self.w2_bias))
        return SwiGLU(upper, lower, self.alpha, self.beta, self.limit)

    def of(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """act."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.beta) * gate * torch.sigmoid(self.alpha * gate)


SILU = SwiGLU()


def random_swiglu(
    e: int, k: int, width: int, *, seed: int = 0, alpha: float = 1.702, beta: float = 1.0, limit: float | None = 7.0
) -> SwiGLU:
    """Biases of about 1, and gpt-oss's numbers."""
    generator = torch.Generator().manual_seed(seed + 1000)
    upper, lower = (torch.randn(shape, generator=generator) for shape in ((e, 2 * width), (e, k)))
    return SwiGLU(upper, lower, alpha, beta, limit)


def random_experts(e: int, k: int, width: int, two: bool, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """w13, w13_scale, w2, w2_scale, w13_global, w2_global of e experts."""
    generator = torch.Generator().manual_seed(seed)
    globals_ = [torch.rand(shape, generator=generator) * 0.1 + 0.01 for shape in ((e, 2) if two else (e,), (e,))]
    return (*random_weight(e, 2 * width, k, seed=seed), *random_weight(e, k, width, seed=seed), *globals_)


def by_integers_in_float64(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *weights: torch.Tensor, swiglu: SwiGLU = SILU
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result with the inputs of both GEMMs as CPUs round them, from weights that are not packed; and a bound of its
    sums, with what a value between two steps may add, which may be rounded to either.
    """
    w13, w13_scale, w2, w2_scale, w13_global, w2_global = weights
    width = w13.shape[1] // 2
    y, size = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
    none = torch.zeros((), dtype=torch.float64)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return multiplied(rows, -(-rows.shape[-1] // 32) * 32)[:, : rows.shape[-1]]

    for expert in topk_ids.unique().tolist():
        if expert < 0:
            continue
        tokens, places = torch.where(topk_ids == expert)
        factors = topk_weights[tokens, places].double()[:, None]
        world = w13_global[expert].reshape(-1).expand(2).repeat_interleave(width)
        first = dequantize_nvfp4(w13[expert], w13_scale[expert], world, torch.float64)
        second = dequantize_nvfp4(w2[expert], w2_scale[expert], w2_global[expert], torch.float64)
        b13, b2 = (none if bias is None else bias[expert].double() for bias in (swiglu.w13_bias, swiglu.w2_bias))
        rows = rounded(x[tokens])
        gate, up = (rows @ first.t() + b13).chunk(2, -1)
        most_gate, most_up = (rows.abs() @ first.abs().t() + b13.abs()).chunk(2, -1)
        act = swiglu.of(gate, up)
        y.index_add_(0, tokens, factors * (rounded(act) @ second.t() + b2))
        most = most_gate * (most_up + abs(swiglu.beta))
        bound = most @ second.abs().t() + b2.abs()
        bound = bound + act.abs().amax(-1, keepdim=True) / 127 * second.abs().amax() * 2.0**19
        size.index_add_(0, tokens, factors.abs() * bound)
    return y, size


def random_routing(m: int, top_k: int, e: int, low: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights, and topk_ids from ``low`` to e - 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, max(e, low + 1), (m, top_k), generator=generator, dtype=torch.int32)
    return torch.rand((m, top_k), generator=generator), ids


def in_float64(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *weights: torch.Tensor,
    swiglu: SwiGLU = SILU,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``moe_in_float64`` with NVFP4 weights."""
    w13, w13_scale, w2, w2_scale, w13_global, w2_global = weights
    width = w13.shape[1] // 2

    def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        world = w13_global[expert].reshape(-1).expand(2).repeat_interleave(width)
        first = dequantize_nvfp4(w13[expert], w13_scale[expert], world, torch.float64)
        return first, dequantize_nvfp4(w2[expert], w2_scale[expert], w2_global[expert], torch.float64)

    return moe_in_float64(x, topk_weights, topk_ids, matrices, w13.shape[0], swiglu)


def moe_in_float64(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    matrices: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    experts: int,
    swiglu: SwiGLU,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, expert by expert; bounds of its sums; and of the errors in the result that a relative error of
    the activation between the two GEMMs causes, and an absolute one of the least number of x's dtype. ``matrices``
    gives an expert's weights in float64.
    """
    y, size, relative, least = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for _ in range(4))
    smallest = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < experts:
            continue
        tokens, places = torch.where(topk_ids == expert)
        factors = topk_weights[tokens, places].double()[:, None]
        first, second = matrices(expert)
        rows = x[tokens].double()
        none = torch.zeros((), dtype=torch.float64, device=x.device)
        b13, b2 = (none if bias is None else bias[expert].double() for bias in (swiglu.w13_bias, swiglu.w2_bias))
        gate, up = (rows @ first.t() + b13).chunk(2, -1)
        most_gate, most_up = (rows.abs() @ first.abs().t() + b13.abs()).chunk(2, -1)
        act = swiglu.of(gate, up)
        most = most_gate * (most_up + abs(swiglu.beta))
        y.index_add_(0, tokens, factors * (act @ second.t() + b2))
        size.index_add_(0, tokens, factors.abs() * (most @ second.abs().t() + b2.abs()))
        relative.index_add_(0, tokens, factors.abs() * (act.abs() @ second.abs().t()))
        least.index_add_(0, tokens, factors.abs() * second.abs().sum(-1) * smallest)
    return y, size, relative, least


def moe_refusals(make: Callable[..., torch.Tensor], on_gpu: bool = True) -> list[tuple[Args, str]]:
    """Arguments that ``nvfp4_moe`` refuses, and its words. make(*shape, dtype=…) gives a tensor on the device."""
    u8 = torch.uint8

    def given(changed: dict[str, torch.Tensor | None], swiglu: SwiGLU) -> Args:
        good = (
            make(3, 32), make(3, 2), make(3, 2, dtype=torch.int32), make(4, 64, 16, dtype=u8),
            make(4, 64, 2, dtype=E4M3), make(4, 32, 16, dtype=u8), make(4, 32, 2, dtype=E4M3), make(4), make(4),
        )  # fmt: skip
        return tuple(changed.get(name, tensor) for name, tensor in zip(NAMES, good, strict=True)) + swiglu.arguments()

    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({name: None}, f"argument '{name}' is null") for name in NAMES
    ]
    cases += [
        ({"hidden_states": make(3, 32, dtype=torch.float64)},
         "argument 'hidden_states' must be float32, bfloat16 or float16, got float64"),
        ({"hidden_states": make(3, 2, 32)}, "argument 'hidden_states' must be 2-D, got shape [3, 2, 32]"),
        ({"hidden_states": make(3, 48)}, "argument 'w13' must have shape [4, 64, 24], got [4, 64, 16]"),
        ({"hidden_states": make(3, 33)},
         "argument 'hidden_states' must have a multiple of 16 in its last dimension, got shape [3, 33]"),
        ({"hidden_states": make(32, 3).t()},
         "argument 'hidden_states' must have a contiguous last dimension, got shape [3, 32] with strides [1, 3]"),
        ({"topk_weights": make(3, 2, dtype=torch.float64)}, "argument 'topk_weights' must be float32, got float64"),
        ({"topk_weights": make(2, 2)}, "argument 'topk_weights' must have shape [3, 2], got [2, 2]"),
        ({"topk_weights": make(6)}, "argument 'topk_weights' must be 2-D, got shape [6]"),
        ({"topk_ids": make(3, 2, dtype=torch.int64)}, "argument 'topk_ids' must be int32, got int64"),
        ({"topk_ids": make(3, 1, dtype=torch.int32)}, "argument 'topk_ids' must have shape [3, 2], got [3, 1]"),
        ({"topk_ids": make(2, 3, dtype=torch.int32).t()},
         "argument 'topk_ids' must be contiguous, got shape [3, 2] with strides [1, 3]"),
        ({"w13": make(4, 48, 16, dtype=u8)},
         "argument 'w13' must have two times a multiple of 16 rows, got shape [4, 48, 16]"),
        ({"w13": make(64, 16, dtype=u8)}, "argument 'w13' must be 3-D, got shape [64, 16]"),
        ({"w13": make(4, 64, 16)}, "argument 'w13' must be uint8, got float32"),
        ({"w2": make(4, 32, 15, dtype=u8)}, "argument 'w2' must have shape [4, 32, 16], got [4, 32, 15]"),
        ({"w2_scale": make(4, 32, 2)}, "argument 'w2_scale' must be float8_e4m3fn, got float32"),
        ({"w13_scale": make(4, 2, 64, dtype=E4M3).mT},
         "argument 'w13_scale' must be contiguous, got shape [4, 64, 2] with strides [128, 1, 64]"),
        ({"w13_global": make(4, 3)}, "argument 'w13_global' must have shape [4, 2], got [4, 3]"),
        ({"w2_global": make()}, "argument 'w2_global' must have shape [4], got []"),
    ]  # fmt: skip
    numbers: list[tuple[SwiGLU, str]] = [
        (SwiGLU(w13_bias=make(4, 64, dtype=BF16)), "argument 'w13_bias' must be float32, got bfloat16"),
        (SwiGLU(w13_bias=make(4, 32)), "argument 'w13_bias' must have shape [4, 64], got [4, 32]"),
        (SwiGLU(w13_bias=make(64, 4).t()),
         "argument 'w13_bias' must be contiguous, got shape [4, 64] with strides [1, 4]"),
        (SwiGLU(w2_bias=make(4, 32, dtype=torch.float64)), "argument 'w2_bias' must be float32, got float64"),
        (SwiGLU(w2_bias=make(32)), "argument 'w2_bias' must have shape [4, 32], got [32]"),
        (SwiGLU(alpha=math.nan), "argument 'swiglu_alpha' must be a finite number of float32, got nan"),
        (SwiGLU(alpha=-math.inf), "argument 'swiglu_alpha' must be a finite number of float32, got -inf"),
        (SwiGLU(beta=1e39), "argument 'swiglu_beta' must be a finite number of float32, got 1e+39"),
        (SwiGLU(limit=0.0), "argument 'swiglu_limit' must be above 0, or null for no limit, got 0"),
        (SwiGLU(limit=-7.0), "argument 'swiglu_limit' must be above 0, or null for no limit, got -7"),
        (SwiGLU(limit=math.nan), "argument 'swiglu_limit' must be above 0, or null for no limit, got nan"),
    ]  # fmt: skip
    if not on_gpu:
        words = {
            "w13": make(16, 4, 16, dtype=I32), "w13_scale": make(16, 2, 16, dtype=E4M3),
            "w2": make(8, 4, 16, dtype=I32), "w2_scale": make(8, 2, 16, dtype=E4M3),
        }  # fmt: skip
        of_integers: list[tuple[dict[str, torch.Tensor | None], str]] = [
            ({"w13_global": make()}, "argument 'w13_global' must have shape [experts] or [experts, 2], got []"),
            ({"w13": make(6, 4, 16, dtype=I32)},
             "argument 'w13' must have two times a multiple of 16 rows for each expert, got shape [6, 4, 16]"),
            ({"w13": make(16, 8, 16, dtype=I32)}, "argument 'w13' must have shape [16, 4, 16], got [16, 8, 16]"),
            ({"w13_scale": make(16, 2, 16, dtype=torch.uint8)},
             "argument 'w13_scale' must be float8_e4m3fn, got uint8"),
            ({"w2": make(4, 32, 16, dtype=torch.uint8)}, "argument 'w2' must be int32, got uint8"),
            ({"w2_scale": make(8, 1, 16, dtype=E4M3)}, "argument 'w2_scale' must have shape [8, 2, 16], got [8, 1, 16]"),
        ]  # fmt: skip
        cases += [(words | changed, text) for changed, text in of_integers]
    else:
        cases += [({"w13": make(16, 4, 16, dtype=I32)},
                   "argument 'w13' must have two times a multiple of 16 rows, got shape [16, 4, 16]")]  # fmt: skip
    refused = [(given(changed, SILU), text) for changed, text in cases]
    refused += [(given({}, swiglu), text) for swiglu, text in numbers]
    return [(args, f"nvfp4_moe: {text}") for args, text in refused]
