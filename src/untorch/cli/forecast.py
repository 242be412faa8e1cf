"""``untorch export --check``: a model's operators and what the runtime lacks of them; nothing is compiled."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from untorch.cli.output import make_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["forecast", "render_forecast"]


def forecast(model: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """The operators of each method with their counts, and everything that would be refused.

    Raises CompileError when torch.export itself fails.
    """
    from untorch.export.coverage import predict_missing

    methods, missing = [], []
    for name, program in _programs(model, keywords).items():
        counts: Counter[str] = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")
        methods.append({"name": name, "operators": dict(sorted(counts.items()))})
        missing += [
            {"method": name, "kind": item.kind, "name": item.name, "sources": list(item.sources), "text": str(item)}
            for item in predict_missing(program)
        ]
    return {"methods": methods, "missing": missing}


def _programs(model: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    import torch

    from untorch.export.errors import CompileError
    from untorch.runtime.errors import InvalidArgumentError

    entries = model if isinstance(model, dict) else {"forward": {"model": model, **keywords}}
    programs: dict[str, Any] = {}
    for name, entry in entries.items():
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {"model": entry}
        if isinstance(entry, tuple) and len(entry) == 2:
            fields = {"model": entry[0], "args": entry[1]}
        module = fields.get("model")
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
    """Tables of the operators, and what is missing."""
    for method in document["methods"]:
        console.print(f"method {method['name']}", style="bold")
        console.print(make_table(None, ("operator", ">nodes"), method["operators"].items()))
    if not document["missing"]:
        console.print("Nothing is missing as far as can be told before compiling.")
        return
    console.print(f"missing: {len(document['missing'])}", style="bold")
    for item in document["missing"]:
        console.print(f"  {item['method']}: {item['text']}", soft_wrap=True)
