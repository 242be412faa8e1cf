"""What ``untorch quantize-report`` measures by running models, and the rules that its recipe gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from untorch.runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from untorch.export.method import Method
    from untorch.progress import Progress
    from untorch.quant import QuantizationReport, QuantizeOptions, QuantizeRules

__all__ = ["check_recipe", "measure_sensitivity", "read_target", "recipe_rules"]


def read_target(target: str | None, dtype: str) -> Literal["cpu", "cuda"]:
    """What the layers are for. Raises InvalidArgumentError."""
    if target not in (None, "cpu", "cuda"):
        raise InvalidArgumentError(f"--target {target}: expected cpu or cuda")
    if dtype == "fp8" and target == "cpu":
        raise InvalidArgumentError("--quantize fp8: it is for GPUs: leave --target cpu out, or take int8")
    return "cuda" if target == "cuda" or dtype == "fp8" else "cpu"


def check_recipe(recipe: Path | None, limit: float | None, fallback: str, target: str) -> None:
    """Raises InvalidArgumentError before a model is loaded."""
    if recipe is not None and recipe.suffix.lower() not in (".json", ".toml"):
        raise InvalidArgumentError(f"--recipe {recipe}: expected a name that ends in .json or .toml")
    if limit is not None and recipe is None:
        raise InvalidArgumentError(f"--limit {limit}: it is for the recipe: name its file with --recipe")
    if fallback not in ("none", "int8", "fp8", "int4", "nvfp4"):
        raise InvalidArgumentError(f"--fallback {fallback}: expected none, int8, fp8, int4 or nvfp4")
    if fallback == "fp8" and target == "cpu":
        raise InvalidArgumentError("--fallback fp8: it is for GPUs: give --target cuda")
    if fallback != "none" and limit is None:
        raise InvalidArgumentError(f"--fallback {fallback}: it is for layers above a limit: give one with --limit")


def measure_sensitivity(
    loaded: Any,
    source: str,
    methods: Sequence[Method],
    options: QuantizeOptions,
    progress: Progress,
    target: Literal["cpu", "cuda"],
) -> dict[str, dict[str, float]]:
    """By method and layer, on the example inputs. Raises InvalidArgumentError where a script gives none."""
    import torch

    from untorch.quant import layer_sensitivity

    found = {}
    for method in methods:
        args, kwargs = _inputs(loaded, source, method.name)
        if args is None and kwargs is None:
            raise InvalidArgumentError(
                f"{source}: method {method.name!r}: sensitivity needs example inputs: return (model, args)"
            )
        if isinstance(method.model, torch.nn.Module):
            with progress.step(f"{method.name}: sensitivity") as show:
                batches = [(tuple(args or ()), dict(kwargs or {}))]
                found[method.name] = layer_sensitivity(method.model, options, batches, show, target)
    return found


def _inputs(loaded: Any, source: str, name: str) -> tuple[Any, Any]:
    import torch

    from untorch.cli.script import export_arguments

    if isinstance(loaded, torch.nn.Module):
        return None, None
    _, keywords = export_arguments(loaded, source)
    if "methods" not in keywords:
        return keywords.get("args"), keywords.get("kwargs")
    entry = keywords["methods"][name]
    if isinstance(entry, Mapping):
        return entry.get("args"), entry.get("kwargs")
    return (entry[1], None) if isinstance(entry, tuple) else (None, None)


def recipe_rules(
    report: QuantizationReport, options: QuantizeOptions, measured: Mapping[str, float], limit: float | None,
    fallback: str,
) -> QuantizeRules:  # fmt: skip
    """A rule for each layer that was quantised: as it was, or with ``fallback`` above the limit."""
    from untorch.quant import QuantizeOptions, QuantizeRules

    kept = QuantizeOptions(options.dtype, options.group_size, options.method, prefill=options.prefill)
    other = None if fallback == "none" else QuantizeOptions(fallback)  # type: ignore[arg-type]
    rules: dict[str, QuantizeOptions | None] = {}
    for layer in report.layers:
        # Several layers may share a weight, such as lm_head and an embedding; the parts of experts are one module.
        every = [*layer.names, *(name.rpartition(".")[0] for name in layer.names)]
        for name in [name for name in every if name in measured] or layer.names[:1]:
            rules[name or "*"] = other if limit is not None and measured.get(name, 0.0) > limit else kept
    return QuantizeRules(tuple(rules.items()))
