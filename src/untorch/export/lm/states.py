"""Recurrent layers on a state pool: short convolutions and linear attention as operators over ragged tokens.

transformers' modules call functions such as ``causal_conv1d_fn`` and ``chunk_gated_delta_rule`` on whole sequences.
They are names of the modules' own files, or attributes of the modules; ours take their place by name while a step
runs. Nothing here knows a model. While layers are recorded, each result is compared with the model's own function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.ops.causal_conv1d import OPERATOR as CAUSAL_CONV1D
from untorch.ops.gated_delta_rule import OPERATOR as GATED_DELTA_RULE

__all__ = ["UNIT", "StateLayer", "StateRecorder", "StateTables", "state_operators"]

UNIT = 16  # elements: where the states of layers begin in a row

# Arguments that change nothing here: transformers hands all of a layer's on.
_IGNORED = {
    "position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "cache_position", "num_items_in_batch", "output_router_logits", "logits_to_keep", "chunk_size", "past_key_values",
    "head_mask", "is_causal",
}  # fmt: skip
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class StateLayer:
    """Elements that one call keeps of a sequence, and where they begin in a row of the pool."""

    function: str
    elements: int
    offset: int


@dataclass(frozen=True)
class StateTables:
    """The pool, each sequence's row of it, and the step's tokens by sequence."""

    states: torch.Tensor
    state_slots: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor


class StateRecorder:
    """Layers with states, by the order of their calls.

    tables: of the step; None: the calls are recorded, each as one sequence from its beginning.
    """

    def __init__(self, known: list[StateLayer] | None = None, tables: StateTables | None = None) -> None:
        self.layers = [] if known is None else known
        self.tables, self.calls = tables, 0

    @property
    def elements(self) -> int:
        """Of a row of the pool."""
        last = self.layers[-1:]
        return -(-(last[0].offset + last[0].elements) // UNIT) * UNIT if last else 0

    def layer(self, function: str, elements: int, tokens: int) -> tuple[StateTables, int]:
        """Where the next call finds its states: the tables, and the offset in a row."""
        self.calls += 1
        if self.tables is not None:
            return self.tables, self.layers[self.calls - 1].offset
        self.layers.append(StateLayer(function, elements, self.elements))
        ends = torch.tensor([0, tokens], dtype=torch.int32)
        return StateTables(torch.zeros(1, elements), torch.zeros(1, dtype=torch.int32), ends, ends[1:]), 0


@contextmanager
def state_operators(model: nn.Module, recorder: StateRecorder) -> Iterator[None]:
    """Puts the operators into the place of the model's functions meanwhile."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        files = {
            name: sys.modules.get(name) for kind in type(module).__mro__ if (name := kind.__module__) != "builtins"
        }
        for names in (vars(module), *(vars(file) for file in files.values() if file is not None)):
            places += [(names, name, names[name]) for name in _OPERATORS if name in names]
    kept = {(id(names), name): (names, name, own) for names, name, own in places}
    for names, name, own in kept.values():
        names[name] = _replacement(name, own, recorder)
    try:
        yield
    finally:
        for names, name, own in kept.values():
            names[name] = own


def _replacement(name: str, own: Any, recorder: StateRecorder) -> Callable[..., Any]:
    operator = _OPERATORS[name]

    def replaced(*args: Any, **kwargs: Any) -> Any:
        result = operator(recorder, name, *args, **kwargs)
        # Functions of other packages may need a GPU.
        reference = inspect.unwrap(own) if callable(own) else None
        if recorder.tables is None and getattr(reference, "__module__", "").startswith("transformers."):
            assert reference is not None
            _compare(name, result, reference(*args, **kwargs))
        return result

    return replaced


def _compare(name: str, found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        found, expected = found[0], expected[0]
    if expected is None:  # a function that is for kernels only
        return
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    tolerance = _TOLERANCE.get(found.dtype, 1e-4) * max(largest, 1e-6)
    if not difference <= tolerance:
        raise CompileError(
            f"{name}: the model's own function and untorch's operator differ by {difference:.3g}, expected at most "
            f"{tolerance:.3g}: this version of transformers means something else by it"
        )


def _known(name: str, given: dict[str, Any]) -> None:
    """Raises CompileError for arguments that would change the result."""
    for argument in ("initial_state", "initial_states", "output_final_state", "return_final_states"):
        if (value := given.pop(argument, None)) is not None and value is not False:
            raise CompileError(f"{name}: {argument}: the model keeps a state of its own, which a pool cannot follow")
    if unknown := sorted(key for key, value in given.items() if value is not None and key not in _IGNORED):
        raise CompileError(f"{name}: arguments that are not known: {', '.join(unknown)}")


def _causal_conv1d(
    recorder: StateRecorder,
    name: str,
    x: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    hidden_states: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """x [1, channels, tokens]."""
    _known(name, kwargs)
    x = hidden_states if x is None else x
    assert x is not None
    assert weight is not None
    if activation not in (None, "silu", "swish"):
        raise CompileError(f"{name}: activation: expected silu or none, got {activation!r}")
    tables, offset = recorder.layer(name, weight.shape[0] * (weight.shape[1] - 1), x.shape[2])
    out: torch.Tensor = CAUSAL_CONV1D(
        x[0].transpose(0, 1).to(weight.dtype), weight, bias, tables.states, tables.state_slots, tables.cu_seqlens_q,
        tables.seqlens_k, offset, activation is not None,
    )  # fmt: skip
    return out.to(x.dtype).transpose(0, 1)[None]


def _delta_rule(
    recorder: StateRecorder,
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query and key [1, tokens, heads, width]; g [1, tokens, heads], or with the width, too."""
    _known(name, kwargs)
    width = query.shape[-1]
    tables, offset = recorder.layer(name, value.shape[2] * width * value.shape[3], value.shape[1])
    q, k, v = (x[0].to(query.dtype) for x in (query, key, value))
    out = GATED_DELTA_RULE(
        q, k, v, g[0].float(), beta[0].float(), tables.states, tables.state_slots, tables.cu_seqlens_q,
        tables.seqlens_k, offset, bool(use_qk_l2norm_in_kernel), width**-0.5 if scale is None else float(scale),
    )  # fmt: skip
    return out[None], None


def _state_space(
    recorder: StateRecorder,
    name: str,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - as Mamba's functions have it
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    *,
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> torch.Tensor:
    """Mamba-2: x [1, tokens, heads, width_v], dt [1, tokens, heads], A [heads], B and C [1, tokens, groups, width]."""
    _known(name, kwargs)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = nn.functional.softplus(dt)
    step = dt.clamp(*dt_limit)[0].float()
    values = x[0].float()
    tables, offset = recorder.layer(name, x.shape[2] * B.shape[3] * x.shape[3], x.shape[1])
    out = GATED_DELTA_RULE(
        C[0].float(), B[0].float(), values * step[..., None], step * A.float(), None, tables.states,
        tables.state_slots, tables.cu_seqlens_q, tables.seqlens_k, offset, False, 1.0,
    )  # fmt: skip
    if D is not None:
        out = out + D.float()[:, None] * values
    result: torch.Tensor = out[None]
    return result


_OPERATORS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv1d,
    "chunk_gated_delta_rule": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_chunk_scan_combined": _state_space,
}
