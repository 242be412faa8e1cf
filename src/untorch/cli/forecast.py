"""``untorch export --check``: a model's operators, which of them it calls, and what the runtime lacks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from untorch.cli.output import make_table

if TYPE_CHECKING:
    from rich.console import Console

    from untorch.export.options import ExportOptions

__all__ = ["forecast", "render_forecast"]


def forecast(
    model: Any,
    keywords: dict[str, Any],
    fields: dict[str, Any] | None = None,
    device: str = "cpu",
    arch: str | None = None,
) -> dict[str, Any]:
    """The operators of each method with their counts, what of them would be called, and what would be refused.

    ``fields`` are those of ExportOptions. Raises CompileError when torch.export or the code generation fails.
    """
    from untorch.export.fallbacks import forecast_fallbacks
    from untorch.export.options import resolve_options

    options = resolve_options(None, fields or {})
    methods, missing = [], []
    for name, program in _programs(model, keywords, options).items():
        counts: Counter[str] = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")
        found = forecast_fallbacks(program, options, device, arch)
        entries = [
            {
                "operator": item.operator, "kind": item.kind, "name": item.name, "served": item.served,
                "sources": list(item.sources), "todo": item.todo,
            }
            for item in found
        ]  # fmt: skip
        methods.append({"name": name, "operators": dict(sorted(counts.items())), "fallbacks": entries})
        missing += [
            {"method": name, "kind": item.kind, "name": item.name, "sources": list(item.sources), "text": str(item)}
            for item in found
            if not item.served
        ]
    return {"methods": methods, "missing": missing}


def _programs(model: Any, keywords: dict[str, Any], options: ExportOptions) -> dict[str, Any]:
    import torch

    from untorch.export.errors import CompileError
    from untorch.export.quantize import quantized_module
    from untorch.runtime.errors import InvalidArgumentError

    entries = model if isinstance(model, dict) else {"forward": {"model": model, **keywords}}
    programs: dict[str, Any] = {}
    quantized = options.quantize_methods([str(name) for name in entries])
    for name, entry in entries.items():
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {"model": entry}
        if isinstance(entry, tuple) and len(entry) == 2:
            fields = {"model": entry[0], "args": entry[1]}
        module = fields.get("model")
        if name in quantized:
            module = quantized_module(name, module, quantized[name], options.quantizes_by_name)
        if isinstance(module, torch.export.ExportedProgram):
            programs[name] = module
            continue
        if not isinstance(module, torch.nn.Module):
            raise InvalidArgumentError(f"method '{name}': expected a torch.nn.Module, got {type(module).__name__}")
        args, kwargs = fields.get("args"), fields.get("kwargs")
        if not isinstance(args, tuple | list) and not (args is None and kwargs):
            got = type(args).__name__
            raise InvalidArgumentError(f"method '{name}': expected a tuple of example inputs, got {got}")
        try:
            with torch.no_grad():
                programs[name] = torch.export.export(
                    module, tuple(args or ()), kwargs, dynamic_shapes=fields.get("dynamic_shapes")
                )
        except Exception as error:
            raise CompileError(f"method '{name}': torch.export failed: {error}") from error
    return programs


def render_forecast(console: Console, document: dict[str, Any]) -> None:
    """Tables of the operators and of those that are called, and what is missing."""
    for method in document["methods"]:
        console.print(f"method {method['name']}", style="bold")
        console.print(make_table(None, ("operator", ">nodes"), method["operators"].items()))
        rows = [
            (
                item["operator"],
                item["name"],
                "yes" if item["served"] else "no",
                "\n".join(item["sources"]),
                item["todo"],
            )
            for item in method["fallbacks"]
        ]
        if rows:
            console.print(make_table(None, ("called", "C function or kernel", "served", "source", "to do"), rows))
        else:
            console.print("Everything is compiled: the model calls no operator.")
    if not document["missing"]:
        console.print("Nothing is missing.")
        return
    console.print(f"missing: {len(document['missing'])}", style="bold")
    for item in document["missing"]:
        console.print(f"  {item['method']}: {item['text']}", soft_wrap=True)
