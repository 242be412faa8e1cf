"""modules.json of sentence-transformers: poolings, dense layers and normalisation behind a base model; prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from untorch.export.errors import CompileError
from untorch.export.recipes.source import Source

__all__ = ["Modules", "read_modules", "read_prompts"]

# Flags of a Pooling module's config. Several at once are concatenated, in this order.
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS = {"Tanh": nn.Tanh, "Identity": nn.Identity, "ReLU": nn.ReLU, "GELU": nn.GELU, "Sigmoid": nn.Sigmoid}


@dataclass
class Modules:
    """poolings: concatenated. layers: behind them, in their order. names: of the layers, for people."""

    poolings: list[str]
    layers: list[nn.Module] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


class Normalize(nn.Module):
    """Vectors of length 1."""

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """[batch, width]."""
        return nn.functional.normalize(embeddings, dim=1)


def read_modules(source: Source) -> Modules:
    """Without a modules.json: the mean over the tokens, normalised. Raises CompileError for what is not served."""
    modules = source.read_json("modules.json")
    if modules is None:
        return Modules(["mean"], [Normalize()], ["Normalize"])
    found = Modules(["mean"])
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            found.poolings = _read_poolings(source, module["path"])
        elif kind == "Normalize":
            found.layers.append(Normalize())
            found.names.append(kind)
        elif kind == "Dense":
            found.layers.append(_read_dense(source, module["path"]))
            found.names.append(kind)
        elif kind != "Transformer":
            raise CompileError(
                f"export_folder: {source.folder}: modules.json has the module {module.get('type')!r}: expected "
                "Transformer, Pooling, Dense and Normalize: write a script for untorch export SCRIPT:FUNCTION"
            )
    return found


def _read_poolings(source: Source, path: str) -> list[str]:
    config: dict[str, Any] = source.read_json(f"{path}/config.json") or {}
    # Older configs have a flag each, newer ones a name.
    flags = [name for flag, name in _POOLINGS.items() if config.get(flag)]
    named = config.get("pooling_mode")
    names = [named] if isinstance(named, str) else list(named) if isinstance(named, list) else flags
    poolings = [{"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}.get(one, one) for one in names]
    if not poolings or set(poolings) - set(_POOLINGS.values()):
        raise CompileError(
            f"export_folder: {source.folder}: {path}/config.json: expected a pooling of "
            f"{', '.join(_POOLINGS.values())}, got {config!r:.200}"
        )
    return poolings


def _read_dense(source: Source, path: str) -> nn.Module:
    """A linear layer and its activation, of safetensors or of torch's file."""
    config: dict[str, Any] = source.read_json(f"{path}/config.json") or {}
    name = str(config.get("activation_function", "")).rpartition(".")[2]
    if name not in _ACTIVATIONS or "in_features" not in config or "out_features" not in config:
        raise CompileError(
            f"export_folder: {source.folder}: {path}/config.json: expected in_features, out_features and an "
            f"activation_function of {', '.join(_ACTIVATIONS)}, got {config!r:.200}"
        )
    linear = nn.Linear(int(config["in_features"]), int(config["out_features"]), bool(config.get("bias", True)))
    folder = source.folder / path
    if (folder / "model.safetensors").is_file():
        from safetensors.torch import load_file

        weights = load_file(folder / "model.safetensors")
    elif (folder / "pytorch_model.bin").is_file():
        weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise CompileError(f"export_folder: {folder}: expected model.safetensors or pytorch_model.bin, got neither")
    try:
        linear.load_state_dict({key.removeprefix("linear."): value.float() for key, value in weights.items()})
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise CompileError(f"export_folder: {folder}: its weights are not those of its config: {text}") from None
    return nn.Sequential(linear, _ACTIVATIONS[name]()).eval()


def read_prompts(source: Source) -> dict[str, Any]:
    """The section's prompts by name, and the name of the one that texts have by default."""
    config = source.read_json("config_sentence_transformers.json") or {}
    prompts = {str(name): str(text) for name, text in (config.get("prompts") or {}).items()}
    default = config.get("default_prompt_name")
    return {"prompts": json.loads(json.dumps(prompts)), "default_prompt": default if default in prompts else None}
