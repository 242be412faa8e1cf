"""The generic route: any model of transformers, with inputs that the caller describes, as one method of tensors."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.source import Source
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["InputSpec", "generic_method", "read_inputs"]

_FORM = (
    "expected NAME=SIZE,SIZE,…:DTYPE, such as input_ids=batch@2,sequence@16..512:int64 or "
    "pixel_values=1,3,64,64:float32"
)
_INPUT = re.compile(r"([A-Za-z_]\w*)=([^:=]*):(\w+)")
_SIZE = re.compile(r"(?:([A-Za-z_]\w*)@)?(\d+)(?:\.\.(\d+))?")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int8", "uint8", "bool")


@dataclass(frozen=True)
class InputSpec:
    """sizes: of the example. axes: names of the dynamic ones by dimension. longest: their largest sizes, by name."""

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    axes: Mapping[int, str]
    longest: Mapping[str, int]

    def example(self) -> torch.Tensor:
        """Random floats; for masks ones; small integers for others, as they may be tokens or labels."""
        count = math.prod(self.sizes)
        if self.dtype.is_floating_point:
            found = torch.randn(self.sizes, generator=torch.Generator().manual_seed(0))
        elif "mask" in self.name or self.dtype == torch.bool:
            found = torch.ones(self.sizes)
        elif "type_ids" in self.name:
            found = torch.zeros(self.sizes)
        else:
            found = (torch.arange(count) % 7 + 1).reshape(self.sizes)
        return found.to(self.dtype)


def read_inputs(given: Any) -> list[InputSpec]:
    """Of texts as ``--example-input`` has them. Raises InvalidArgumentError, ArgumentTypeError."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Sequence) or not given:
        raise ArgumentTypeError(f"export_folder: inputs: expected texts, {_FORM}, got {given!r:.80}")
    found = [_read_input(text) for text in given]
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidArgumentError(f"export_folder: inputs: {twice} is given twice")
    return found


def _read_input(text: Any) -> InputSpec:
    match = _INPUT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidArgumentError(f"export_folder: inputs: {_FORM}, got {text!r:.80}")
    name, shape, dtype = match.groups()
    if dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"export_folder: inputs: {name}: expected a dtype of {', '.join(_DTYPES)}, got {dtype}"
        )
    sizes, axes, longest = [], {}, {}
    for at, part in enumerate(shape.split(",") if shape else []):
        size = _SIZE.fullmatch(part.strip())
        if (
            size is None
            or int(size[2]) < 1
            or (size[3] is not None and (size[1] is None or int(size[3]) < int(size[2])))
        ):
            raise InvalidArgumentError(
                f"export_folder: inputs: {name}: expected a size such as 3, batch@2 (dynamic, 2 in the example) or "
                f"sequence@16..512 (at most 512), got {part!r:.80}"
            )
        sizes.append(int(size[2]))
        if size[1] is not None:
            axes[at] = size[1]
            if size[3] is not None:
                longest[size[1]] = int(size[3])
    return InputSpec(name, tuple(sizes), getattr(torch, dtype), axes, longest)


class _Outputs(nn.Module):
    """forward(the inputs, by name) → a dictionary of the model's tensors, without the cache and the loss."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)
        self.train(model.training)

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """As the model."""
        found = self.model(**dict(zip(self.names, inputs, strict=True)), return_dict=True)
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def generic_method(source: Source, specs: Sequence[InputSpec]) -> dict[str, Any]:
    """A method as ``export`` takes it, of the config's architecture, or else of ``AutoModel``.

    Raises CompileError if transformers does not know the model, InvalidArgumentError if it takes other inputs.
    """
    from torch.export import Dim

    model = source.any_model
    known = inspect.signature(type(model).forward).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for spec in specs:
        if spec.name not in known and not takes_any:
            raise InvalidArgumentError(
                f"export_folder: inputs: {type(model).__name__} takes {', '.join([*known][1:])}, got {spec.name}"
            )
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    longest: dict[str, int] = {}
    for spec in specs:
        longest |= spec.longest
    names = {name for spec in specs for name in spec.axes.values()}
    axes = {name: Dim(name, min=1, max=longest.get(name)) for name in names}
    # One class a call: torch.export takes the inputs' names from the signature.
    wrapper = _named(_Outputs, [spec.name for spec in specs])(model, [spec.name for spec in specs])
    examples = tuple(spec.example() for spec in specs)
    try:
        with torch.no_grad():
            found = wrapper(*examples)
    except Exception as error:  # whatever the model's code raises
        text = " ".join(str(error).split())
        raise CompileError(
            f"export_folder: {type(model).__name__} fails with the example inputs: {type(error).__name__}: "
            f"{text:.300}: give all inputs that it needs, with their sizes, by inputs= (--example-input)"
        ) from error
    if not found:
        raise CompileError(f"export_folder: {type(model).__name__} gives no tensors: write a script")
    shapes = tuple({at: axes[name] for at, name in spec.axes.items()} for spec in specs)
    return {"model": wrapper, "args": examples, "dynamic_shapes": shapes}


def _named(base: type[nn.Module], names: Sequence[str]) -> type[nn.Module]:
    """A subclass whose ``forward`` has parameters of these names."""

    def forward(self: Any, *inputs: torch.Tensor, **by_name: torch.Tensor) -> Any:
        return base.forward(self, *inputs, *(by_name[name] for name in names[len(inputs) :]))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", kind), *(inspect.Parameter(name, kind) for name in names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return type(base.__name__, (base,), {"forward": forward})
