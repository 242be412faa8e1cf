"""Operands of ``untorch::decoder_linears``, for tests on any device: random ones, scaled so that values stay near 1."""

from __future__ import annotations

from typing import Any

import torch

from untorch.ops.int4 import dequantize_int4
from untorch.ops.int4_layout import pack_int4

LAYERS = ("o", "gate_up", "down", "next")


def operands(
    tokens: int,
    ko: int,
    width: int,
    inner: int,
    n: int | None,
    dtype: torch.dtype,
    group: int = 0,
    *,
    bias: bool = False,
    seed: int = 0,
    scales_dtype: torch.dtype | None = None,
    inner_k_tiles: int = 8,
    device: str = "cpu",
) -> dict[str, Any]:
    """The operator's arguments by name. n: the outputs of ``next``, None without."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    given: dict[str, Any] = {"x": random(tokens, ko), "residual": random(tokens, width)}
    sizes = {"o": (width, ko), "gate_up": (2 * inner, width), "down": (width, inner), "next": (n, width)}
    for name, (rows, k) in sizes.items():
        given |= {f"{name}_weight": None, f"{name}_scales": None}
        if rows is None:
            continue
        if group == 0:
            given[f"{name}_weight"] = random(rows, k, scale=k**-0.5)
            continue
        codes = torch.randint(0, 16, (rows, k), generator=generator, device=device)
        scale = torch.rand((k // group, rows), generator=generator, device=device).add_(0.5) * k**-0.5 / 4
        zero = torch.randn((k // group, rows), generator=generator, device=device) * k**-0.5 / 4
        given[f"{name}_weight"] = pack_int4(codes, inner_k_tiles)
        given[f"{name}_scales"] = torch.stack((scale, zero), -1).to(scales_dtype or dtype).contiguous()
    given |= {"norm": random(width), "next_norm": random(width)}
    given["next_bias"] = random(n) if n is not None and bias else None
    given |= {"group_size": group, "eps": 1e-6, "next_eps": 1e-5}
    order = [argument.name for argument in torch.ops.untorch.decoder_linears.default._schema.arguments]
    return {name: given[name] for name in order}


def in_float64(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the definition says, layer after layer, without any rounding."""

    def weight(name: str) -> torch.Tensor:
        values, scales = given[f"{name}_weight"], given[f"{name}_scales"]
        if scales is None:
            return values.double()
        return dequantize_int4(values, scales, given["group_size"], torch.float64)

    def normalised(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.double()

    hidden = given["residual"].double() + given["x"].double() @ weight("o").T
    both = normalised(hidden, given["norm"], given["eps"]) @ weight("gate_up").T
    gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    residual_out = hidden + (gate * gate.sigmoid() * up) @ weight("down").T
    out = normalised(residual_out, given["next_norm"], given["next_eps"])
    if given["next_weight"] is not None:
        out = out @ weight("next").T
    return out + (0 if given["next_bias"] is None else given["next_bias"].double()), residual_out
