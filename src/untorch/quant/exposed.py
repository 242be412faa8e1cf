"""Linear layers that modules hold in another form, exposed as nn.Linear, so that they can be selected and replaced.

- nn.MultiheadAttention multiplies by parameters of its own, and reads the weight of ``out_proj``:
  ``ProjectedAttention`` takes its place.
- nn.TransformerEncoderLayer passes its weights to one operator for the whole layer, in eager inference: switched off.
- transformers' Conv1D (GPT-2) is a linear layer with a transposed weight: an nn.Linear takes its place.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from untorch.quant.attention import ProjectedAttention, linear_of
from untorch.quant.modules import replace_modules

__all__ = ["expose_linears", "has_hidden_linears", "reads_weights", "restore_plain"]

# Attributes of what was changed: the module that was there before; the name and the value of a flag before.
_ORIGINAL, _SWITCHED = "_untorch_original", "_untorch_switched"


class _Kept:
    """A module that is no submodule, and that copies share."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: Any) -> _Kept:
        return self


def has_hidden_linears(module: nn.Module) -> bool:
    """Whether ``expose_linears`` would change something."""
    return any(_can_switch(part) or _made_of(part) is not None for part in module.modules())


def expose_linears(module: nn.Module, *, in_place: bool = False) -> nn.Module:
    """Exposes the linear layers everywhere below ``module``, which it changes; parameters stay where they lie.

    Returns the module, or what replaces it; with ``in_place`` it is not replaced itself. ``restore_plain`` undoes what
    was of no use.
    """
    made: dict[int, nn.Module] = {}
    for part in list(module.modules()):
        if not (in_place and part is module) and (replacement := _made_of(part)) is not None:
            setattr(replacement, _ORIGINAL, _Kept(part))
            made[id(part)] = replacement
    root = made.get(id(module), module)
    replace_modules(root, made)
    for part in root.modules():
        if isinstance(part, nn.TransformerEncoder) and hasattr(part, "use_nested_tensor"):
            _switch(part, "use_nested_tensor", False)
        elif _can_switch(part):
            _switch(part, "activation_relu_or_gelu", 0)
    return root


def restore_plain(root: nn.Module) -> nn.Module:
    """Puts back what has no quantised layer in it, so that it is computed as ever. Returns the module, or what it was
    before it was exposed.
    """
    originals = {
        id(part): getattr(part, _ORIGINAL).module
        for part in root.modules()
        if hasattr(part, _ORIGINAL) and _is_plain(part)
    }
    replace_modules(root, originals)
    for part in root.modules():
        if hasattr(part, _SWITCHED) and _is_plain(part):
            setattr(part, *getattr(part, _SWITCHED))
            delattr(part, _SWITCHED)
    found: nn.Module = originals.get(id(root), root)
    return found


def reads_weights(module: nn.Module) -> bool:
    """Whether it is an encoder layer that may pass its weights to one operator."""
    return isinstance(module, nn.TransformerEncoderLayer) and bool(module.activation_relu_or_gelu)


def _can_switch(module: nn.Module) -> bool:
    return reads_weights(module) and type(module).forward is nn.TransformerEncoderLayer.forward


def _switch(part: nn.Module, name: str, value: Any) -> None:
    if not hasattr(part, _SWITCHED):
        setattr(part, _SWITCHED, (name, getattr(part, name)))
    setattr(part, name, value)


def _made_of(part: nn.Module) -> nn.Module | None:
    """What takes its place; None for what stays."""
    if part._forward_hooks or part._forward_pre_hooks:
        return None
    if type(part) is nn.MultiheadAttention:
        out = part.out_proj
        if out._forward_hooks or out._forward_pre_hooks or not _has_own(part) or not _has_own(out):
            return None
        return ProjectedAttention.of(part)
    if _is_transposed_linear(part) and _has_own(part):
        weight, bias = part._parameters["weight"], part._parameters["bias"]
        assert weight is not None
        return linear_of(weight.detach().t(), None if bias is None else bias.detach(), part.training)
    return None


def _is_transposed_linear(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _has_own(part: nn.Module) -> bool:
    """Whether its weights are its parameters, and not computed (``weight_norm``)."""
    return "weight" in part._parameters or "in_proj_weight" in part._parameters


def _is_plain(module: nn.Module) -> bool:
    return not any({"packed_weight", "weight_values"} & part._buffers.keys() for part in module.modules())
