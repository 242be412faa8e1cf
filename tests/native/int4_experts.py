"""int4 MoE for the tests: random experts in both layouts, a float64 reference, and what ``int4_moe`` refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.native.nvfp4_experts import SILU, SwiGLU, moe_in_float64
from tests.native.shim import Opt
from tests.native.test_w4a8 import AMX_ROWS, in_bfloat16, multiplied
from untorch.ops.int4_layout import pack_int4
from untorch.ops.w4a8_layout import pack_w4a8

BF16, F16, F32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
NAMES = ("hidden_states", "topk_weights", "topk_ids", "w13", "w13_scale_and_zero", "w2", "w2_scale_and_zero")

Args = tuple[Any, ...]


class Experts:
    """Random experts of about unit size: packed in the layout for integers or not, and in float64."""

    def __init__(
        self,
        e: int,
        k: int,
        width: int,
        group: int,
        integers: bool = False,
        scales: torch.dtype = F32,
        seed: int = 0,
        device: str = "cpu",
        symmetric: bool = False,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.experts, self.group, self.width, self.integers = e, group, width, integers
        self.packed: list[torch.Tensor] = []
        self._plain: list[tuple[torch.Tensor, torch.Tensor, int, int]] = []
        for n, inputs in ((2 * width, k), (k, width)):
            unit = group if integers else math.lcm(group, 128)
            padded = -(-inputs // unit) * unit
            values = torch.randint(0, 16, (e * n, padded), generator=generator, dtype=torch.uint8, device=device)
            scale = torch.rand((padded // group, e * n), generator=generator, device=device) * 0.02 + 0.01
            zero = torch.randn((padded // group, e * n), generator=generator, device=device) * 0.03
            both = torch.stack([scale, zero * 0 if symmetric else zero], -1).to(scales)
            self.packed += pack_w4a8(values, both) if integers else (pack_int4(values), both)
            self._plain.append((values, both, n, inputs))

    def matrices(
        self, expert: int, rounded: torch.dtype = F32, by_amx: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up [2·I, K], and down [K, I], in float64. rounded: scales and weights are, as on a GPU, to bfloat16
        or float16. by_amx: weights are, to bfloat16.
        """
        made = []
        for values, both, n, inputs in self._plain:
            rows = slice(expert * n, (expert + 1) * n)
            own = both[:, rows]
            if by_amx:
                made.append(in_bfloat16(values[rows], own.transpose(0, 1))[:, :inputs])
                continue
            scale, zero = (own if rounded == F32 else own.to(rounded)).double().permute(2, 1, 0)
            groups = values[rows].double().unflatten(1, (-1, self.group)) - 8
            matrix = (groups * scale[..., None] + zero[..., None]).flatten(1)[:, :inputs]
            made.append(matrix if rounded == F32 else matrix.float().to(rounded).double())
        return made[0], made[1]

    def arguments(self, swiglu: SwiGLU = SILU) -> Args:
        """For ``call``, after the routing."""
        return *self.packed, self.group, self.width, *swiglu.arguments()

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """What the GEMMs multiply with on the CPU, in float64."""
        if not self.integers:
            return x.double()
        return multiplied(x, -(-x.shape[-1] // 32) * 32)[:, : x.shape[-1]]

    def on_gpu_in_float64(
        self, x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor, swiglu: SwiGLU = SILU
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``moe_in_float64``, with weights as kernels for GPUs round them."""
        return moe_in_float64(x, factors, ids, lambda e: self.matrices(e, x.dtype), self.experts, swiglu)

    def in_float64(
        self, x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor, swiglu: SwiGLU
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result on the CPU, and how large its sums could be."""
        y, size = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
        for expert in ids.unique().tolist():
            if expert < 0:
                continue
            tokens, places = torch.where(ids == expert)
            first, second = self.matrices(expert, by_amx=self.integers and len(tokens) >= AMX_ROWS)
            none = torch.zeros((), dtype=torch.float64)
            b13, b2 = (none if b is None else b[expert].double() for b in (swiglu.w13_bias, swiglu.w2_bias))
            weights = factors[tokens, places].double()[:, None]
            rows = self.rounded(x[tokens])
            gate, up = (rows @ first.t() + b13).chunk(2, -1)
            most_gate, most_up = (rows.abs() @ (first.abs() + 0.1).t() + b13.abs()).chunk(2, -1)
            act = swiglu.of(gate, up)
            most = most_gate * (most_up + abs(swiglu.beta))
            y.index_add_(0, tokens, weights * (self.rounded(act) @ second.t() + b2))
            size.index_add_(0, tokens, weights.abs() * (most @ (second.abs() + 0.1).t() + b2.abs()))
            if self.integers:  # a value between two steps may be rounded to either
                step = (act.abs().amax(-1, keepdim=True) / 127) * second.abs().amax()
                size.index_add_(0, tokens, (weights.abs() * step * 2.0**19).expand(-1, x.shape[1]))
        return y, size


def moe_refusals(make: Callable[..., torch.Tensor], on_gpu: bool, integers: bool = False) -> list[tuple[Args, str]]:
    """Arguments that ``int4_moe`` refuses, and its words. make(*shape, dtype=…) gives a tensor on the device; integers:
    in the layout for those.
    """
    cases: list[tuple[dict[str, Any], str]] = [({name: None}, f"argument '{name}' is null") for name in NAMES]
    cases += [
        ({"hidden_states": make(3, 32, dtype=torch.float64)},
         "argument 'hidden_states' must be float32, bfloat16 or float16, got float64"),
        ({"hidden_states": make(3, 2, 32)}, "argument 'hidden_states' must be 2-D, got shape [3, 2, 32]"),
        ({"hidden_states": make(3, 33)},
         "argument 'hidden_states' must have a multiple of 16 in its last dimension, got shape [3, 33]"),
        ({"topk_weights": make(6)}, "argument 'topk_weights' must be 2-D, got shape [6]"),
        ({"topk_weights": make(2, 2)},
         "argument 'topk_weights' must have shape [3, 2], got [2, 2]"),
        ({"topk_ids": make(3, 2, dtype=torch.int64)},
         "argument 'topk_ids' must be int32, got int64"),
        ({"group": 16}, "argument 'group_size' must be 32, 64, 128 or 256, got 16"),
        ({"width": 12}, "argument 'intermediate' must be a multiple of 8 above 0, got 12"),
        ({"w13_scale_and_zero": make(1, 128, 2, dtype=torch.float64)},
         "argument 'w13_scale_and_zero' must be float32, bfloat16 or float16, got float64"),
        ({"w13_bias": make(4, 31)},
         "argument 'w13_bias' must have shape [4, 32], got [4, 31]"),
        ({"w2_bias": make(4, 32, dtype=F16)},
         "argument 'w2_bias' must be float32, got float16"),
        ({"alpha": math.nan}, "argument 'swiglu_alpha' must be a finite number of float32, got nan"),
        ({"beta": 1e39}, "argument 'swiglu_beta' must be a finite number of float32, got 1e+39"),
        ({"limit": 0.0}, "argument 'swiglu_limit' must be above 0, or null for no limit, got 0"),
    ]  # fmt: skip
    layout = "[n/8][k/(16*inner_k_tiles)][32][inner_k_tiles/2]"
    if on_gpu:
        layout = "[n/8][k/128][32][4] on a GPU (inner_k_tiles 8)"
    of_floats: list[tuple[dict[str, Any], str]] = [
        ({"w13": make(17, 1, 32, 4, dtype=I32)},
         "argument 'w13' must have a multiple of 32 outputs, two times 'intermediate', got shape [17, 1, 32, 4]"),
        ({"w13": make(16, 1, 32, 3, dtype=I32)}, f"argument 'w13' must be packed as {layout}, got shape [16, 1, 32, 3]"),
        ({"w13": make(16, 0, 32, 4, dtype=I32)},
         "argument 'w13' must have k of at least 32 and a multiple of the group size 32, got shape [16, 0, 32, 4]"),
        ({"w13": make(16, 1, 32, 4)},
         "argument 'w13' must be int32, got float32"),
        ({"w2": make(12, 1, 32, 4, dtype=I32)},
         "argument 'w2' must have shape [16, 1, 32, 4], got [12, 1, 32, 4]"),
        ({"w2_scale_and_zero": make(4, 128, 1)},
         "argument 'w2_scale_and_zero' must have shape [4, 128, 2], got [4, 128, 1]"),
    ]  # fmt: skip
    of_integers: list[tuple[dict[str, Any], str]] = [
        ({"w13": make(9, 4, 16, dtype=I32)},
         "argument 'w13' must have a multiple of 32 outputs, two times 'intermediate', got shape [9, 4, 16]"),
        ({"w13": make(8, 5, 16, dtype=I32)},
         "argument 'w13' must have shape [8, 4, 16], got [8, 5, 16]"),
        ({"w2": make(8, 4, 16, 1, dtype=I32)},
         "argument 'w2' must have shape [8, 4, 16], got [8, 4, 16, 1]"),
        ({"w2_scale_and_zero": make(8, 1, 16, 2)},
         "argument 'w2_scale_and_zero' must have shape [8, 1, 2, 16], got [8, 1, 16, 2]"),
    ]  # fmt: skip
    only_on_gpu: list[tuple[dict[str, Any], str]] = [
        (
            {"w13": make(16, 2, 32, 2, dtype=I32)},
            f"argument 'w13' must be packed as {layout}, got shape [16, 2, 32, 2]",
        ),
        ({"w2": make(16, 2, 32, 2, dtype=I32)}, f"argument 'w2' must be packed as {layout}, got shape [16, 2, 32, 2]"),
        ({"w13": make(16, 4, 16, dtype=I32)}, f"argument 'w13' must be packed as {layout}, got shape [16, 4, 16]"),
    ]
    packed = [tensor.shape for tensor in Experts(4, 32, 16, 32, integers).packed]
    weights = [make(*shape, dtype=F32 if i % 2 else I32) for i, shape in enumerate(packed)]
    good = [make(3, 32), make(3, 2), make(3, 2, dtype=I32), *weights]
    refused = []
    for changed, text in [*cases, *(of_integers if integers else of_floats), *(only_on_gpu if on_gpu else [])]:
        tensors = [changed.get(name, tensor) for name, tensor in zip(NAMES, good, strict=True)]
        swiglu = (
            Opt(changed.get("w13_bias")), Opt(changed.get("w2_bias")), changed.get("alpha", 1.0),
            changed.get("beta", 0.0), Opt(changed.get("limit"), "double"),
        )  # fmt: skip
        args = (*tensors, changed.get("group", 32), changed.get("width", 16), *swiglu)
        refused.append((args, f"int4_moe: {text}"))
    return refused
