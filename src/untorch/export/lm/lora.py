"""A step with low-rank adapters (LoRA) beside the weights: each token takes those of its request.

``loras`` [rows, columns] has all adapters side by side. An adapter has as many columns as its rank, and padding. A
layer has ``inputs`` rows with Aᵀ and then ``outputs`` rows with B, scaled. A token takes the columns from
``lora_ranges[t, 0]`` to ``lora_ranges[t, 1]``; from 0 to 0: none.

    y = layer(x) + mask(x · A_allᵀ) · B_allᵀ

One GEMM computes the low-rank values for all adapters, the mask keeps those of the token's own, and one GEMM leads
back. Ranks and the number of adapters are sizes of an input: nothing about them is in the package.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from untorch.export.lm.attention import Recorder, current_step
from untorch.export.lm.states import StateRecorder, state_operators
from untorch.export.lm.step import Step
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["LoraLayer", "LoraStep", "find_lora_layers", "lora_method", "lora_section"]

_EXAMPLE_COLUMNS = 32
_MOST_COLUMNS = 1 << 20


@dataclass(frozen=True)
class LoraLayer:
    """A linear layer that adapters may change. offset: its first row of ``loras``."""

    name: str
    inputs: int
    outputs: int
    offset: int

    @property
    def rows(self) -> int:
        """Of ``loras``."""
        return self.inputs + self.outputs


def find_lora_layers(step: Step, wanted: Any) -> list[LoraLayer]:
    """The layers that ``wanted`` means: True for all linear layers that every token goes through, or names of modules,
    as PEFT's target_modules: the last parts ("q_proj"), or patterns ("model.layers.*.q_proj").

    Raises ArgumentTypeError; InvalidArgumentError for a name that no such layer has.
    """
    text = f"causal_lm: lora: expected True, or names of linear layers such as ['q_proj', 'v_proj'], got {wanted!r}"
    if wanted is not True and (
        isinstance(wanted, str)
        or not isinstance(wanted, Sequence)
        or not wanted
        or not all(isinstance(name, str) for name in wanted)
    ):
        raise ArgumentTypeError(text)
    found: dict[str, tuple[int, int]] = {}
    seen = _linear_layers(step)
    for name, sizes in seen.items():
        if wanted is True or any(_matches(name, pattern) for pattern in wanted):
            found[name] = sizes
    for pattern in () if wanted is True else wanted:
        if not any(_matches(name, pattern) for name in found):
            last = sorted({name.rpartition(".")[2] for name in seen})
            raise InvalidArgumentError(
                f"causal_lm: lora: no linear layer that all tokens go through is called {pattern!r}; there are "
                f"{', '.join(last)}"
            )
    if not found:
        raise InvalidArgumentError(f"causal_lm: lora: {step.architecture}: no linear layer sees all tokens")
    layers: list[LoraLayer] = []
    offset = 0
    for name, (inputs, outputs) in found.items():
        layers.append(LoraLayer(name, inputs, outputs, offset))
        offset += inputs + outputs
    return layers


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or fnmatch.fnmatchcase(name, pattern)


def _is_linear(module: nn.Module) -> bool:
    # GPT-2's layers are Conv1D of transformers.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _linear_layers(step: Step) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers that see each token once, in the order of their calls."""
    tokens, found, calls = 5, {}, []
    with ExitStack() as stack:
        for name, module in step.model.named_modules():
            if _is_linear(module):

                def note(_: nn.Module, args: Any, out: torch.Tensor, name: str = name) -> None:
                    calls.append((name, tuple(args[0].shape), tuple(out.shape)))

                stack.callback(module.register_forward_hook(note).remove)
        # The attention of a recorder without pages: tokens go through the layers, and no further.
        recorder = Recorder()
        with torch.no_grad(), current_step(recorder), state_operators(step.model, StateRecorder()):
            recorder.begin(None)
            step._logits(torch.arange(1, tokens + 1), torch.arange(tokens), torch.tensor([0, 2]))
    for name, given, out in calls:
        if torch.Size(given[:-1]).numel() == tokens and out[:-1] == given[:-1]:
            found[name] = (given[-1], out[-1])
    repeated = {name for name, *_ in calls if sum(name == other for other, *_ in calls) > 1}
    return {name: sizes for name, sizes in found.items() if name not in repeated}


