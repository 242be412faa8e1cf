"""How an embedding model pools: arguments, or the modules of a sentence-transformers folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.llm.settings import POOLINGS
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError

__all__ = ["PoolingPlan", "dense_method", "read_pooling"]

# Of 1_Pooling/config.json, without "pooling_mode_"; and what newer files have as "pooling_mode".
_MODES = {
    "cls_token": "cls", "cls": "cls", "lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "max_tokens": "max",
    "max": "max", "weightedmean_tokens": "weighted_mean", "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len", "mean_sqrt_len": "mean_sqrt_len",
}  # fmt: skip


@dataclass(frozen=True)
class PoolingPlan:
    """dense: what pooled vectors go through. prompts: texts that are put before the input, by name."""

    pooling: str = "last"
    normalize: bool = True
    dense: nn.Module | None = None
    max_positions: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_pooling(
    task: str, folder: Path | None, pooling: str | None, normalize: bool | None, dtype: torch.dtype
) -> PoolingPlan:
    """The folder's, if it is one of sentence-transformers, with the arguments in the place of its own values.

    Raises InvalidArgumentError; CompileError for modules that are not known; InvalidFileError.
    """
    if pooling is not None and pooling not in POOLINGS:
        raise InvalidArgumentError(f"causal_lm: pooling: expected {_listed(POOLINGS)}, got {pooling!r}")
    if normalize is not None and not isinstance(normalize, bool):
        raise ArgumentTypeError(f"causal_lm: normalize: expected True or False, got {normalize!r}")
    if task != "embed":
        for name, value in (("pooling", pooling), ("normalize", normalize)):
            if value is not None and (name, task, value) != ("pooling", "classify", "last"):
                what = "has scores of the last token" if task == "classify" else "pools nothing"
                raise InvalidArgumentError(f'causal_lm: {name}: is for task="embed": task={task!r} {what}')
        return PoolingPlan("last", False)
    is_folder = folder is not None and (folder / "modules.json").is_file()
    plan = _read_folder(folder, dtype) if is_folder and folder is not None else PoolingPlan()
    if pooling is not None:
        plan = replace(plan, pooling=pooling)
    return plan if normalize is None else replace(plan, normalize=normalize)


def dense_method(dense: nn.Module, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """A package's method: pooled vectors [n, width], float32, through the layers."""
    from torch.export import Dim

    return {
        "model": _Dense(dense, dtype), "args": (torch.zeros(3, width),),
        "dynamic_shapes": ({0: Dim("n", min=1, max=1 << 20)},),
    }  # fmt: skip


class _Dense(nn.Module):
    def __init__(self, dense: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.dense, self.dtype = dense.eval(), dtype

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(pooled.to(self.dtype))
        return found.float()


def _read_folder(folder: Path, dtype: torch.dtype) -> PoolingPlan:
    pooling, normalize, layers = "", False, []
    for entry in _json(folder / "modules.json", list):
        kind, part = str(entry.get("type", "")).rpartition(".")[2], folder / str(entry.get("path", ""))
        if kind == "Pooling" and not pooling:
            pooling = _mode(part / "config.json")
        elif kind == "Dense" and pooling and not normalize:
            layers.append(_dense(part, dtype))
        elif kind == "Normalize" and pooling:
            normalize = True
        elif kind != "Transformer" or pooling:
            raise CompileError(
                f"causal_lm: model: {folder}: its module {kind or entry!r} is not served in this place: expected "
                "Transformer, Pooling, Dense and Normalize, in this order"
            )
    if not pooling:
        raise CompileError(f"causal_lm: model: {folder}: expected a module Pooling in modules.json, got none")
    bert = _json(folder / "sentence_bert_config.json", dict, optional=True)
    if bert.get("do_lower_case"):
        raise CompileError(f"causal_lm: model: {folder}: do_lower_case in sentence_bert_config.json is not served")
    longest = bert.get("max_seq_length")
    more = _json(folder / "config_sentence_transformers.json", dict, optional=True)
    prompts = {str(name): str(text) for name, text in (more.get("prompts") or {}).items()}
    default = more.get("default_prompt_name")
    return PoolingPlan(
        pooling, normalize, nn.Sequential(*layers).eval() if layers else None,
        longest if isinstance(longest, int) else None, prompts, default if default in prompts else None,
    )  # fmt: skip


def _mode(path: Path) -> str:
    config = _json(path, dict)
    given = config.get("pooling_mode")
    if given is None:
        given = [name.removeprefix("pooling_mode_") for name, on in config.items() if "pooling_mode_" in name and on]
    modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CompileError(f"causal_lm: model: {path}: expected one pooling mode of {_listed(_MODES)}, got {modes}")
    if config.get("include_prompt") is False:
        raise CompileError(f"causal_lm: model: {path}: include_prompt=false is not served: prompts are pooled, too")
    return _MODES[modes[0]]


def _dense(folder: Path, dtype: torch.dtype) -> nn.Module:
    """A linear layer and its activation."""
    config = _json(folder / "config.json", dict)
    layer = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    path = folder / "model.safetensors"
    if path.is_file():
        from safetensors.torch import load_file

        weights = load_file(path)
    else:
        weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    layer.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    module, _, name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")
    known = {*torch.nn.modules.activation.__all__, "Identity"} - {"MultiheadAttention"}
    if not module.startswith("torch.nn") or name not in known:
        raise CompileError(f"causal_lm: model: {folder}: its activation {module}.{name} is not one of torch.nn")
    return nn.Sequential(layer.to(dtype), getattr(nn, name)())


def _json(path: Path, kind: type, optional: bool = False) -> Any:
    if optional and not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFileError(f"causal_lm: model: {path}: {error}") from None
    if not isinstance(found, kind):
        raise InvalidFileError(f"causal_lm: model: {path}: expected a JSON {kind.__name__}, got {found!r:.80}")
    return found


def _listed(names: Any) -> str:
    texts = [repr(name) for name in names]
    return ", ".join(texts[:-1]) + " or " + texts[-1]
