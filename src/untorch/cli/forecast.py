"""``untorch export --check``: a model's operators, which of them it calls, and what the runtime lacks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from untorch.cli.output import make_table

if TYPE_CHECKING:
    from rich.console import Console

    from untorch.export.method import Method

__all__ = ["forecast", "render_forecast"]


def forecast(
    model: Any,
    keywords: dict[str, Any],
    fields: dict[str, Any] | None = None,
    device: str | None = None,
    arch: Any = None,
) -> dict[str, Any]:
    """The operators of each method with their counts, what of them would be called, and what would be refused.

    ``keywords`` are arguments of export(); ``fields`` (of ExportOptions), ``device`` and ``arch`` stand above them.
    Raises CompileError when torch.export or the code generation fails.
    """
    import torch

    from untorch.export.fallbacks import forecast_fallbacks, merge_fallbacks
    from untorch.export.methods import plan_methods, read_methods
    from untorch.export.options import resolve_options
    from untorch.export.quantize import quantized_module
    from untorch.export.tracing import export_program

    given = dict(keywords)
    own_device, own_arch = given.pop("device", None), given.pop("arch", None)
    device, arch = device or own_device or "cpu", arch or own_arch
    names = ("args", "kwargs", "dynamic_shapes", "methods")
    requests = read_methods(model, *(given.pop(name, None) for name in names))
    options = resolve_options(given.pop("options", None), {**given, **(fields or {})})
    quantized = options.quantize_methods([request.method.name for request in requests])
    planned: dict[str, list[Method]] = {}
    for method in plan_methods(requests, device, arch, options):
        planned.setdefault(method.name, []).append(method)
    methods, missing = [], []
    for name, variants in planned.items():
        method = variants[0]
        if name in quantized:
            others = [request.method.model for request in requests if request.method.name != name]
            method.model = quantized_module(
                name, method.model, quantized[name], options.quantizes_by_name,
                [other for other in others if isinstance(other, torch.nn.Module)], method.target,
            )  # fmt: skip
        with torch.no_grad():
            program = export_program(method, False).program
        counts: Counter[str] = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")
        found = merge_fallbacks(forecast_fallbacks(program, method.options, method.target) for method in variants)
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