class LoraStep(Step):
    """forward(…as Step…, loras [rows, columns] in the weights' dtype, lora_ranges [T, 2] int32); the pool before them.

    Of a model with recurrent layers, state_slots and states come last. It has the modules of another step, so that
    packages store their weights once.
    """

    def __init__(self, step: Step, layers: Sequence[LoraLayer]) -> None:
        self.share(step)
        self.lora_layers = tuple(layers)

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        block_table: torch.Tensor | tuple[torch.Tensor, ...],
        cu_seqlens_q: torch.Tensor,
        seqlens_k: torch.Tensor,
        slot_mapping: torch.Tensor | tuple[torch.Tensor, ...],
        pool: torch.Tensor,
        loras: torch.Tensor,
        lora_ranges: torch.Tensor,
        state_slots: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The outputs, float32."""
        with self._adapted(loras, lora_ranges):
            return super().forward(
                tokens, positions, rows, block_table, cu_seqlens_q, seqlens_k, slot_mapping, pool, state_slots, states
            )  # fmt: skip

    @contextmanager
    def _adapted(self, loras: torch.Tensor, ranges: torch.Tensor) -> Iterator[None]:
        """The layers add what their adapters give."""
        columns = torch.arange(loras.shape[1], dtype=torch.int32, device=loras.device)
        own = (columns >= ranges[:, :1]) & (columns < ranges[:, 1:])  # [T, columns]
        # All parts first: equal layers then have them as operands, and are compiled once.
        parts = [
            (loras[layer.offset :][: layer.inputs], loras[layer.offset + layer.inputs :][: layer.outputs])
            for layer in self.lora_layers
        ]
        with ExitStack() as stack:
            for layer, (down, up) in zip(self.lora_layers, parts, strict=True):

                def add(
                    _: nn.Module, args: Any, out: torch.Tensor, down: torch.Tensor = down, up: torch.Tensor = up
                ) -> torch.Tensor:
                    x = args[0].reshape(-1, down.shape[0]).to(down.dtype)
                    low = torch.where(own, x @ down, torch.zeros((), dtype=down.dtype, device=down.device))
                    return out + (low @ up.t()).to(out.dtype).reshape(out.shape)

                stack.callback(self.model.get_submodule(layer.name).register_forward_hook(add).remove)
            yield


def lora_method(step: LoraStep, method: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The method of a step over tokens, with the two inputs more, behind the pool."""
    from torch.export import Dim

    tokens = len(method["args"][0])
    rows = step.lora_layers[-1].offset + step.lora_layers[-1].rows
    generator = torch.Generator().manual_seed(0)
    loras = torch.randn(rows, _EXAMPLE_COLUMNS, generator=generator).to(dtype) / 64
    half = _EXAMPLE_COLUMNS // 2
    ranges = torch.tensor([[0, half], [half, _EXAMPLE_COLUMNS], [0, 0]], dtype=torch.int32)[torch.arange(tokens) % 3]
    columns = Dim("lora_columns", min=1, max=_MOST_COLUMNS)
    args, shapes = method["args"], method["dynamic_shapes"]
    return {
        "model": step, "args": (*args[:8], loras, ranges, *args[8:]),
        "dynamic_shapes": (*shapes[:8], {1: columns}, shapes[0], *shapes[8:]),
    }  # fmt: skip


def lora_section(layers: Sequence[LoraLayer], dtype: torch.dtype, counts: Sequence[int]) -> dict[str, Any]:
    """Of the manifest."""
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "rows": layers[-1].offset + layers[-1].rows,
        "layers": [
            {"name": layer.name, "inputs": layer.inputs, "outputs": layer.outputs, "offset": layer.offset}
            for layer in layers
        ],
        "methods": [{"name": f"step_{count}_lora", "tokens": count} for count in counts],
    }
